"""Timers of process functions: when they fire, in what order, with what, and what survives a restart."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.errors import PlanError, StateError, UsageError, UserCodeError
from headgate.operators.process.context import END_REPEATS_MAX

Record = tuple[Any, ...]


def key_of(record: Record) -> Any:
    return record[0]


class Scripted(hg.KeyedProcess[str, Record, Any]):
    """Does what its records say; timers say when they fired, and some set others."""

    fired = hg.ValueState[int](default=0)

    def on_record(self, record: Record, ctx: hg.Context[str]) -> Iterator[Any]:
        act(record[1:], ctx)
        yield from ()

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
        count = self.fired.get() + 1
        self.fired.set(count)
        yield ctx.key, timer.tag, timer.timestamp, timer.clock, count
        if timer.tag == "again" and count % 3:
            # `tagged` first: at a time that is past it is due at once, and before what is behind it.
            ctx.event_time.at(timer.timestamp - 5, tag="tagged")
            ctx.event_time.at(timer.timestamp + 7, tag="again")


def act(action: tuple[Any, ...], ctx: Any) -> None:
    match action:
        case ("event", when, tag):
            ctx.event_time.at(when, tag=tag)
        case ("processing", when, tag):
            ctx.processing_time.at(when, tag=tag)
        case ("cancel event", tag):
            ctx.event_time.cancel(tag)
        case ("cancel processing", tag):
            ctx.processing_time.cancel(tag)


def step_of(world: Any, function: Any, parallelism: int = 1, **given: Any) -> Any:
    (stream,) = world.sources(**given)
    return world.step(stream.key_with(key_of).process(function, name="p"), parallelism)


def test_state_that_expired_by_event_time_is_gone_after_a_restart_too(
    steps: Any, world: Any
) -> None:
    """Before the first watermark as well: no run without a failure could have shown it again."""

    class Brief(hg.KeyedProcess[str, Record, int]):
        seen = hg.ValueState[int](default=0, ttl=hg.StateTtl("10ms", time="event"))

        def on_record(self, record: Record, ctx: hg.Context[str]) -> Iterator[int]:
            yield self.seen.get()
            self.seen.set(record[1])

    (stream,) = world.sources()
    step = steps(stream.key_with(key_of).process(Brief(), name="p"), 2)
    step.push([("a", 1), ("b", 2)], [100, 105], key=key_of)
    step.watermark(110)
    step.restart(1)
    step.push([("a", 3), ("b", 4)], [111, 112], key=key_of)
    assert sorted(step.take()) == [(0, 100), (0, 105), (0, 111), (2, 112)]
    step.watermark(100)
    step.restart(2)
    step.watermark(121)
    step.push([("a", 5), ("b", 6)], [122, 122], key=key_of)
    assert sorted(step.take()) == [(0, 122), (4, 122)]


class Model:
    """The same, one record at a time, with a list that is searched."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.timers: dict[tuple[str, str, str], int] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.out: dict[str, list[Any]] = defaultdict(list)

    def record(self, record: Record) -> None:
        key, what, *arguments = record
        if what.startswith("cancel "):
            self.timers.pop((what.removeprefix("cancel "), key, arguments[0]), None)
        else:
            self.timers[what, key, arguments[1]] = arguments[0]

    def fire(self, clock: str, until: int) -> None:
        while due := sorted(
            (at, tag, key)
            for (c, key, tag), at in self.timers.items()
            if c == clock and at <= until
        ):
            at, tag, key = due[0]
            del self.timers[clock, key, tag]
            self.counts[key] += 1
            self.out[key].append((key, tag, at, clock, self.counts[key]))
            if tag == "again" and self.counts[key] % 3:
                self.timers["event", key, "tagged"] = at - 5
                self.timers["event", key, "again"] = at + 7

    def advance(self, ms: int) -> None:
        """The clock stops at each moment when something is due."""
        target = self.now + ms
        while True:
            due = [at for (c, _, _), at in self.timers.items() if c == "processing"]
            if not due or min(due) > target:
                break
            self.now = max(self.now, min(due))
            self.fire("processing", self.now)
        self.now = target


KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
TAGS = st.sampled_from(["", "again", "tagged", "z"])
TIMES = st.integers(0, 60)
CLOCK_TIMES = st.integers(1_000_000 - 10, 1_000_060)
RECORDS = st.one_of(
    st.tuples(KEYS, st.just("event"), TIMES, TAGS),
    st.tuples(KEYS, st.just("processing"), CLOCK_TIMES, TAGS),
    st.tuples(KEYS, st.sampled_from(["cancel event", "cancel processing"]), TAGS),
)
STEPS = st.one_of(
    st.tuples(st.just("records"), st.lists(RECORDS, min_size=1, max_size=8)),
    st.tuples(st.just("watermark"), st.integers(1, 15)),
    st.tuples(st.just("clock"), st.integers(1, 20)),
    st.tuples(st.just("restart"), st.integers(1, 4)),
)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it has no state
)
@given(steps=st.lists(STEPS, max_size=30), parallelism=st.integers(1, 3))
def test_timers_fire_as_a_naive_model_says(world: Any, steps: list[Any], parallelism: int) -> None:
    """Whatever the batches, watermarks, restarts and the parallelism; the order counts within a key."""
    check_against_model(step_of(world, Scripted(), parallelism), steps)


@settings(
    deadline=None,
    max_examples=60 if os.environ.get("HEADGATE_THOROUGH") else 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it has no state
)
@given(steps=st.lists(STEPS, max_size=30), parallelism=st.integers(1, 3))
def test_timers_on_disk_fire_as_a_naive_model_says(
    world: Any, steps: list[Any], parallelism: int
) -> None:
    """A subtask with more than one timer has them on disk, and others have theirs in memory."""
    (stream,) = world.sources()
    options = {"state.backend.type": "rocksdb", "taskmanager.memory.managed.size": "1kb"}
    output = stream.key_with(key_of).process(Scripted(), name="p")
    with TemporaryDirectory() as directory:
        step = world.step(output, parallelism, options, Path(directory))
        check_against_model(step, steps)
        for operator in step.operators:
            operator.close()


def check_against_model(step: Any, steps: list[Any]) -> None:
    model, watermark = Model(step.clock.ms), 0
    for what, argument in steps:
        if what == "records":
            step.push(argument, [watermark] * len(argument), key=key_of)
            for record in argument:
                model.record(record)
            step.clock.advance(0)
            model.advance(0)
        elif what == "watermark":
            watermark += argument
            step.watermark(watermark)
            model.fire("event", watermark)
        elif what == "clock":
            step.clock.advance(argument)
            model.advance(argument)
        else:
            step.restart(argument)
            step.clock.advance(0)
    step.end()
    model.fire("event", 2**63 - 1)
    found: dict[str, list[Any]] = defaultdict(list)
    for record, time in step.take():
        assert time == record[2]
        found[record[0]].append(record)
    assert found == {key: out for key, out in model.out.items() if out}


def test_event_timers_fire_before_the_watermark_goes_on(steps: Any, world: Any) -> None:
    (stream,) = world.sources()
    step = steps(stream.key_with(key_of).process(Scripted(), name="p"))
    step.push([("b", "event", 30, ""), ("a", "event", 20, "x"), ("a", "event", 10, "x")], [1, 2, 3])
    step.watermark(9)
    assert step.events == [("watermark", 9)]
    step.watermark(30)
    assert step.events == [
        ("main", ("a", "x", 10, "event", 1), 10),
        ("main", ("b", "", 30, "event", 1), 30),
        ("watermark", 30),
    ]


