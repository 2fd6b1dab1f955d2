"""KeyedProcess: what a user may write, what is refused, and what is in its snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.api.job_definition import WrittenJob
from headgate.api.stream import output_of
from headgate.errors import PlanError, StateError, UserCodeError
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.state.snapshot import RestoredState
from headgate.tests.support.operators import in_place, operator_context


class Clock:
    ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000


class Timers:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: None


class Output:
    def __init__(self) -> None:
        self.batches: list[Any] = []

    def emit(self, batch: Any) -> None:
        self.batches.append(batch)

    def emit_watermark(self, timestamp: int) -> None:
        pass


class Subtask:
    """One subtask of the process step of a job."""

    def __init__(
        self,
        function: Any,
        schema: pa.Schema | None = None,
        key: Any = None,
        event_time: bool = True,
    ) -> None:
        job = WrittenJob("test")
        from headgate.connectors import from_list, generator

        rows = (
            from_list([])
            if schema is None
            else generator(
                {"k": {"kind": "pattern", "prefix": "k", "distinct": 2}, "n": "sequence"}
            )
        )
        stream = job.read(rows, name="in")
        if event_time:
            stream = stream.event_time("n" if schema is not None else lambda record: 0)
        keyed = stream.key_by("k") if schema is not None else stream.key_with(key or first)
        node = output_of(keyed.process(function, name="p")).node
        self.operator = node.factory()
        self.operator.output = self.output = Output()
        self.clock, self.timers = Clock(), Timers()
        self.operator.open(
            operator_context(
                max_parallelism=128,
                operator_name="p",
                clock=self.clock,
                timers=self.timers,
                metrics=None,
                run_in_thread=in_place,
            )
        )

    def push(self, records: list[Any], times: list[int] | None = None) -> list[Any]:
        self.output.batches.clear()
        stamps = None if times is None else np.array(times, np.int64)
        self.operator.process(ObjectBatch(records, stamps), 0)
        return [record for batch in self.output.batches for record in batch.records]

    def stored(self) -> RestoredState:
        snapshot = self.operator.snapshot(1)
        items = {
            name: cut.items() if callable(cut.items) else cut.items
            for name, cut in snapshot.items.items()
        }
        return RestoredState(
            tables={name: cut.make(None) for name, cut in snapshot.tables.items()},
            items=items,
            states={info.name: info for info in self.operator.states()},
        )


def first(record: Any) -> Any:
    return record[0]


class Point(msgspec.Struct):
    x: int
    tags: list[str] = []


class Sum:
    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], value: int) -> list[int]:
        accumulator.append(value)
        return accumulator

    def result(self, accumulator: list[int]) -> int:
        return sum(accumulator)


class All(hg.KeyedProcess[str, Any, Any]):
    total = hg.ValueState[float](default=0.0)
    point = hg.ValueState[Point](name="place")
    elements = hg.ListState[int]()
    entries = hg.MapState[str, Point]()
    added = hg.ReducingState[int](lambda a, b: a + b)
    sums = hg.AggregatingState[int, list[int], int](Sum)
    split = hg.OperatorListState[int]()
    union = hg.OperatorListState[str]("union")
    rules = hg.BroadcastState[str, int]()

    def open(self, ctx: Any) -> None:
        self.rules.put("limit", 5)

    def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
        _, n = record
        self.total.set(self.total.get() + n)
        point = self.point.get() or Point(0)
        point.x += n
        self.point.set(point)
        point.x = -1
        point.tags.append("not state")
        self.elements.add(n)
        self.entries.put(str(n), Point(n))
        self.added.add(n)
        self.sums.add(n)
        self.split.add(n)
        self.union.add(ctx.key)
        yield ctx.key, self.total.get(), self.point.get().x, self.elements.get(), self.sums.get()


def test_all_kinds_and_their_snapshot() -> None:
    subtask = Subtask(All())
    assert subtask.push([("a", 1), ("b", 2), ("a", 3)]) == [
        ("a", 1.0, 1, [1], 1),
        ("b", 2.0, 2, [2], 2),
        ("a", 4.0, 4, [1, 3], 4),
    ]
    stored = subtask.stored()
    table = stored.tables["place"]
    assert table.schema.field("value").type == pa.struct(
        [
            pa.field("x", pa.int64(), False),
            pa.field("tags", pa.list_(pa.field("item", pa.string(), False))),
        ]
    )
    rows = {row["key"]: row["value"] for row in table.to_pylist()}
    assert rows == {"a": {"x": 4, "tags": []}, "b": {"x": 2, "tags": []}}
    assert stored.tables["elements"].column_names == ["key_group", "key", "position", "value"]
    kinds = {name: info.kind for name, info in stored.states.items()}
    assert kinds == {
        "total": "value", "place": "value", "elements": "list", "entries": "map",
        "added": "reducing", "sums": "aggregating", "split": "split", "union": "union",
        "rules": "broadcast", "function_watermark": "window",
    }  # fmt: skip
    again = Subtask(All())
    again.operator.restore(stored)
    assert again.push([("a", 10)]) == [("a", 14.0, 14, [1, 3, 10], 14)]
    assert len(stored.items["split"]) == 3
    assert len(stored.items["rules"]) == 1


def test_operator_lists_are_dealt_out_as_they_say() -> None:
    subtask = Subtask(All())
    subtask.push([("a", 1), ("b", 2)])
    snapshot = subtask.operator.snapshot(1)
    modes = {name: cut.redistribution for name, cut in snapshot.items.items()}
    assert modes == {"split": "split", "union": "union", "rules": "broadcast"}
    stored = subtask.stored()
    stored.items["split"] = stored.items["split"][1:]
    again = Subtask(All())
    again.operator.restore(stored)
    function = again.operator._function
    assert function.split.get() == [2]
    assert function.union.get() == ["a", "b"]
    assert dict(function.rules.items()) == {"limit": 5}


def test_broadcast_state_is_read_only_for_keyed_records() -> None:
    class Writes(hg.KeyedProcess[str, Any, Any]):
        rules = hg.BroadcastState[str, int]()

        def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
            self.rules.put("a", 1)

    with pytest.raises(StateError, match="read-only"):
        Subtask(Writes()).push([("a", 1)])


def test_values_of_the_wrong_type_are_the_users_error() -> None:
    class Wrong(hg.KeyedProcess[str, Any, Any]):
        total = hg.ValueState[int]()

        def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
            self.total.set(record[1])

    for value in ("text", 1.5, True, 2**63, None):
        with pytest.raises(UserCodeError, match="record="):
            Subtask(Wrong()).push([("a", value)])
    with pytest.raises(StateError, match="declared type"):
        Subtask(Wrong()).push([(True, 1)])


def test_assigning_to_a_state_is_found_at_the_next_checkpoint() -> None:
    class Assigns(hg.KeyedProcess[str, Any, Any]):
        total = hg.ValueState[int](default=0)

        def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
            self.total = 5  # type: ignore[assignment]

    subtask = Subtask(Assigns())
    subtask.push([("a", 1)])
    with pytest.raises(StateError, match="assigned to attribute=`total`"):
        subtask.operator.snapshot(1)


class Adding(hg.KeyedProcess[str, Any, Any]):
    total = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
        self.total.set(self.total.get() + record[1])
        yield type(self).__name__, isinstance(self, Adding), self.total.get()


class Hooked(Adding):
    """Notices its subclasses, which must not be made behind its back."""

    def __init_subclass__(cls) -> None:
        raise AssertionError

    def __init__(self) -> None:
        self.total_of = "all"


class Slotted(Adding):
    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 7

    def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
        assert self.step == 7
        return super().on_record(record, ctx)


@dataclass(frozen=True)
class Frozen(Adding):
    step: int = 7

    def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
        assert self.step == 7
        return super().on_record(record, ctx)


class Guessing(Adding):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.mark.parametrize("kind", [Adding, Hooked, Slotted, Frozen, Guessing])
def test_classes_of_functions_may_be_special(kind: type[Adding]) -> None:
    function = kind()
    subtask = Subtask(function)
    made = subtask.push([("a", 1), ("a", 2), ("b", 3)])
    assert made == [(kind.__name__, True, total) for total in (1, 3, 3)]
    assert subtask.stored().tables["total"].num_rows == 2
    with pytest.raises(PlanError, match="does not run in a job"):
        function.total.get()  # the user's own object


def test_a_deleted_state_is_found_at_the_next_checkpoint() -> None:
    class Deletes(Adding):
        def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
            del self.total
            yield from ()

    for kind in (Deletes, type("Guesses", (Deletes, Guessing), {})):
        subtask = Subtask(kind())
        subtask.push([("a", 1)])
        with pytest.raises(StateError, match="assigned to attribute=`total`"):
            subtask.operator.snapshot(1)


def test_columns_in_and_keys_of_columns() -> None:
    class Count(hg.KeyedProcess[str, Any, Any]):
        n = hg.ValueState[int](default=0)

        def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
            self.n.set(self.n.get() + record.n)
            yield ctx.key, self.n.get(), ctx.timestamp

    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    subtask = Subtask(Count(), schema)
    data = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b", "a"]), pa.array([1, 2, 3])], schema=schema
    )
    subtask.operator.process(ColumnBatch(data, np.array([5, 6, 7])), 0)
    assert subtask.output.batches[0].records == [("a", 1, 5), ("b", 2, 6), ("a", 4, 7)]
    assert subtask.output.batches[0].timestamps.tolist() == [5, 6, 7]
    assert subtask.stored().tables["n"].column_names == ["key_group", "k", "value"]


def test_each_subtask_has_its_own_object() -> None:
    class Mine(hg.KeyedProcess[str, Any, Any]):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def on_record(self, record: Any, ctx: hg.Context[str]) -> list[int]:
            self.calls.append(record)
            return [len(self.calls)]

    function = Mine()
    one, two = Subtask(function), Subtask(function)
    assert one.push([("a", 1), ("a", 1)]) == [1, 2]
    assert two.push([("a", 1)]) == [1]
    assert function.calls == []


class Plain(hg.KeyedProcess[str, Any, Any]):
    def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
        return None


class Twice(Plain):
    a = hg.ValueState[int]()
    b = hg.ValueState[int](name="a")


class FloatKeys(hg.KeyedProcess[float, Any, Any]):
    def on_record(self, record: Any, ctx: hg.Context[float]) -> None:
        return None


class Async(hg.KeyedProcess[str, Any, Any]):
    async def on_record(self, record: Any, ctx: Any) -> None:  # type: ignore[override]
        return None


class BadTtl(Plain):
    a = hg.ValueState[int](ttl="soon")


class BadDefault(Plain):
    a = hg.ValueState[int](default="none")  # type: ignore[arg-type]


class Unknown(Plain):
    a = hg.ValueState["NoSuchClass"]()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Plain, "an instance, got the class"),
        (lambda record, ctx: None, "needs a KeyedProcess"),
        (Twice(), "two states have the name `a`"),
        (FloatKeys(), "cannot be a key type=`float`"),
        (Async(), "is async"),
        (BadTtl(), "ttl of state `a`"),
        (BadDefault(), "default of state `a`: the state holds int, not str"),
        (Unknown(), "NoSuchClass"),
    ],
)
def test_mistakes_are_found_before_anything_runs(function: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Subtask(function)


def test_descriptors_refuse_what_cannot_work() -> None:
    with pytest.raises(PlanError, match="needs migrate="):
        hg.ValueState[int](version=2)
    with pytest.raises(PlanError, match="split or union"):
        hg.OperatorListState[int]("broadcast")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="method `create`"):
        hg.AggregatingState[int, int, int](object())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="does not run in a job"):
        All().total.get()


def test_expired_state_goes_in_the_background_too() -> None:
    class Brief(hg.KeyedProcess[str, Any, Any]):
        total = hg.ValueState[int](default=0, ttl=hg.StateTtl("1s", cleanup_per_access=0))

        def on_record(self, record: Any, ctx: hg.Context[str]) -> list[int]:
            self.total.set(self.total.get() + 1)
            return [self.total.get()]

    subtask = Subtask(Brief())
    assert subtask.push([("a", 0), ("a", 0), ("b", 0)]) == [1, 2, 1]
    subtask.clock.ms += 1000
    assert subtask.stored().tables["total"].num_rows == 0
    assert len(list(subtask.operator._backend.addresses("total"))) == 2
    subtask.timers.callbacks.pop()()
    assert list(subtask.operator._backend.addresses("total")) == []
    assert subtask.push([("a", 0)]) == [1]


def test_event_time_to_live_follows_the_watermark() -> None:
    class Brief(hg.KeyedProcess[str, Any, Any]):
        total = hg.ValueState[int](default=0, ttl=hg.StateTtl("1s", time="event"))

        def on_record(self, record: Any, ctx: hg.Context[str]) -> list[int]:
            self.total.set(self.total.get() + 1)
            return [self.total.get()]

    subtask = Subtask(Brief())
    assert subtask.push([("a", 0), ("a", 0)], [5_000, 4_000]) == [1, 2]
    subtask.clock.ms += 10**9
    subtask.operator.on_watermark(5_999)
    assert subtask.push([("a", 0)], [100]) == [3]
    subtask.operator.on_watermark(6_000)
    assert subtask.push([("a", 0)], [7_000]) == [1]


def test_the_state_is_closed_although_the_users_close_fails() -> None:
    class Fails(Plain):
        def close(self) -> None:
            raise RuntimeError("no")

    subtask, closed = Subtask(Fails()), []
    subtask.push([("a", 1)])
    subtask.operator._backend.close = lambda: closed.append(True)
    with pytest.raises(RuntimeError, match="no"):
        subtask.operator.close()
    assert closed == [True]


class Event(hg.KeyedProcess[str, Any, Any]):
    seen = hg.MapState[str, int](ttl=hg.StateTtl("30m", time="event"))

    def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
        return None


def test_event_time_to_live_needs_event_time() -> None:
    """Without it a value would have expired before it is first read."""
    with pytest.raises(PlanError, match="`seen` expires by event time") as caught:
        Subtask(Event(), event_time=False)
    assert "test_process.py" in caught.value.where


@pytest.mark.parametrize("make", [hg.OperatorListState, hg.BroadcastState])
def test_types_of_operator_state_are_checked_before_anything_runs(make: Any) -> None:
    class Unclear(Plain):
        pass

    parameters = "NoSuchClass" if make is hg.OperatorListState else (str, "NoSuchClass")
    Unclear.things = make[parameters]()  # type: ignore[attr-defined]
    Unclear.things.__set_name__(Unclear, "things")  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="NoSuchClass") as caught:
        Subtask(Unclear())
    assert "test_process.py" in caught.value.where


def test_what_cannot_be_restored_is_said_with_step_state_and_line() -> None:
    class Old(Plain):
        total = hg.ValueState[str]()
        shapes = hg.ValueState[Any]()

        def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
            self.total.set("x")
            self.shapes.set(Gone())

    class New(Plain):
        total = hg.ValueState[int]()

    class Same(Plain):
        shapes = hg.ValueState[Any]()

    old = Subtask(Old())
    old.push([("a", 1)])
    stored = old.stored()
    with pytest.raises(StateError, match="step=`p`") as caught:
        Subtask(New()).operator.restore(stored)
    assert "state `total`" in caught.value.message
    assert "=``" not in caught.value.message
    assert "test_process.py" in caught.value.where
    del globals()["Gone"]
    with pytest.raises(StateError, match="state `shapes`.*Gone"):
        Subtask(Same()).operator.restore(stored)


class Gone:
    """Unpickling needs its name."""
