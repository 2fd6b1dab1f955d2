"""Windows of the machine's clock, a batch at a time: against a model that looks at each record alone."""

from __future__ import annotations

import builtins
import pickle
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.api.steps.aggregates import window_aggregate
from headgate.connectors import json_source
from headgate.errors import PlanError
from headgate.operators.aggregation.aggregates import AggregatePlan, count, sum
from headgate.operators.elements import ColumnBatch
from headgate.operators.windows.kinds import WINDOW_FIELDS, sliding, tumbling
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of
from headgate.state.snapshot import RestoredState
from headgate.tests.support.operators import Recorder, operator_context, rows_of

MAX_PARALLELISM = 8


SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int64())])
PLAN = AggregatePlan(("user",), {"n": count(), "total": sum("x")}, SCHEMA, WINDOW_FIELDS)
USERS = "abcdef"
T0 = 1_000_000


@dataclass
class Machine:
    """A clock, and timers by it."""

    ms: int = T0
    due: list[tuple[int, Any]] = field(default_factory=list)

    def now_ms(self) -> int:
        return self.ms

    def call_later(self, delay_ms: int, callback: Any) -> Any:
        entry = (self.ms + delay_ms, callback)
        self.due.append(entry)
        return lambda: self.due.remove(entry)

    def set(self, ms: int) -> None:
        """The clock is that now; a timer that is due by it fires then, not on time."""
        self.ms = ms
        for entry in sorted((e for e in self.due if e[0] <= ms), key=lambda e: e[0]):
            self.due.remove(entry)
            entry[1]()
        if any(due <= ms for due, _ in self.due):
            self.set(ms)


class Subtask:
    def __init__(self, window: Any, machine: Machine, tables: Any, index: int, of: int) -> None:
        self.operator = pickle.loads(pickle.dumps(window_aggregate(window, PLAN, "by-clock")()))
        self.machine, self.output = machine, Recorder()
        self.operator.output = self.output
        context = operator_context(
            index, of, MAX_PARALLELISM, clock=machine, timers=machine, metrics=self.output
        )
        self.operator.open(context)
        if tables is not None:
            self.operator.restore(RestoredState(tables=rows_of(context.key_groups, tables)))

    def push(self, rows: list[tuple[str, int]]) -> None:
        users, values = zip(*rows, strict=True)
        data = pa.RecordBatch.from_arrays(
            [pa.array(users), pa.array(values, pa.int64())], schema=SCHEMA
        )
        self.operator.process(ColumnBatch(data), 0)

    def tables(self) -> dict[str, pa.Table]:
        snapshot = self.operator.snapshot(1)
        return {name: cut.make(None) for name, cut in snapshot.tables.items()}

    def results(self) -> Counter[tuple[Any, ...]]:
        found = Counter()
        for user, start, end, n, total, time in self.output.rows():
            start, end = (round(edge.timestamp() * 1_000) for edge in (start, end))
            assert time == end - 1
            found[user, start, end, n, total] += 1
        self.output.events.clear()
        return found


class Model:
    def __init__(self, size: int, every: int, offset: int) -> None:
        self.size, self.every, self.offset = size, every, offset
        self.open: dict[tuple[str, int], list[int]] = defaultdict(list)

    def push(self, rows: list[tuple[str, int]], now: int) -> None:
        for user, value in rows:
            start = now - (now - self.offset) % self.every
            while start > now - self.size:
                self.open[user, start].append(value)
                start -= self.every

    def fire(self, now: int) -> Counter[tuple[Any, ...]]:
        ended = [place for place in self.open if place[1] + self.size <= now]
        found: Counter[tuple[Any, ...]] = Counter()
        for user, start in ended:
            values = self.open.pop((user, start))
            found[user, start, start + self.size, len(values), builtins.sum(values)] += 1
        return found


WINDOWS = [
    (tumbling("10ms", time="processing"), Model(10, 10, 0)),
    (tumbling("10ms", offset="3ms", time="processing"), Model(10, 10, 3)),
    (sliding("20ms", "5ms", time="processing"), Model(20, 5, 0)),
    (sliding("15ms", "10ms", offset="2ms", time="processing"), Model(15, 10, 2)),
]
ROWS = st.lists(st.tuples(st.sampled_from(USERS), st.integers(-5, 5)), min_size=1, max_size=8)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), ROWS),
        st.tuples(st.just("wait"), st.integers(0, 30)),
        st.tuples(st.just("restore"), st.sampled_from([1, 2, 3])),
    ),
    max_size=25,
)


