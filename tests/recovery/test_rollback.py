"""State that goes back to a checkpoint in memory is what a restore from its files would make of it.

An operator has a random history of records, time and checkpoints. Then it ends. One that takes its state
over, and one that is restored from the files, go on side by side: all results and all later snapshots are
equal, and deltas build on the same files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.operators.aggregation.aggregates import AggregatePlan, parse_aggregate
from headgate.operators.aggregation.reduce import ReduceOperator
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.base import Operator
from headgate.operators.joins import side as join_side
from headgate.operators.joins.as_of import AsOfJoin
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep, outer_sides
from headgate.operators.joins.tables import SIDES
from headgate.operators.joins.windowed import WindowJoin
from headgate.operators.origin import Origin
from headgate.operators.windows import counts, tumbling
from headgate.operators.windows.counts import CountAggregate
from headgate.operators.windows.kinds import (
    WINDOW_FIELDS,
    CountWindow,
    GlobalWindow,
    SlidingWindow,
    TumblingWindow,
    sliding,
)
from headgate.operators.windows.panes import table as pane_table
from headgate.operators.windows.panes.global_windows import GlobalAggregate
from headgate.operators.windows.panes.operator import PaneAggregate
from headgate.operators.windows.sessions import table as session_table
from headgate.operators.windows.sessions.operator import SessionAggregate
from headgate.operators.windows.sessions.window import FixedGap
from headgate.operators.windows.tumbling import TumblingAggregate
from headgate.runtime.options.recovery import KEEP_STATE
from headgate.state.slots import table as slot_table
from headgate.state.snapshot import DELETED_COLUMN, RestoredState
from headgate.tests.support.aggregate_rows import VALUES, batch_of, tighten, value_rows
from headgate.tests.support.operators import ManualClock, Recorder, operator_context

TTL_MS = 40
TAGS = ("rows", "late", "late_other")
FEW = {"n": "count()", "total": "sum(i)", "low": "min(i)", "last": "max(s)"}
MANY = FEW | {
    "some": "count(i)",
    "mean": "avg(i)",
    "exact": "sum(f)",
    "money": "sum(d)",
    "spread": "variance(f)",
    "begin": "first(s)",
    "end": "last(i)",
    "best": "max_by(s, by=i)",
    "two": "top_n(i, 2)",
    "words": "bottom_n(s, 2, by=i)",
    "all": "collect(s)",
    "list": "collect(i)",
    "kinds": "count_distinct(s)",
    "values": "count_distinct(i)",
    "about": "approx_count_distinct(i)",
    "middle": "quantile(f, 0.5)",
}
AGGREGATES = {"few": FEW, "many": MANY}
KEYS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "dense": (pa.int64(), lambda n: n),
    "spread": (pa.int64(), lambda n: n * 10**12 if n != 3 else None),
    "text": (pa.string(), lambda n: f"key{n}" if n != 3 else None),
    "none": (pa.int64(), lambda n: n),
}


@cache
def plan_for(keys: str, texts: str, **more: Any) -> AggregatePlan:
    schema = pa.schema([pa.field("k", KEYS[keys][0]), *VALUES])
    named = {name: parse_aggregate(text) for name, text in AGGREGATES[texts].items()}
    return AggregatePlan(() if keys == "none" else ("k",), named, schema, **more)


@dataclass(frozen=True)
class Kind:
    """A kind of operator.

    It is made of the kind of its keys, and of that of its values: `few` or `many` aggregates, and for a
    function pickled ones or columns.

    Attributes:
        states: the names of its tables that are kept.
        make: makes it.
        expires: rows expire.
        inputs: how many it has.
        keyed: it needs keys.
        forgets: a restore from files leaves out rows that have finished. So tables differ, though not in
            what follows from them, and there are no deltas.
    """

    states: tuple[str, ...]
    make: Callable[[str, str], Operator]
    expires: bool = False
    inputs: int = 1
    keyed: bool = False
    forgets: bool = False

    @classmethod
    def of_joins(cls, make: Callable[[JoinStep], Operator]) -> Kind:
        """Return a kind of join: `few` is an inner one, and `many` one with outer sides."""

        def made(keys: str, texts: str) -> Operator:
            schema = pa.schema([pa.field("k", KEYS[keys][0]), *VALUES])
            outer = outer_sides("full" if texts == "many" else "inner")
            columns = join_columns(
                (schema, schema), (("k",), ("k",)), outer, "_right", ("l", "r"), Origin("here")
            )
            return make(JoinStep("join", columns, outer))

        return cls(SIDES, made, expires=True, inputs=2, keyed=True)


def _windows(keys: str, texts: str) -> Operator:
    plan = plan_for(keys, texts, added=WINDOW_FIELDS)
    return TumblingAggregate(TumblingWindow(10, 0, 7), plan)


def _panes(keys: str, texts: str) -> Operator:
    window = SlidingWindow(20, 10, 0, 7)
    return PaneAggregate(window, plan_for(keys, texts, added=WINDOW_FIELDS))


def _changed_in_place(value: Any, record: Any) -> Any:
    value.i, value.s = (value.i or 0) * 3 + (record.i or 1), record.s or value.s
    return value


def _reduced(keys: str, texts: str) -> Operator:
    schema = pa.schema([pa.field("k", KEYS[keys][0]), *VALUES])
    return ReduceOperator(_changed_in_place, ("k",), schema=None if texts == "few" else schema)


def _counts(keys: str, texts: str) -> Operator:
    size, every = (4, 6) if texts == "few" else (5, 2)
    return CountAggregate(CountWindow(size, every), plan_for(keys, texts))


def _sessions(keys: str, texts: str) -> Operator:
    plan = plan_for(keys, texts, added=WINDOW_FIELDS)
    return SessionAggregate(FixedGap(6), 7, plan, "sessions")


KINDS = {
    "reduced": Kind(("reduce",), _reduced, keyed=True),
    "window join": Kind.of_joins(
        lambda step: WindowJoin(step, sliding("20ms", "10ms", allowed_lateness="7ms"))
    ),
    "interval join": Kind.of_joins(lambda step: IntervalJoin(step, Interval(-8, 5))),
    "as-of join": Kind.of_joins(AsOfJoin),
    "as-of join for a while": Kind.of_joins(lambda step: AsOfJoin(step, 16)),
    "running": Kind(("running",), lambda keys, texts: RunningAggregate(plan_for(keys, texts))),
    "expiring": Kind(
        ("running",),
        lambda keys, texts: RunningAggregate(plan_for(keys, texts, ttl_ms=TTL_MS)),
        expires=True,
        keyed=True,
    ),
    "windows": Kind(("windows",), _windows, expires=True),
    "sessions": Kind(("sessions",), _sessions, expires=True),
    "panes": Kind(("panes",), _panes, expires=True),
    "counts": Kind(("counts",), _counts, forgets=True),
    "global": Kind(
        ("whole",), lambda keys, texts: GlobalAggregate(GlobalWindow(), plan_for(keys, texts))
    ),
}


@pytest.fixture(autouse=True, scope="module")
def tight() -> Any:
    """Bounds so low that a few hundred keys cross them all."""
    with pytest.MonkeyPatch.context() as patch:
        tighten(patch)
        patch.setattr(slot_table, "_INITIAL_CELLS", 64)
        patch.setattr(slot_table, "_MOVE_AT_LEAST", 8)
        patch.setattr(tumbling, "SMALL_ROWS", 3)
        patch.setattr(counts, "DEAD_MIN", 1)
        patch.setattr(pane_table, "DEAD_MIN", 1)
        patch.setattr(join_side, "DEAD_MIN", 1)
        patch.setattr(join_side, "FORGET_MIN", 2)
        patch.setattr(session_table, "_DEAD_MIN", 1)
        yield


def rows_of(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


def merged(tables: list[pa.Table], keys: tuple[str, ...]) -> list[str]:
    newest = {}
    for table in tables:
        for row in table.to_pylist():
            assert not row.pop(DELETED_COLUMN, False)
            newest[tuple(row[key] for key in keys)] = repr(row)
    return sorted(newest.values())


class Subject:
    """An operator, and after a failure a twin of it that was restored from files.

    Attributes:
        at: the tables of each checkpoint.
    """

    def __init__(self, kind: str, keys: str, texts: str) -> None:
        self.kind, self.keys, self.texts = KINDS[kind], keys, texts
        self.clock = ManualClock()
        self.outputs: list[Recorder] = []
        self.at: dict[int, dict[str, pa.Table]] = {}
        self.unread: list[tuple[int, list[Any]]] = []
        self.last = 0
        self.base: tuple[int, dict[str, pa.Table]] | None = None
        self.operators = [self.start(0)]

    def start(self, restored: int) -> Operator:
        operator, output = self.kind.make(self.keys, self.texts), Recorder()
        operator.output = output
        self.outputs.append(output)
        operator.open(
            operator_context(
                clock=self.clock,
                timers=self.clock,
                metrics=output,
                restored_checkpoint=restored,
                options={KEEP_STATE.key: "true"},
            )
        )
        return operator

    def tell(self, call: Callable[[Operator], Any]) -> None:
        """Do the same with both; they emit the same."""
        for operator in self.operators:
            call(operator)
        emitted = [
            sorted(repr(row) for tag in TAGS for row in output.rows(tag)) for output in self.outputs
        ]
        assert emitted[0] == emitted[-1]
        for output in self.outputs:
            output.events.clear()

    def cut(self) -> None:
        self.last += 1
        snapshots = [operator.snapshot(self.last) for operator in self.operators]
        self.unread.append((self.last, [snapshot.tables for snapshot in snapshots if snapshot]))

    def read(self) -> None:
        """Read what was cut; what the twin has is the same, also if it is a delta."""
        for checkpoint_id, (mine, *twins) in self.unread:
            made = {name: cut.make(None) for name, cut in mine.items()}
            self.at[checkpoint_id] = made
            for twin in twins:
                for name, cut in twin.items():
                    found = rows_of(cut.make(None))
                    assert self.kind.forgets or found == rows_of(made[name])
        self.unread = []

    def check_delta(self) -> None:
        """Check that the restored files with the changes since then have the rows that there are now."""
        assert self.base is not None
        if self.kind.forgets:
            return
        tables = self.operators[0].snapshot(self.last + 1).tables  # type: ignore[union-attr]
        deltas = {state: tables[state].make(1) for state in self.kind.states}
        whole = self.operators[0].snapshot(self.last + 1).tables  # type: ignore[union-attr]
        for state, delta in deltas.items():
            held = set(rows_of(whole[state].make(None)))
            found = merged([self.base[1][state], delta], tables[state].keys)
            # A table has no marks of rows that have expired.
            assert held <= set(found)
            assert self.kind.expires or held == set(found)
        self.last += 1

    def fail(self, which: int) -> None:
        """End, and begin again from one of the known checkpoints; perhaps one of two states is read."""
        kept = self.operators[0].keep()
        for operator in self.operators:
            operator.close()
        known = sorted(
            self.at.keys() & frozenset.intersection(*(k.checkpoints for k in kept.values()))
        )
        if not known:
            self.operators = self.operators[:1]
            self.__init__(  # type: ignore[misc]
                next(n for n, k in KINDS.items() if k is self.kind), self.keys, self.texts
            )
            return
        self.last = known[which % len(known)]
        tables = self.at[self.last]
        self.base = (self.last, tables)
        self.outputs, self.unread = [], []
        taker, reader = self.start(self.last), self.start(self.last)
        assert kept.keys() == set(self.kind.states)
        if len(kept) > 1 and which % 3:
            kept.pop(self.kind.states[which % 3 - 1])
        others = {name: table for name, table in tables.items() if name not in kept}
        taker.restore(RestoredState(others, kept=kept, checkpoint_id=self.last))
        reader.restore(RestoredState(tables))
        self.operators = [taker, reader]

    def close(self) -> None:
        for operator in self.operators:
            operator.close()


rows_ = value_rows(1, 8)
actions = st.lists(
    st.one_of(
        rows_.map(lambda rows: ("rows", rows)),
        rows_.map(lambda rows: ("rows", rows)),
        st.integers(0, 3).map(lambda part: ("bulk", part)),
        st.integers(0, 60).map(lambda ms: ("time", ms)),
        st.just(("cut", 0)),
        st.just(("cut", 0)),
        st.just(("read", 0)),
        st.integers(0, 3).map(lambda back: ("aborted", back)),
        st.integers(0, 3).map(lambda back: ("completed", back)),
        st.integers(0, 3).map(lambda which: ("fail", which)),
    ),
    max_size=24,
)


def run(subject: Subject, history: list[tuple[str, Any]]) -> None:
    watermark, inputs = 0, subject.kind.inputs
    for action, what in history:
        match action:
            case "rows":
                batch = batch_of(what, *KEYS[subject.keys])
                subject.tell(lambda o, rows=batch: o.process(rows, len(rows) % inputs))
            case "bulk":
                numbers = range(60 * what, 60 * what + 50)
                rows = [(n, n, n / 8, Decimal(n), None, n % 45) for n in numbers]
                batch = batch_of(rows, *KEYS[subject.keys])
                subject.tell(lambda o, rows=batch, at=what % inputs: o.process(rows, at))
            case "time":
                subject.clock.advance(what)
                watermark += what // 3
                subject.tell(lambda o, time=watermark: o.on_watermark(time))
            case "cut":
                subject.cut()
            case "read":
                subject.read()
            case "aborted" if subject.last > what:
                subject.tell(lambda o, id_=subject.last - what: o.on_checkpoint_aborted(id_))
            case "completed" if subject.last > what:
                permit = Permit(subject.last - what)
                subject.tell(lambda o, permit=permit: o.on_checkpoint_complete(permit))
            case "fail":
                subject.read()
                subject.fail(what)
    subject.cut()
    subject.tell(lambda o: o.process(batch_of([(2, 5, 1.0, None, "x", 9)], *KEYS[subject.keys]), 0))
    subject.read()
    subject.fail(0)
    subject.tell(
        lambda o: o.process(batch_of([(2, 6, -1.0, None, "y", 9)], *KEYS[subject.keys]), 0)
    )
    subject.tell(
        lambda o: o.process(batch_of([(200, None, None, None, "z", 9)], *KEYS[subject.keys]), 0)
    )
    subject.check_delta()
    for step in (4, 10, 10, 99):
        watermark += step
        subject.tell(lambda o, time=watermark: o.on_watermark(time))
        subject.cut()
        subject.read()
    subject.close()


@dataclass(frozen=True)
class Permit:
    """The part of a permit that the notice of a complete checkpoint needs."""

    checkpoint_id: int


KEYED = [name for name in KEYS if name != "none"]
kinds_of_keys = st.sampled_from(list(KEYS))


def keys_for(kind: str, drawn: str) -> str:
    """Return the kind of keys that was drawn, or another one if this kind of operator has to have keys."""
    return KEYED[0] if drawn == "none" and KINDS[kind].keyed else drawn


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(history=actions, keys=kinds_of_keys)
def test_state_goes_back_to_a_checkpoint(kind: str, keys: str, history: Any) -> None:
    run(Subject(kind, keys_for(kind, keys), "few"), history)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(history=actions, keys=kinds_of_keys)
def test_state_of_all_aggregates_goes_back(kind: str, keys: str, history: Any) -> None:
    run(Subject(kind, keys_for(kind, keys), "many"), history)
