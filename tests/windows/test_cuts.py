"""A state restored from base and deltas equals the model at the cut, whatever happened meanwhile."""

from __future__ import annotations

from decimal import Decimal
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import StateError
from headgate.operators.aggregation.aggregates import AggregatePlan, parse_aggregate
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.elements import ColumnBatch
from headgate.operators.windows.kinds import WINDOW_FIELDS, TumblingWindow
from headgate.operators.windows.tumbling import TumblingAggregate
from headgate.state.aggregates.accumulators import CountAccumulator
from headgate.state.evolution import compare
from headgate.state.slots import key_index
from headgate.state.snapshot import RestoredState
from headgate.tests.support.aggregate_rows import VALUES, batch_of, tighten, value_rows
from headgate.tests.support.threads import begun

SIZE, LATENESS = 10, 7
AGGREGATES = {
    "n": "count()",
    "total": "sum(i)",
    "low": "min(i)",
    "mean": "avg(i)",
    "exact": "sum(f)",
    "money": "sum(d)",
    "last": "max(s)",
}


def plan_for(type_, keyed, windowed, aggregates=None):
    schema = pa.schema([pa.field("k", type_), *VALUES])
    named = {n: parse_aggregate(t) for n, t in (aggregates or AGGREGATES).items()}
    added = WINDOW_FIELDS if windowed else ()
    return AggregatePlan(("k",) if keyed else (), named, schema, added)


@pytest.fixture(autouse=True, scope="module")
def tight():
    """Bounds so low that a few hundred keys cross them all."""
    with pytest.MonkeyPatch.context() as patch:
        tighten(patch)
        patch.setattr(key_index, "_JOINED_BYTES_MAX", 64)
        yield


class Model:
    """Records by key, and window if there are any, and what each group of them should come to."""

    def __init__(self, keyed, windowed):
        self.keyed, self.windowed, self.watermark = keyed, windowed, -(2**62)
        self.groups, self.changed = {}, []
        """`changed`: the identities touched after each cut."""

    def add(self, rows):
        for row in rows:
            start = row[-1] - row[-1] % SIZE if self.windowed else None
            if start is not None and start + SIZE - 1 + LATENESS <= self.watermark:
                continue
            key = (row[0] if self.keyed else None, start)
            self.groups.setdefault(key, []).append(row)
            for changed in self.changed:
                changed.add(key)

    def advance(self, watermark):
        self.watermark = max(self.watermark, watermark)
        gone = [k for k in self.groups if k[1] + SIZE - 1 + LATENESS <= self.watermark]
        for key in gone:
            del self.groups[key]

    def state(self):
        return {key: self.result(rows) for key, rows in self.groups.items()}

    @staticmethod
    def result(rows):
        i, f, d, s = ([r[at] for r in rows if r[at] is not None] for at in range(1, 5))
        return (
            len(rows),
            sum(i) if i else None,
            min(i) if i else None,
            sum(i) if i else None,
            len(i),
            sum(f) if f else None,
            sum(d) if d else None,
            max(s) if s else None,
        )


def rows_of(table, keyed, windowed):
    """State columns by key and window."""
    found = {}
    columns = {name: table[name] for name in table.column_names}
    count = table.num_rows
    keys = columns["k"].to_pylist() if keyed else [None] * count
    starts = [None] * count
    if windowed:
        starts = columns["window_start"].cast(pa.int64()).to_pylist()
    skipped = ("key_group", "k", "window_start", "window_end")
    state = [c.to_pylist() for name, c in columns.items() if name not in skipped]
    for key, start, *values in zip(keys, starts, *state, strict=True):
        assert (key, start) not in found
        found[key, start] = tuple(values)
    return found