def test_timers_set_by_timers_fire_in_the_same_advance_if_they_are_due(world: Any) -> None:
    class Chain(hg.KeyedProcess[str, Record, Any]):
        def on_record(self, record: Record, ctx: hg.Context[str]) -> None:
            ctx.event_time.at(10)

        def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> list[Any]:
            ctx.event_time.at(timer.timestamp + 10)
            return [(ctx.key, timer.timestamp, ctx.timestamp, ctx.watermark)]

    step = step_of(world, Chain())
    step.push([("a",), ("b",)], [0, 0])
    step.watermark(30)
    assert [record for record, _ in step.take()] == [
        (key, at, at, 30) for at in (10, 20, 30) for key in ("a", "b")
    ]
    step.watermark(39)
    assert step.take() == []
    step.watermark(40)
    assert len(step.take()) == 2


def test_what_lies_behind_the_watermark_fires_with_the_next(world: Any) -> None:
    step = step_of(world, Scripted())
    step.watermark(100)
    step.push([("a", "event", 5, "")], [200])
    assert step.take() == []
    step.watermark(101)
    assert step.take() == [(("a", "", 5, "event", 1), 5)]


def test_timers_see_and_change_the_state_of_their_key(steps: Any, world: Any) -> None:
    class Reset(hg.KeyedProcess[str, Record, Any]):
        total = hg.ValueState[int](default=0)

        def on_record(self, record: Record, ctx: hg.Context[str]) -> None:
            self.total.set(self.total.get() + record[1])
            ctx.event_time.at(record[1])

        def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> list[Any]:
            total = self.total.get()
            self.total.clear()
            return [(ctx.key, total)]

    (stream,) = world.sources()
    step = steps(stream.key_with(key_of).process(Reset(), name="p"), 2)
    step.push([("a", 1), ("b", 7), ("a", 3)], [0, 0, 0], key=key_of)
    step.restart(1)
    step.watermark(3)
    assert step.take() == [(("a", 4), 3)]
    step.push([("a", 5)], [0]).restart(3)
    step.watermark(10)
    assert sorted(step.take()) == [(("a", 5), 5), (("b", 7), 7)]


def test_processing_timers_fire_by_the_clock_with_one_callback_for_the_earliest(world: Any) -> None:
    step = step_of(world, Scripted())
    start = step.clock.ms
    step.push([("a", "processing", start + 500, ""), ("b", "processing", start + 900, "")])
    assert [at for at, _ in step.clock.waiting.values()] == [start + 500]
    step.push([("c", "processing", start + 100, "")])
    assert [at for at, _ in step.clock.waiting.values()] == [start + 100]
    step.clock.advance(100)
    assert [record[0] for record, _ in step.take()] == ["c"]
    step.push([("a", "cancel processing", ""), ("b", "processing", start + 1_000, "")])
    step.clock.advance(899)
    assert step.take() == []
    step.clock.advance(1)
    assert [record[:3] for record, _ in step.take()] == [("b", "", start + 1_000)]
    assert step.clock.waiting == {}


def test_results_of_processing_timers_have_the_timers_time(world: Any) -> None:
    class Look(hg.KeyedProcess[str, Record, Any]):
        late = hg.SideOutput[str]()

        def on_record(self, record: Record, ctx: hg.Context[str]) -> None:
            ctx.processing_time.after("1s", tag="t")

        def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> list[Any]:
            ctx.emit(self.late, ctx.key)
            return [(timer, ctx.timestamp, ctx.processing_time.now)]

    step = step_of(world, Look())
    at = step.clock.ms + 1_000
    step.push([("a",)], [5]).clock.advance(2_000)
    assert step.take("late") == [("a", at)]
    assert step.take() == [((hg.Timer("t", at, "processing"), None, at), at)]


def test_without_event_time_results_of_timers_have_none(world: Any) -> None:
    step = step_of(world, Scripted(), event_time=False)
    step.push([("a", "processing", 5, ""), ("a", "event", 5, "")])
    step.clock.advance(0)
    step.end()
    assert step.take() == [
        (("a", "", 5, "processing", 1), None),
        (("a", "", 5, "event", 2), None),
    ]


