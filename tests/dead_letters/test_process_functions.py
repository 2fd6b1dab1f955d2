"""Process functions that raise: the record or timer becomes a dead letter, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import PlanError, UserCodeError
from headgate.testing import harness

BACKENDS = ["hashmap", "rocksdb"]
TTL = hg.StateTtl("20ms", time="event", update="read_and_write")


class Record(NamedTuple):
    """An order for the function at a time in ms; with `raises`, it raises then."""

    key: str
    at: int
    actions: list[tuple[str, int]]
    fails: bool = False


class Sum:
    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], value: int) -> list[int]:
        return [*accumulator, value]

    def result(self, accumulator: list[int]) -> list[int]:
        return accumulator


class Every(hg.KeyedProcess[str, Record, Any]):
    """Changes state of all kinds as it is told, and shows all of it when a timer fires."""

    value = hg.ValueState[int](ttl=TTL)
    items = hg.ListState[int](ttl=TTL)
    plain = hg.ListState[int]()
    entries = hg.MapState[int, int](ttl=TTL)
    most = hg.ReducingState[int](max)
    all = hg.AggregatingState[int, list[int], list[int]](Sum())
    seen = hg.OperatorListState[int]()
    notes = hg.SideOutput[Any]()

    def on_record(self, record: Record, ctx: hg.Context[str]) -> Iterator[Any]:
        for action, number in record.actions:
            self.act(action, number, ctx)
            yield action, number
        if record.fails:
            raise ValueError(f"{record.key} at {record.at}")

    def act(self, action: str, number: int, ctx: hg.Context[str]) -> None:
        match action:
            case "value":
                self.value.set(number)
            case "forget":
                self.value.clear()
                self.entries.remove(number)
                self.most.clear()
            case "add":
                self.items.add(number)
                self.plain.add(number)
                self.most.add(number)
                self.all.add(number)
                self.seen.add(number)
            case "update":
                self.items.update([number, number + 1])
                self.plain.update([number])
                self.seen.update([number])
            case "read":
                self.items.get(), self.value.get(), self.entries.get(number)
            case "put":
                self.entries.put(number, ctx.timestamp or 0)
            case "clear":
                self.items.clear()
                self.entries.clear()
                self.seen.clear()
            case "timer":
                ctx.event_time.at((ctx.timestamp or 0) + number, tag=str(number % 2))
            case "cancel":
                ctx.event_time.cancel(str(number % 2))
            case "note":
                ctx.emit(self.notes, (ctx.key, number))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
        lists = self.items.get(), self.plain.get(), self.seen.get(), sorted(self.entries.items())
        yield ctx.key, timer, self.value.get(), self.most.get(), self.all.get(), *lists


ACTIONS = ["value", "forget", "add", "update", "read", "put", "clear", "timer", "cancel", "note"]
ACTION = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 4))
ROUNDS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), st.integers(0, 15), st.lists(ACTION, max_size=6), st.booleans()
    ),
    min_size=1,
    max_size=14,
)


def every_job(backend: str, on_error: Any) -> hg.Job:
    job = hg.Job("every", options={"state.backend.type": backend})
    job.checkpoint(every="1h", storage="never-made")
    read = job.read(from_list([]), name="in").event_time(lambda r: r.at)
    made = read.key_with(lambda r: r.key).process(Every(), name="step", on_error=on_error)
    made.write(collect(guarantee="none"), name="out")
    made.side(Every.notes).write(collect(guarantee="none"), name="notes")
    return job


def outcome(backend: str, on_error: Any, records: list[Record]) -> tuple[list[Any], list[Any]]:
    with harness(every_job(backend, on_error)) as h:
        for number, record in enumerate(records):
            h.push("in", record)
            if number % 5 == 4:
                h.checkpoint()
                h.crash()
        shown = [("timer", 1), ("timer", 2)]
        h.push("in", *(Record(key, records[-1].at, shown) for key in "ab"))
        h.end()
        # Timers of different keys that are due at one time fire in any order.
        return sorted(h.drain("out"), key=str), h.drain("notes")


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=8, deadline=None)
@given(rounds=ROUNDS)
def test_a_record_that_fails_leaves_nothing_behind(backend: str, rounds: Any) -> None:
    records, at = [], 0
    for key, later, actions, fails in rounds:
        at += later
        records.append(Record(key, at, actions, fails))
    # Event time goes on with the records that fail, too.
    without = [Record(r.key, r.at, [] if r.fails else r.actions) for r in records]
    assert outcome(backend, "drop", records) == outcome(backend, "fail", without)


def payments_job(function: Any, on_error: Any, into: Any = None, **options: Any) -> hg.Job:
    job = hg.Job("payments", **options)
    job.checkpoint(every="1h", storage="never-made")
    schema = {"user": "string", "n": "int64", "at": "timestamp"}
    read = job.read(from_list([], schema=schema), name="in").event_time("at")
    made = read.key_by("user").process(function, name="step", on_error=on_error, into=into)
    made.write(collect(guarantee="exactly_once"), name="out")
    if getattr(on_error, "then", on_error) == "side_output":
        made.failed.write(collect(guarantee="exactly_once"), name="letters")
    return job


T0 = datetime(2026, 3, 1, tzinfo=UTC)


def payment(n: int, user: str = "ann") -> dict[str, Any]:
    return {"user": user, "n": n, "at": T0 + timedelta(seconds=n)}


class Odd(hg.KeyedProcess[str, Any, Any]):
    """Sums up, and raises for even numbers when all is done."""

    total = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
        self.total.set(self.total.get() + record.n)
        yield {"total": self.total.get()}
        if record.n % 2 == 0:
            raise ValueError(f"{record.n} is even")


def test_dead_letters_are_objects_with_key_and_whole_record() -> None:
    with harness(payments_job(Odd(), "side_output"), parallelism=2) as h:
        h.push("in", payment(1), payment(2), payment(3))
        h.checkpoint()
        h.crash()
        h.push("in", payment(5), payment(6, "bob"))
        h.end()
        assert [row["total"] for row in h.drain("out")] == [1, 4, 9]
        first, second = sorted(h.drain("letters"), key=lambda letter: letter.event_time)
        assert isinstance(first, hg.FailedRecord)
        assert (first.record.user, first.record.n, first.record.at) == tuple(payment(2).values())
        assert (first.error_type, first.error) == ("ValueError", "2 is even")
        assert (first.key, first.operator, first.event_time) == ("ann", "step", payment(2)["at"])
        assert "test_process_functions.py:" in first.origin
        assert (second.key, second.record.n) == ("bob", 6)


def test_without_a_policy_the_job_fails() -> None:
    with (
        harness(payments_job(Odd(), "fail")) as h,
        pytest.raises(UserCodeError, match="ValueError: 2 is even"),
    ):
        push_and_settle(h, payment(2))


def push_and_settle(h: Any, *records: Any) -> None:
    h.push("in", *records)
    h.settle()


class Flaky(hg.KeyedProcess[str, Any, Any]):
    """Fails the first `failures` times that it is called."""

    total = hg.ValueState[int](default=0)

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def on_record(self, record: Any, ctx: hg.Context[str]) -> list[Any]:
        self.total.set(self.total.get() + record.n)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("not yet")
        return [self.total.get()]


def test_a_further_attempt_begins_where_the_first_began() -> None:
    for then in ("fail", "drop"):
        with harness(payments_job(Flaky(2), hg.OnError(then, retries=2))) as h:
            h.push("in", payment(1), payment(3))
            h.end()
            assert h.drain("out") == [1, 4]
    with (
        harness(payments_job(Flaky(3), hg.OnError("fail", retries=2))) as h,
        pytest.raises(UserCodeError, match="ConnectionError: not yet"),
    ):
        push_and_settle(h, payment(1))


def test_a_result_that_does_not_fit_is_a_failure_as_well() -> None:
    class Unfit(hg.KeyedProcess[str, Any, Any]):
        count = hg.ValueState[int](default=0)

        def on_record(self, record: Any, ctx: hg.Context[str]) -> list[Any]:
            self.count.set(self.count.get() + 1)
            return [{"n": self.count.get()}, {"n": "two" if record.n == 2 else record.n}]

    with harness(payments_job(Unfit(), "side_output", into={"n": "int64"})) as h:
        h.push("in", payment(1), payment(2), payment(3))
        h.end()
        assert [row["n"] for row in h.drain("out")] == [1, 1, 2, 3]
        (letter,) = h.drain("letters")
        assert letter.record.n == 2
        assert "returned a str for column `n`" in letter.error


class Alarm(hg.KeyedProcess[str, Any, Any]):
    """Timers of one tag raise, after they have changed something."""

    fired = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
        for tag in ("bad", "good"):
            ctx.event_time.at(record.at + timedelta(seconds=1), tag=tag)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
        self.fired.set(self.fired.get() + 1)
        yield timer.tag, self.fired.get()
        if timer.tag == "bad":
            ctx.event_time.at(timer.timestamp + 1_000, tag="never")
            ctx.event_time.cancel("good")
            raise KeyError("bad")


def test_a_timer_that_fails_is_gone_and_leaves_nothing_behind() -> None:
    with harness(payments_job(Alarm(), "side_output")) as h:
        h.push("in", payment(1), payment(1, "bob"))
        h.end()
        assert h.drain("out") == [("good", 1), ("good", 1)]
        letters = sorted(h.drain("letters"), key=lambda letter: letter.key)
        assert [letter.key for letter in letters] == ["ann", "bob"]
        due = payment(2)["at"]
        assert {letter.record for letter in letters} == {
            hg.Timer("bad", int(due.timestamp() * 1_000), "event")
        }
        assert {letter.event_time for letter in letters} == {due}


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_batches_only_the_rows_that_fail_are_lost(backend: str) -> None:
    class Counting(hg.KeyedBatchProcess[str, Any, Any]):
        count = hg.ValueState[int](default=0)

        def on_batch(self, groups: Any, ctx: hg.Context[str]) -> Iterator[pa.RecordBatch]:
            even = False
            for _, rows in groups:
                self.count.set(self.count.get() + rows.num_rows)
                counted = pa.array([self.count.get()] * rows.num_rows)
                yield rows.append_column("count", counted)
                even = even or any(n % 2 == 0 for n in rows.column("n").to_pylist())
            if even:
                raise ValueError("even")

    into = {"user": "string", "n": "int64", "at": "timestamp", "count": "int64"}
    job = payments_job(Counting(), "side_output", into, options={"state.backend.type": backend})
    with harness(job) as h:
        rows = [payment(n, user) for n in (1, 2, 3, 4, 5) for user in ("ann", "bob")]
        h.push("in", *rows)
        h.end()
        found = h.drain("out")
        assert sorted((row["user"], row["n"]) for row in found) == [
            (user, n) for user in ("ann", "bob") for n in (1, 3, 5)
        ]
        assert [max(r["count"] for r in found if r["user"] == user) for user in ("ann", "bob")] == [
            3,
            3,
        ]
        letters = sorted((letter.key, letter.record.n) for letter in h.drain("letters"))
        assert letters == [(user, n) for user in ("ann", "bob") for n in (2, 4)]


def two_jobs(function: Any, on_error: Any, broadcast: bool) -> hg.Job:
    job = hg.Job("two")
    job.checkpoint(every="1h", storage="never-made")
    first = job.read(from_list([]), name="first").key_with(lambda r: r[0])
    second = job.read(from_list([]), name="second")
    both = first.connect(second.broadcast() if broadcast else second.key_with(lambda r: r[0]))
    made = both.process(function, name="step", on_error=on_error)
    made.write(collect(guarantee="none"), name="out")
    return job


def test_both_inputs() -> None:
    class Both(hg.CoProcess[str, Any, Any, Any]):
        total = hg.ValueState[int](default=0)

        def on_first(self, record: Any, ctx: hg.Context[str]) -> list[Any]:
            self.total.set(self.total.get() + record[1])
            return [10 // record[1], self.total.get()]

        def on_second(self, record: Any, ctx: hg.Context[str]) -> list[Any]:
            self.total.set(-1)
            return [1 / record[1]]

    with harness(two_jobs(Both(), "side_output", broadcast=False)) as h:
        h.push("first", ("a", 5))
        h.push("second", ("a", 0))
        h.push("first", ("a", 0), ("a", 1))
        assert h.drain("out") == [2, 5, 10, 6]
        assert [letter.record for letter in h.drain("step.failed")] == [("a", 0), ("a", 0)]


class Rules(hg.BroadcastProcess[str, Any, Any, Any]):
    rules = hg.BroadcastState[str, int]()
    count = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[str]) -> list[Any]:
        self.count.set(self.count.get() + 1)
        return [(record[0], sorted(self.rules.items()), self.count.get())]

    def on_broadcast(self, record: Any, ctx: hg.BroadcastContext[str]) -> None:
        name, number, reads = record
        if name == "clear":
            self.rules.clear()
        self.rules.put(name, number)
        self.rules.remove("old")
        if reads:
            ctx.for_each_key(self.count, lambda key, count: count.set(0))
        if number < 0:
            raise ValueError("negative")


def test_what_is_broadcast_is_taken_back_in_all_subtasks() -> None:
    with harness(two_jobs(Rules(), "side_output", broadcast=True), parallelism=2) as h:
        h.push("second", ("old", 1, False), ("a", 1, False), ("old", 2, False))
        h.push("second", ("a", -1, False), ("clear", -2, False), ("b", -3, False))
        h.push("first", *((key, 0) for key in "pqrs"))
        assert sorted(h.drain("out")) == [(key, [("a", 1)], 1) for key in "pqrs"]
        letters = h.drain("step.failed")
        # one from each subtask
        assert sorted(letter.record[1] for letter in letters) == [-3, -3, -2, -2, -1, -1]
        assert {letter.key for letter in letters} == {None}


def test_a_broadcast_record_that_has_met_the_keys_of_its_subtask_fails_the_job() -> None:
    with harness(two_jobs(Rules(), "drop", broadcast=True)) as h:
        h.push("first", ("p", 0))
        h.push("second", ("a", 1, True))
        h.push("first", ("p", 0))
        assert [row[2] for row in h.drain("out")] == [1, 1]
        with pytest.raises(UserCodeError, match="ValueError: negative"):
            h.push("second", ("b", -1, True))


def test_mistakes() -> None:
    class Failed(hg.KeyedProcess[str, Any, Any]):
        failed = hg.SideOutput[Any]()

        def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
            return None

    with pytest.raises(PlanError, match="the name of the side output of failed records"):
        payments_job(Failed(), "side_output")
    payments_job(Failed(), "drop")
    with pytest.raises(PlanError, match="not a policy for errors"):
        payments_job(Odd(), "ignore")