def merged(tables, keys):
    """Base and deltas as one table: the newest row of each key wins."""
    newest = {}
    for number, table in enumerate(tables):
        identities = zip(*(table[key].to_pylist() for key in keys), strict=True) if keys else ()
        for at, identity in enumerate(identities or [()] * table.num_rows):
            newest[identity] = (number, at)
        if not keys and table.num_rows:
            newest[()] = (number, 0)
    parts = [
        table.take(pa.array([at for n, at in newest.values() if n == number], pa.int64()))
        for number, table in enumerate(tables)
    ]
    return pa.concat_tables(parts)


def in_thread(work):
    return begun(work).result()


class Subject:
    """An operator beside its model, and the cuts taken so far."""

    def __init__(self, start, type_, keyed, windowed):
        self.start, self.type, self.keyed, self.windowed = start, type_, keyed, windowed
        self.name = "windows" if windowed else "running"
        self.model = Model(keyed, windowed)
        self.harness = start(self.operator())
        self.cuts = []  # dicts

    def operator(self):
        plan = plan_for(self.type, self.keyed, self.windowed)
        if self.windowed:
            return TumblingAggregate(TumblingWindow(SIZE, 0, LATENESS), plan)
        return RunningAggregate(plan)

    def cut(self, back):
        """Cut; later made as a delta on the cut `back` before, or in full."""
        base = len(self.cuts) - back if 0 < back <= len(self.cuts) else None
        tables = self.harness.operator.snapshot(1).tables
        assert tables[self.name].epoch == len(self.cuts) + 1
        self.cuts.append(
            {"base": base, "tables": tables, "state": self.model.state(), "made": None}
        )
        self.cuts[-1]["changed"] = (
            set(self.cuts[-1]["state"]) if base is None else set(self.model.changed[base])
        )
        self.model.changed.append(set())

    def make(self, which, threaded):
        waiting = [cut for cut in self.cuts if cut["made"] is None]
        if waiting:
            cut = waiting[which % len(waiting)]
            since = None if cut["base"] is None else self.cuts[cut["base"]]["tables"]
            since = None if since is None else since[self.name].epoch
            run = in_thread if threaded else lambda work: work()
            cut["made"] = run(lambda: cut["tables"][self.name].make(since))
            cut["watermark"] = cut["tables"].get("watermark")
            if cut["watermark"] is not None:
                cut["watermark"] = cut["watermark"].make(None)

    def chain(self, at):
        tables = []
        while at is not None:
            tables.insert(0, self.cuts[at]["made"])
            at = self.cuts[at]["base"]
        return tables

    def check(self):
        for at, cut in enumerate(self.cuts):
            held = rows_of(cut["made"], self.keyed, self.windowed)
            assert set(held) == cut["changed"] & set(cut["state"])
            tables = {self.name: merged(self.chain(at), cut["tables"][self.name].keys)}
            if cut["watermark"] is not None:
                tables["watermark"] = cut["watermark"]
            restored = self.start(self.operator(), tables)
            found = restored.tables()[self.name]
            assert rows_of(found, self.keyed, self.windowed) == cut["state"]
            again = restored.operator.snapshot(2).tables[self.name]
            assert again.epoch == 3
            assert again.make(1).num_rows == 0


rows_ = value_rows(0, 12)
actions = st.lists(
    st.one_of(
        rows_.map(lambda rows: ("rows", rows)),
        rows_.map(lambda rows: ("rows", rows)),
        st.integers(0, 3).map(lambda part: ("bulk", part)),
        st.integers(0, 60).map(lambda time: ("watermark", time)),
        st.integers(0, 3).map(lambda back: ("cut", back)),
        st.integers(0, 3).map(lambda back: ("cut", back)),
        st.tuples(st.integers(0, 3), st.booleans()).map(lambda how: ("make", how)),
    ),
    max_size=16,
)
KEYS = {
    "int": (pa.int64(), lambda n: n),
    "spread": (pa.int64(), lambda n: n * 10**12 if n != 3 else None),
    "text": (pa.string(), lambda n: f"key{n}" if n != 3 else None),
    "long": (pa.string(), lambda n: f"a key of more than a cell {n}"),
    "decimal": (pa.decimal128(12, 1), lambda n: Decimal(n)),
}