def test_overdue_processing_timers_fire_right_after_a_restore(steps: Any, world: Any) -> None:
    (stream,) = world.sources()
    step = steps(stream.key_with(key_of).process(Scripted(), name="p"))
    due = step.clock.ms + 100
    step.push([("a", "processing", due, "x"), ("b", "processing", due + 10_000, "")], [0, 0])
    step.clock.ms += 5_000  # nobody looks at the clock: the process is gone
    step.restart(2)
    assert step.take() == []
    step.clock.advance(0)
    assert step.take() == [(("a", "x", due, "processing", 1), due)]
    step.clock.advance(10_000)
    assert step.take() == [(("b", "", due + 10_000, "processing", 1), due + 10_000)]


def test_a_clock_that_was_set_back_lets_timers_wait(world: Any) -> None:
    step = step_of(world, Scripted())
    due = step.clock.ms + 100
    step.push([("a", "processing", due, "")])
    ((_, callback),) = step.clock.waiting.values()
    step.clock.waiting.clear()
    callback()
    assert step.take() == []
    assert [at for at, _ in step.clock.waiting.values()] == [due]
    step.clock.advance(100)
    assert len(step.take()) == 1


def test_the_end_of_the_input_fires_event_timers_and_drops_the_others(world: Any) -> None:
    step = step_of(world, Scripted())
    step.push(
        [("a", "event", 10**14, ""), ("a", "processing", 10**14, ""), ("b", "processing", 1, "")]
    )
    step.end()
    assert [record[3] for record, _ in step.take()] == ["event"]
    assert step.metrics.counts == {"timers_fired": 1, "timers_dropped": 2}
    assert step.clock.waiting == {}
    step.restart()
    step.clock.advance(10**16)
    assert step.take() == []


class Periodic(hg.KeyedProcess[str, Record, Any]):
    def __init__(self, stops: bool) -> None:
        self.stops = stops

    def on_record(self, record: Record, ctx: hg.Context[str]) -> None:
        ctx.event_time.at(0, tag="tick")

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> list[int]:
        if not (self.stops and ctx.input_ended):
            ctx.event_time.at(timer.timestamp + 1_000, tag="tick")
        return [timer.timestamp]


def test_a_periodic_timer_stops_at_the_end_of_the_input(world: Any) -> None:
    step = step_of(world, Periodic(True)).push([("a",)], [0])
    step.watermark(2_500)
    step.end()
    assert [record for record, _ in step.take()] == [0, 1_000, 2_000, 3_000]


def test_a_timer_that_would_go_on_for_ever_is_an_error(world: Any) -> None:
    step = step_of(world, Periodic(False)).push([("a",)], [0])
    with pytest.raises(StateError, match=r"repeats for ever.*key=`'a'` tag=`tick`") as caught:
        step.end()
    assert "ctx.input_ended" in caught.value.fix
    assert len(step.take()) <= END_REPEATS_MAX


EAST = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (1_500, 1_500),
        (datetime(1970, 1, 1, 0, 0, 1, 500_999, tzinfo=UTC), 1_500),
        (datetime(1970, 1, 1, 2, 0, 1, tzinfo=EAST), 1_000),
        (datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=UTC), -1),
    ],
)
def test_points_in_time_are_datetimes_or_milliseconds(world: Any, when: Any, expected: int) -> None:
    step = step_of(world, Scripted()).push([("a", "event", when, "")], [0])
    step.watermark(expected - 1)
    assert step.take() == []
    step.watermark(expected)
    assert [record[2] for record, _ in step.take()] == [expected]


