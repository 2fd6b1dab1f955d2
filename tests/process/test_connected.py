"""Functions of two inputs: shared keys, state and timers; broadcast records and who may write what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.api.job_definition import WrittenJob
from headgate.api.stream import output_of
from headgate.connectors import generator, sequence
from headgate.errors import PlanError, StateError, UserCodeError

Pair = tuple[str, int]


def key_of(record: Pair) -> str:
    return record[0]


class Balance(hg.CoProcess[str, Pair, Pair, Any]):
    """Adds the first, subtracts the second, and closes the account at its time."""

    total = hg.ValueState[int](default=0)

    def on_first(self, record: Pair, ctx: hg.Context[str]) -> Iterator[Any]:
        self.total.set(self.total.get() + record[1])
        ctx.event_time.at(100, tag="close")
        yield "in", ctx.key, self.total.get()

    def on_second(self, record: Pair, ctx: hg.Context[str]) -> Iterator[Any]:
        self.total.set(self.total.get() - record[1])
        yield "out", ctx.key, self.total.get()

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
        yield "close", ctx.key, self.total.get()


def balance_of(world: Any) -> Any:
    one, two = world.sources(names=("one", "two"))
    return one.key_with(key_of).connect(two.key_with(key_of)).process(Balance(), name="p")


def test_both_inputs_share_state_and_timers(steps: Any, world: Any) -> None:
    step = steps(balance_of(world), 2)
    step.push([("a", 5), ("b", 1)], [1, 2], key=key_of)
    step.push([("a", 2)], [3], key=key_of, at=1)
    step.restart(3)
    step.push([("b", 10)], [4], key=key_of, at=1)
    step.watermark(100)
    assert sorted(step.take()) == [
        (("close", "a", 3), 100),
        (("close", "b", -9), 100),
        (("in", "a", 5), 1),
        (("in", "b", 1), 2),
        (("out", "a", 3), 3),
        (("out", "b", -9), 4),
    ]


def columns(job: WrittenJob, name: str, **fields: Any) -> Any:
    schema = {field: sequence() for field in fields}
    stream = job.read(generator(schema), name=name)
    casts = [f"CAST({field} AS {kind}) AS {field}" for field, kind in fields.items()]
    return stream.select(*casts)


def connect(first: Any, second: Any) -> Any:
    return first.connect(second).process(Balance(), name="p")


def test_keys_of_columns_must_be_alike() -> None:
    job = WrittenJob("test")
    ints = columns(job, "ints", k="BIGINT", n="BIGINT").key_by("k")
    small = columns(job, "small", id="SMALLINT", n="BIGINT")
    texts = columns(job, "texts", k="TEXT").key_by("k")
    with pytest.raises(PlanError, match=r"key \(k: int64\), `select-\d` has \(k: .*string"):
        connect(ints, texts)
    with pytest.raises(PlanError, match=r"has \(id: int16, n: int64\)"):
        connect(ints, small.key_by("id", "n"))
    node = output_of(connect(small.key_by("id"), ints)).node
    (info,) = (info for info in node.factory().states() if info.name == "total")
    assert info.arrow_schema().field("id").type == pa.int64()


def test_what_cannot_be_connected_is_said_with_the_line(world: Any) -> None:
    (timed,) = world.sources()
    (other,) = world.sources()
    keyed = timed.key_with(key_of)
    for wrong, message in [
        (other.key_with(key_of), "the same job"),
        (timed, "needs a keyed or a broadcast stream, got `Stream`"),
        (3, "got `int`"),
    ]:
        with pytest.raises(PlanError, match=message) as caught:
            keyed.connect(wrong)
        assert "test_connected.py" in caught.value.where
    job = WrittenJob("test")
    one = job.read(generator({"n": sequence()}), name="one")
    two = job.read(generator({"n": sequence()}), name="two").event_time("n")
    with pytest.raises(PlanError, match="`one` has no event time, `event_time` has: time would"):
        two.key_by("n").connect(one.broadcast())
    with pytest.raises(PlanError, match="`rules` has no event time"):
        two.key_by("n").connect(one.broadcast(name="rules"))


class Rules(hg.BroadcastProcess[str, Pair, Pair, Any]):
    """Says which rules a record breaks; rules come by broadcast, negative ones go."""

    limits = hg.BroadcastState[str, int]()
    seen = hg.ValueState[int](default=0)
    rejected = hg.SideOutput[Pair]()

    def on_record(self, record: Pair, ctx: hg.Context[str]) -> Iterator[Any]:
        self.seen.set(self.seen.get() + record[1])
        for name, limit in sorted(self.limits.items()):
            if self.seen.get() > limit:
                yield ctx.key, name
        if not list(self.limits.keys()):
            ctx.emit(self.rejected, record)

    def on_broadcast(self, record: Pair, ctx: hg.BroadcastContext[str]) -> Iterator[Any]:
        name, limit = record
        if limit < 0:
            self.limits.remove(name)
            return
        self.limits.put(name, limit)
        found: list[Any] = []
        ctx.for_each_key(self.seen, lambda key, seen: found.append((key, seen.get())))
        yield from ((name, key) for key, seen in found if seen > limit)


def rules_of(world: Any, function: Any = None) -> Any:
    keyed, rules = world.sources(names=("keyed", "rules"))
    connected = keyed.key_with(key_of).connect(rules.broadcast(name="rules"))
    return connected.process(function or Rules(), name="p")


def test_broadcast_records_reach_every_subtask_and_their_state_every_new_one(
    steps: Any, world: Any
) -> None:
    step = steps(rules_of(world), 2)
    keys = [f"k{number}" for number in range(6)]
    step.push([(key, 5) for key in keys], [1] * 6, key=key_of)
    assert step.take() == []
    assert sorted(step.take("rejected")) == [((key, 5), 1) for key in keys]
    step.push([("low", 4), ("high", 9)], [2, 3], at=1)
    assert sorted(step.take()) == [(("low", key), 2) for key in keys]
    for parallelism in (3, 1, 2):
        step.restart(parallelism)
        step.push([(key, 0) for key in keys], [4] * 6, key=key_of)
        assert sorted(step.take()) == [((key, "low"), 4) for key in keys]
    step.push([("low", -1)], [5], at=1)
    step.push([(key, 5) for key in keys], [6] * 6, key=key_of)
    assert sorted(step.take()) == [((key, "high"), 6) for key in keys]


def test_for_each_key_reads_and_writes_the_state_of_each_key(steps: Any, world: Any) -> None:
    class Reset(Rules):
        names = hg.MapState[str, int]()

        def on_record(self, record: Pair, ctx: hg.Context[str]) -> Iterator[Any]:
            self.names.put(str(record[1]), 1)
            self.names.put("x", 1)
            self.seen.set(record[1])
            yield from ()

        def on_broadcast(self, record: Pair, ctx: hg.BroadcastContext[str]) -> Iterator[Any]:
            assert ctx.key is None
            found: list[Any] = []

            def visit(key: str, names: Any) -> None:
                found.append((key, sorted(names.keys()), self.seen.get()))
                names.clear()
                self.seen.set(-1)

            ctx.for_each_key(self.names, visit)
            ctx.for_each_key(self.seen, lambda key, seen: found.append((key, seen.get())))
            return iter([sorted(found, key=repr)])

    step = steps(rules_of(world, Reset()))
    step.push([("a", 1), ("b", 2)], [1, 2])
    step.push([("go", 1), ("on", 2)], [3, 4], at=1)
    first = [("a", -1), ("a", ["1", "x"], 1), ("b", -1), ("b", ["2", "x"], 2)]
    assert step.take() == [(first, 3), ([("a", -1), ("b", -1)], 4)]


def test_for_each_key_uses_state_that_expires_at_the_time_of_the_broadcast_record(
    steps: Any, world: Any
) -> None:
    class Fading(Rules):
        seen = hg.ValueState[int](default=0, ttl=hg.StateTtl("10ms", time="event"))

        def on_record(self, record: Pair, ctx: hg.Context[str]) -> Iterator[Any]:
            if record[1]:
                self.seen.set(record[1])
            yield self.seen.get()

        def on_broadcast(self, record: Pair, ctx: hg.BroadcastContext[str]) -> None:
            ctx.for_each_key(self.seen, lambda key, seen: seen.set(record[1]))

    step = steps(rules_of(world, Fading()))
    step.push([("a", 1)], [100])
    step.watermark(100)
    step.push([("all", 2)], [108], at=1)
    step.watermark(117)
    step.push([("a", 0)], [118])
    step.watermark(118)
    step.push([("a", 0)], [119])
    assert step.take() == [(1, 100), (2, 118), (0, 119)]


class OneRecord(Rules):
    """Does one forbidden thing."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_record(self, record: Pair, ctx: hg.Context[str]) -> Iterator[Any]:
        if self.what == "write":
            self.limits.put("a", 1)
        if self.what == "write in a generator":
            yield 1
            self.limits.clear()
        ctx.event_time.at(1)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> None:
        self.limits.put("a", 1)

    def on_broadcast(self, record: Pair, ctx: hg.BroadcastContext[str]) -> None:
        if self.what == "set a timer":
            ctx.event_time.at(1)
        if self.what == "use a key's state":
            self.seen.get()
        if self.what == "visit another thing":
            ctx.for_each_key(self.limits, lambda key, state: None)
        if self.what == "write for each key":
            ctx.for_each_key(self.seen, lambda key, state: self.limits.put(key, 1))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("write", "broadcast state is read-only"),
        ("write in a generator", "broadcast state is read-only"),
        ("write in a timer", "broadcast state is read-only"),
        ("set a timer", "no timers in on_broadcast"),
        ("use a key's state", "without a current key"),
        ("visit another thing", "needs a keyed state of this function, got `BroadcastHandle`"),
        ("write for each key", "broadcast state is read-only"),
    ],
)
def test_who_may_not_do_what(world: Any, what: str, message: str) -> None:
    step = world.step(rules_of(world, OneRecord(what)))
    with pytest.raises(StateError, match=message):  # noqa: PT012  which call fails is the parameter
        if what == "write for each key":
            step.operators[0]._function.what = ""
            plain = step.operators[0]._function
            plain.on_record = lambda record, ctx: plain.seen.set(1)
            step.push([("a", 1)], [0])
            plain.what = what
        elif not what.startswith(("set", "use", "visit")):
            step.push([("a", 1)], [0])
        step.push([("r", 1)], [0], at=1)
        step.watermark(1)