@pytest.mark.parametrize("windowed", [False, True], ids=["running", "windows"])
@pytest.mark.parametrize("kind", [*KEYS, "global"])
@settings(max_examples=70, deadline=None)
@given(history=actions)
def test_restored_base_and_deltas_equal_the_model_at_each_cut(start, kind, windowed, history):
    keyed = kind != "global"
    type_, key_of = KEYS[kind if keyed else "int"]
    subject = Subject(start, type_, keyed, windowed)
    for action, what in history:
        if action in ("rows", "bulk"):
            rows = what
            if action == "bulk":
                numbers = range(100 * what, 100 * what + 90)
                rows = [(n, n, n / 8, Decimal(n), None, n % 45) for n in numbers]
            rows = [(key_of(row[0]), *row[1:]) for row in rows]
            if rows:
                subject.harness.process(batch_of(rows, type_))
                subject.model.add(rows)
        elif action == "watermark" and windowed:
            subject.harness.watermark(what)
            subject.model.advance(what)
        elif action == "cut":
            subject.cut(what)
        elif action == "make":
            subject.make(*what)
    while any(cut["made"] is None for cut in subject.cuts):
        subject.make(0, False)
    subject.check()


@pytest.mark.parametrize("windowed", [False, True], ids=["running", "windows"])
def test_a_thread_reads_a_cut_while_the_state_changes_under_it(start, windowed):
    keys, rng = 20_000, np.random.default_rng(7)
    plan = plan_for(pa.int64(), True, windowed, {"n": "count()", "total": "sum(i)"})
    harness = start(
        TumblingAggregate(TumblingWindow(SIZE), plan) if windowed else RunningAggregate(plan)
    )
    count, total = np.zeros(keys, np.int64), np.zeros(keys, np.int64)
    nothing = [pa.nulls(4_000, field.type) for field in VALUES[1:]]

    def update():
        chosen, values = rng.integers(0, keys, 4_000), rng.integers(-9, 10, 4_000)
        data = pa.RecordBatch.from_arrays(
            [pa.array(chosen), pa.array(values), *nothing], names=["k", *"ifds"]
        )
        harness.process(ColumnBatch(data, np.zeros(4_000, np.int64)))
        np.add.at(count, chosen, 1)
        np.add.at(total, chosen, values)
        harness.output.events.clear()

    name = "windows" if windowed else "running"
    held_count, held_total = np.zeros(keys, np.int64), np.zeros(keys, np.int64)
    for number in range(25):
        update()
        cut = harness.operator.snapshot(number).tables[name]
        expected = (count.copy(), total.copy())
        making = begun(partial(cut.make, number or None))
        update()
        while not making.done():
            update()
        made = making.result()
        at = made["k"].to_numpy()
        held_count[at], held_total[at] = made["n"].to_numpy(), made["total"].to_numpy()
        assert (held_count == expected[0]).all()
        assert (held_total == expected[1]).all()


@pytest.mark.parametrize("windowed", [False, True], ids=["running", "windows"])
def test_a_discarded_cut_is_closed_and_memory_is_used_again(start, windowed):
    subject = Subject(start, pa.int64(), True, windowed)
    subject.harness.process(batch_of([(1, 1, None, None, None, 0)], pa.int64()))
    snapshot = subject.harness.operator.snapshot(1)
    groups = [part.cut for part in cut_parts(snapshot.tables[subject.name])]
    assert any(group._state._cut in group._state._cut._owner.cuts for group in groups)
    snapshot.tables[subject.name].discard()
    assert not any(group._state._cut._owner.cuts for group in groups)


def cut_parts(cut):
    """The parts a cut's functions hold."""
    cells = dict(zip(cut.discard.__code__.co_freevars, cut.discard.__closure__, strict=True))
    return cells["parts"].cell_contents