@pytest.mark.parametrize(
    ("when", "tag", "message"),
    [
        (datetime(2020, 1, 1), "", "with a time zone"),
        (1.5, "", "not float"),
        (True, "", "not bool"),
        ("1s", "", "not str"),
        (2**63, "", "years 1 to 9999"),
        (5, 7, "the tag of a timer is a str, not int"),
    ],
)
def test_what_is_no_point_in_time_is_the_users_error(
    world: Any, when: Any, tag: Any, message: str
) -> None:
    with pytest.raises(UserCodeError, match=message) as caught:
        step_of(world, Scripted()).push([("a", "event", when, tag)], [0])
    assert "record=" in caught.value.message


def test_delays_have_units(world: Any) -> None:
    class Bare(Scripted):
        def on_record(self, record: Record, ctx: hg.Context[str]) -> Iterator[Any]:
            ctx.processing_time.after(5)  # type: ignore[arg-type]
            yield

    with pytest.raises(UsageError, match="delay of a timer needs a unit"):
        step_of(world, Bare()).push([("a",)], [0])


def test_timers_need_on_timer(world: Any) -> None:
    class Forgot(hg.KeyedProcess[str, Record, Any]):
        def on_record(self, record: Record, ctx: hg.Context[str]) -> None:
            ctx.event_time.at(5)

    step = step_of(world, Forgot())
    with pytest.raises(StateError, match="has no on_timer"):
        step.push([("a",)], [0])
    assert list(step.operators[0].snapshot(1).tables) == ["function_watermark"]


def test_an_error_in_on_timer_names_step_key_and_timer(world: Any) -> None:
    class Fails(Scripted):
        def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
            raise ValueError("oh")
            yield

    step = step_of(world, Fails()).push([("a", "event", 5, "x")], [0])
    with pytest.raises(UserCodeError, match=r"`p` raised ValueError: oh.*'a'.*tag='x'") as caught:
        step.watermark(5)
    assert "test_timers.py" in caught.value.where


def test_event_time_to_live_in_a_processing_timer_counts_from_the_watermark(world: Any) -> None:
    """Not from the machine's time, which may be years ahead."""

    class Brief(hg.KeyedProcess[str, Record, Any]):
        seen = hg.ValueState[int](ttl=hg.StateTtl("1s", time="event"))

        def on_record(self, record: Record, ctx: hg.Context[str]) -> list[Any]:
            ctx.processing_time.after("1ms")
            return [self.seen.get()]

        def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> None:
            self.seen.set(1)

    step = step_of(world, Brief()).push([("a",)], [0])
    step.watermark(5_000)
    step.clock.advance(1)
    step.push([("a",)], [5_000])
    step.watermark(6_000)
    step.push([("a",)], [6_000])
    assert [record for record, _ in step.take()] == [None, 1, None]


def test_tables_of_timers_are_as_declared(world: Any) -> None:
    step = step_of(world, Scripted())
    step.push([("a", "event", 5, "x"), ("b", "processing", 6, "")], [0, 0])
    (operator,) = step.operators
    snapshot = operator.snapshot(1)
    tables = {name: cut.make(None) for name, cut in snapshot.tables.items()}
    declared = {info.name: info for info in operator.states()}
    expected = {"fired", "function_watermark", "timers_event", "timers_processing"}
    assert set(tables) == set(declared) == expected
    for name, table in tables.items():
        assert table.schema.equals(declared[name].arrow_schema())
        assert snapshot.tables[name].keys == declared[name].keys
    rows = tables["timers_event"].drop_columns("key_group").to_pylist()
    assert rows == [{"key": "a", "map_key": "x", "value": 5}]


class Slow(hg.KeyedProcess[str, Record, Any]):
    """Each timer takes 20 ms: a step of the mailbox has time for three."""

    clock: Any = None

    def on_record(self, record: Record, ctx: hg.Context[str]) -> None:
        act(record[1:], ctx)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> list[Any]:
        Slow.clock.ms += 20
        return [timer.timestamp]


def slow_step(world: Any, records: list[Record]) -> Any:
    step = step_of(world, Slow())
    Slow.clock = step.clock
    return step.push(records, [0] * len(records))