def owner(user: str, subtasks: list[Subtask]) -> Subtask:
    group = key_group_of(hash_key(user), MAX_PARALLELISM)
    return subtasks[owner_of(group, len(subtasks), MAX_PARALLELISM)]


def start(window: Any, machine: Machine, tables: Any = None, of: int = 1) -> list[Subtask]:
    machine.due.clear()
    return [Subtask(window, machine, tables, index, of) for index in range(of)]


@pytest.mark.parametrize("which", range(len(WINDOWS)))
def test_like_the_model(which: int) -> None:
    window, shape = WINDOWS[which]

    @settings(max_examples=25, deadline=None)
    @given(ACTS)
    def check(acts: list[tuple[str, Any]]) -> None:
        machine = Machine()
        model = Model(shape.size, shape.every, shape.offset)
        subtasks = start(window, machine)

        def results() -> Counter[tuple[Any, ...]]:
            return builtins.sum((s.results() for s in subtasks), Counter())

        for act, value in acts:
            if act == "push":
                for user in sorted({user for user, _ in value}):
                    owner(user, subtasks).push([row for row in value if row[0] == user])
                model.push(value, machine.ms)
            elif act == "wait":
                machine.set(machine.ms + value)
                assert results() == model.fire(machine.ms)
            else:
                made = [subtask.tables() for subtask in subtasks]
                tables = {name: pa.concat_tables([t[name] for t in made]) for name in made[0]}
                subtasks = start(window, machine, tables, value)
                machine.set(machine.ms)
        machine.set(machine.ms + 2 * shape.size)
        assert results() == model.fire(machine.ms)
        assert not machine.due, "nothing is open, and a timer still runs"

    check()


def test_event_time_goes_by() -> None:
    (subtask,) = start(tumbling("10ms", time="processing"), Machine())
    subtask.push([("a", 1)])
    subtask.operator.on_watermark(T0 + 500)
    assert [event for event, _ in subtask.output.events] == ["watermark"]


def test_what_ended_while_the_job_was_down_fires_at_once() -> None:
    window = tumbling("10ms", time="processing")
    (subtask,) = start(window, Machine())
    subtask.push([("a", 1)])
    later = Machine(T0 + 1_000)
    (again,) = start(window, later, subtask.tables())
    assert not again.results()
    later.set(later.ms)
    assert again.results() == {("a", T0, T0 + 10, 1, 1): 1}


@pytest.mark.parametrize("of", [1, 2])
def test_no_record_is_lost_behind_a_clock_that_goes_back(of: int) -> None:
    """The clock of the machine where the job goes on is behind."""
    window = tumbling("10ms", time="processing")
    ahead, behind = Machine(), Machine(T0 + 4)
    subtasks = start(window, ahead, None, 2)
    fast, slow = owner("a", subtasks), next(s for s in subtasks if s is not owner("a", subtasks))
    other = next(user for user in USERS if owner(user, subtasks) is slow)
    slow.push([(other, 1)])
    ahead.set(T0 + 25)
    fast.push([("a", 1)])
    assert slow.results()
    made = [subtask.tables() for subtask in subtasks]
    tables = {name: pa.concat_tables([t[name] for t in made]) for name in made[0]}
    again = start(window, behind, tables, of)
    owner("a", again).push([("a", 2)])
    owner(other, again).push([(other, 7)])
    behind.set(T0 + 60)
    found = [(user, n, total) for s in again for user, _, _, n, total in s.results()]
    assert sorted(found) == sorted([("a", 2, 3), (other, 1, 7)])
    assert all("late_records" not in s.output.counts for s in again)


def test_windows_open_at_the_end_do_not_fire_and_are_counted() -> None:
    machine = Machine()
    (subtask,) = start(sliding("20ms", "10ms", time="processing"), machine)
    subtask.push([("a", 1), ("b", 1)])
    subtask.operator.finish()
    assert not subtask.results()
    assert subtask.output.counts["timers_dropped"] == 4
    assert not machine.due


def test_joins_know_event_time_only() -> None:
    job = hg.Job("by-clock")
    stream = job.read(json_source("in", schema=dict.fromkeys("ab", "int64")), name="in")
    windows = stream.key_by("a").window(hg.tumbling("1s", time="processing"))
    with pytest.raises(PlanError, match="windows of event time"):
        windows.join(stream.key_by("a"), name="pairs", suffix="_2")