def test_a_window_gone_in_one_old_subtask_does_not_come_back_from_its_base(start):
    """Its rows are in the base; the merged watermark is the other subtask's, and earlier."""
    windowed = plan_for(pa.int64(), True, True)
    old = [start(TumblingAggregate(TumblingWindow(SIZE), windowed), None, i, 2) for i in range(2)]
    keys = iter(range(100))
    bases, marks = [], []
    for harness, watermark in zip(old, (30, 5), strict=True):
        own = harness.operator.context.key_groups
        rows = []
        while not rows:
            harness.output.events.clear()
            rows = [(next(keys), 1, None, None, None, 12)]
            probe = start(TumblingAggregate(TumblingWindow(SIZE), windowed))
            probe.process(batch_of(rows, pa.int64()))
            if probe.tables()["windows"]["key_group"][0].as_py() not in own:
                rows = []
        harness.process(batch_of(rows, pa.int64()))
        base = harness.operator.snapshot(1).tables["windows"].make(None)
        harness.watermark(watermark)
        later = harness.operator.snapshot(2).tables
        bases.append(merged([base, later["windows"].make(1)], later["windows"].keys))
        marks.append(later["watermark"].make(None))
    tables = {"windows": pa.concat_tables(bases), "watermark": pa.concat_tables(marks)}
    assert tables["windows"].num_rows == 2
    restored = start(TumblingAggregate(TumblingWindow(SIZE), windowed), tables)
    restored.watermark(100)
    assert len(restored.output.rows()) == 1


def test_a_dropped_window_does_not_leak_into_the_next_while_its_cut_is_open(start):
    subject = Subject(start, pa.int64(), True, True)
    subject.harness.process(batch_of([(n, n, 1.0, None, None, 0) for n in range(9)], pa.int64()))
    subject.model.add([(n, n, 1.0, None, None, 0) for n in range(9)])
    subject.cut(0)
    subject.harness.watermark(20)
    subject.model.advance(20)
    rows = [(n + 4, -n, None, Decimal(1), None, 25) for n in range(9)]
    subject.harness.process(batch_of(rows, pa.int64()))
    subject.model.add(rows)
    subject.cut(1)
    subject.make(0, True)
    subject.make(0, True)
    subject.check()


def test_windows_that_go_while_a_cut_is_made_leave_its_bounds_as_they_were(start, monkeypatch):
    """The values are read, the cut is closed, and the memory is already used for other windows."""
    subject = Subject(start, pa.int64(), True, True)
    subject.harness.process(batch_of([(n, n, None, None, None, 0) for n in range(5)], pa.int64()))
    cut = subject.harness.operator.snapshot(1).tables["windows"]
    columns, left = CountAccumulator.columns, [None]

    def columns_later(self, values):
        while left:
            left.pop()
            subject.harness.watermark(100)
            rows = [(n, n, None, None, None, 200) for n in range(5)]
            subject.harness.process(batch_of(rows, pa.int64()))
        return columns(self, values)

    monkeypatch.setattr(CountAccumulator, "columns", columns_later)
    made = cut.make(None)
    assert not left
    assert made["window_start"].cast(pa.int64()).to_pylist() == [0] * 5
    assert made["window_end"].cast(pa.int64()).to_pylist() == [SIZE] * 5


def test_a_window_that_is_gone_stays_gone_when_the_allowed_lateness_grows(start):
    """Its rows are in the base of the chain, and more records for it may come."""
    plan = plan_for(pa.int64(), True, True)
    gone, kept = (1, 1, None, None, None, 3), (1, 1, None, None, None, 23)
    first = start(TumblingAggregate(TumblingWindow(SIZE), plan))
    first.process(batch_of([gone, kept], pa.int64()))
    base = first.operator.snapshot(1).tables["windows"].make(None)
    first.watermark(15)
    delta = first.operator.snapshot(2).tables
    chain = [base, delta["windows"].make(1)]
    watermark = delta["watermark"].make(None)
    for _ in range(2):
        tables = {"windows": merged(chain, delta["windows"].keys), "watermark": watermark}
        second = start(TumblingAggregate(TumblingWindow(SIZE, 0, 1_000), plan), tables)
        second.process(batch_of([gone, kept], pa.int64()))
        assert len(second.output.rows("late")) == 1
        cut = second.operator.snapshot(3).tables
        chain.append(cut["windows"].make(1))
        watermark = cut["watermark"].make(None)
    second.watermark(1_000)
    assert [row[3] for row in second.output.rows()] == [3]