def run_callback(step: Any) -> None:
    """The one thing that waits for the mailbox."""
    ((number, (_, callback)),) = step.clock.waiting.items()
    del step.clock.waiting[number]
    callback()


def mains(step: Any) -> list[Any]:
    return [record for record, _ in step.take()]


def test_many_timers_fire_in_slices_and_hold_back_watermark_and_records(world: Any) -> None:
    step = slow_step(world, [("a", "event", at, str(at)) for at in range(8)])
    (operator,) = step.operators
    step.watermark(5)
    assert mains(step) == [0, 1, 2]
    assert operator.full()
    assert not operator.settled()
    operator.on_idle(True)
    step.watermark(6)
    assert step.events == []
    run_callback(step)
    assert step.events == [("main", at, at) for at in (3, 4, 5)]
    assert operator.full()
    run_callback(step)
    assert step.events == [("main", 6, 6), ("watermark", 6), ("idle", True)]
    assert not operator.full()
    assert operator.settled()
    step.watermark(7)
    operator.on_idle(False)
    assert step.events == [("main", 7, 7), ("watermark", 7), ("idle", False)]


def test_a_barrier_between_two_slices_has_the_rest_of_the_timers(world: Any) -> None:
    step = slow_step(world, [(key, "event", 5, "") for key in "abcdefgh"])
    step.watermark(9)
    assert mains(step) == [5, 5, 5]
    step.restart(2)
    Slow.clock = step.clock
    assert not any(operator.full() for operator in step.operators)
    step.watermark(9)
    while step.clock.waiting:
        run_callback_of_any(step)
    assert mains(step) == [5] * 5
    assert [len(operator._timers.event) for operator in step.operators] == [0, 0]


def run_callback_of_any(step: Any) -> None:
    number = min(step.clock.waiting)
    _, callback = step.clock.waiting.pop(number)
    callback()


def test_the_end_of_the_input_waits_for_all_slices(world: Any) -> None:
    now = 1_000_000
    step = slow_step(
        world,
        [("a", "event", 10**14 + at, str(at)) for at in range(5)]
        + [("a", "processing", now + at, str(at)) for at in range(4)],
    )
    (operator,) = step.operators
    step.watermark(world.end)
    assert not operator.settled()
    assert mains(step) == [10**14, 10**14 + 1, 10**14 + 2]
    while not operator.settled():
        run_callback_of_any(step)
    operator.finish()
    records = mains(step)
    assert sorted(records) == [now, now + 1, now + 2, now + 3, 10**14 + 3, 10**14 + 4]
    assert step.clock.waiting == {}
    assert step.metrics.counts == {"timers_fired": 9}


def test_what_is_asked_to_finish_does_not_leave_timers_behind(world: Any) -> None:
    step = slow_step(world, [("a", "event", at, str(at)) for at in range(8)])
    step.end()
    assert [event[:2] for event in step.events] == [
        *(("main", at) for at in range(8)),
        ("watermark", world.end),
    ]
    assert step.clock.waiting == {}


def test_processing_timers_fire_in_slices_too_and_hold_nothing_back(world: Any) -> None:
    now = 1_000_000
    step = slow_step(world, [("a", "processing", now + at, str(at)) for at in range(5)])
    step.clock.ms += 10
    run_callback(step)
    assert mains(step) == [now, now + 1, now + 2]
    assert not step.operators[0].full()
    step.watermark(3)
    assert step.take("watermark") == []
    run_callback(step)
    assert step.events == [
        ("main", now + 3, now + 3),
        ("main", now + 4, now + 4),
        ("watermark", 3),
    ]


def test_states_cannot_have_the_names_of_tables_of_timers(world: Any) -> None:
    class Taken(Scripted):
        timers_event = hg.ValueState[int]()

    with pytest.raises(PlanError, match="table of timers state=`timers_event`") as caught:
        step_of(world, Taken())
    assert "test_timers.py" in caught.value.where