def test_an_error_for_a_broadcast_record_names_it(world: Any) -> None:
    class Fails(Rules):
        def on_broadcast(self, record: Pair, ctx: hg.BroadcastContext[str]) -> Iterator[Any]:
            yield 1
            raise ValueError("oh")

    with pytest.raises(UserCodeError, match=r"raised ValueError: oh record=`\('r', 1\)`"):
        world.step(rules_of(world, Fails())).push([("r", 1)], [0], at=1)


def test_functions_and_streams_must_fit(world: Any) -> None:
    one, two = world.sources(names=("one", "two"))
    keyed = one.key_with(key_of)
    pairs = keyed.connect(two.key_with(key_of))
    broadcast = keyed.connect(two.broadcast())

    class Nothing(hg.CoProcess[str, Pair, Pair, Any]):
        def on_first(self, record: Pair, ctx: hg.Context[str]) -> None:
            return None

    for stream, function, message, fix in [
        (keyed, Balance(), "needs a KeyedProcess here, got `Balance`", "connect(other_keyed)"),
        (keyed, Rules(), "needs a KeyedProcess here, got `Rules`", ".broadcast()"),
        (pairs, Rules(), "needs a CoProcess here, got `Rules`", ".broadcast()"),
        (broadcast, Balance(), "needs a BroadcastProcess here", "connect(other_keyed)"),
        (pairs, Balance, "an instance, got the class `Balance`", "Balance()"),
        (pairs, Nothing(), "`Nothing` has no method on_second", "def on_second"),
        (pairs, print, "needs a CoProcess here", "hg.CoProcess"),
    ]:
        with pytest.raises(PlanError, match=message) as caught:
            stream.process(function, name="p")
        assert fix in caught.value.fix
        assert "test_connected.py" in caught.value.where
    with pytest.raises(PlanError, match="no name"):
        pairs.process(Balance())


def test_a_step_with_two_inputs_heads_a_vertex_and_explains_itself(world: Any) -> None:
    from headgate.runtime.plan import make_plan

    result = rules_of(world)
    plan = make_plan(output_of(result).job.graph, job_name="test", parallelism=2)
    (vertex,) = (v for v in plan.vertices if v.head is output_of(result).node)
    edges = plan.inputs_of(vertex)
    assert [(edge.input_index, type(edge.partitioning).__name__) for edge in edges] == [
        (0, "HashFunction"),
        (1, "Broadcast"),
    ]