# --- evolution ---------------------------------------------------------------------------------


def evolved(start, before, after, type_=pa.int64(), new_type=None, windowed=False):
    """The state of a step with aggregates `before`, as one with `after` reads it."""

    def operator(type_, aggregates):
        plan = plan_for(type_, True, windowed, aggregates)
        if windowed:
            return TumblingAggregate(TumblingWindow(SIZE, 0, LATENESS), plan, "my step")
        return RunningAggregate(plan, "my step")

    harness = start(operator(type_, before))
    harness.process(batch_of([(1, 5, 0.5, None, "x", 0), (1, 7, 1.5, None, "y", 0)], type_))
    restored = start(operator(new_type or type_, after))
    states = {info.name: info for info in harness.operator.states()}
    name = "windows" if windowed else "running"
    declared = next(info for info in restored.operator.states() if info.name == name)
    verdict = compare(states[name], declared)
    try:
        restored.operator.restore(RestoredState(tables=harness.tables(), states=states))
    except StateError:
        assert not verdict.ok, "the check before a restore promised that it works"
        raise
    assert verdict.ok, verdict.text
    return restored.tables()[name].to_pylist()[0]


@pytest.mark.parametrize("windowed", [False, True], ids=["running", "windows"])
def test_new_aggregates_start_empty_and_removed_ones_are_dropped(start, windowed):
    before = {"n": "count()", "gone": "sum(f)"}
    after = {"new": "max(i)", "n": "count()", "mean": "avg(i)", "other": "count(s)"}
    row = evolved(start, before, after, windowed=windowed)
    assert "gone" not in row
    kept = {name: row[name] for name in ("new", "n", "mean__sum", "mean__count", "other")}
    assert kept == {"new": None, "n": 2, "mean__sum": None, "mean__count": 0, "other": 0}


def test_a_sum_of_integers_goes_on_as_one_of_floats(start):
    assert evolved(start, {"a": "sum(i)"}, {"a": "sum(f)"})["a"] == 12.0


def test_wider_keys_are_the_same_keys(start):
    row = evolved(start, {"n": "count()"}, {"n": "count()"}, pa.int32(), pa.int64())
    assert (row["k"], row["n"]) == (1, 2)


@pytest.mark.parametrize(
    ("before", "after", "old", "new"),
    [
        ("sum(f)", "sum(i)", "double", "int64"),
        ("max(i)", "min(i)", "max(i)", "min(i)"),
        ("max(s)", "max(i)", "string", "int64"),
    ],
)
def test_an_incompatible_change_names_old_and_new(start, before, after, old, new):
    with pytest.raises(StateError) as error:
        evolved(start, {"a": before}, {"a": after})
    assert old in error.value.message
    assert new in error.value.message
    assert error.value.where == "my step"
    assert error.value.fix


def test_other_keys_or_windows_are_refused(start):
    with pytest.raises(StateError, match="k"):
        evolved(start, {"n": "count()"}, {"n": "count()"}, pa.int64(), pa.int32())
    subject = Subject(start, pa.int64(), True, True)
    subject.harness.process(batch_of([(1, 5, None, None, None, 0)], pa.int64()))
    for window in (TumblingWindow(SIZE + 1), TumblingWindow(SIZE, 3)):
        with pytest.raises(StateError, match="windows"):
            start(
                TumblingAggregate(window, plan_for(pa.int64(), True, True)),
                subject.harness.tables(),
            )
