"""Count and global windows against a record-by-record model: cuts into batches, snapshots, rescaling."""

from __future__ import annotations

import builtins

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import StateError
from headgate.operators.aggregation.aggregates import AggregatePlan, avg, count, max, sum
from headgate.operators.elements import WATERMARK_MAX
from headgate.operators.windows import counts as count_table
from headgate.operators.windows.counts import CountAggregate
from headgate.operators.windows.kinds import CountWindow, Early, GlobalWindow
from headgate.operators.windows.panes.global_windows import GlobalAggregate
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of

SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int64())])
AGGREGATES = {"n": count(), "total": sum("x"), "top": max("x"), "mean": avg("x")}
rows_ = st.tuples(
    st.sampled_from(["a", "b", "c", "somewhat longer than a cell", None]),
    st.none() | st.integers(-50, 50),
    st.integers(0, 99),
)


@pytest.fixture(autouse=True, scope="module")
def counts_compact(compacting):
    """Cells that are done with move soon where panes do."""
    before = count_table.DEAD_MIN
    if compacting:
        count_table.DEAD_MIN = 3
    yield
    count_table.DEAD_MIN = before


def plan(keyed=True):
    return AggregatePlan(("user",) if keyed else (), AGGREGATES, SCHEMA)


def owner(key, parallelism):
    return owner_of(key_group_of(hash_key(key), 8), parallelism, 8) if parallelism > 1 else 0


def expected(records):
    values = [x for _, x, _ in records if x is not None]
    total = builtins.sum(values) if values else None
    top = builtins.max(values) if values else None
    return (len(records), total, top, total / len(values) if values else None)


def count_model(window, rows, keyed):
    """The results, in the order in which they are due."""
    found, seen = [], {}
    for row in rows:
        key = row[0] if keyed else None
        seen.setdefault(key, []).append(row)
        if len(seen[key]) % window.every == 0:
            keys = (key,) if keyed else ()
            found.append((*keys, *expected(seen[key][-window.size :]), row[-1]))
    return found


def in_parts(start, make_batch, operator, batches, cut, parallelisms, keyed):
    """Run the batches, with a snapshot and other subtasks behind batch `cut`; yields the subtasks."""
    tables = None
    for part, parallelism in zip((batches[:cut], batches[cut:]), parallelisms, strict=True):
        harnesses = [start(operator, tables, index, parallelism) for index in range(parallelism)]
        for rows in part:
            for index, harness in enumerate(harnesses):
                mine = [r for r in rows if owner(r[0] if keyed else None, parallelism) == index]
                harness.process(make_batch(mine, SCHEMA))
        made = [harness.tables() for harness in harnesses]
        tables = {name: pa.concat_tables([t[name] for t in made]) for name in made[0]}
        yield harnesses


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "whole"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_count_windows_equal_record_by_record(start, make_batch, keyed, data):
    window = CountWindow(data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8)))
    batches = data.draw(st.lists(st.lists(rows_, max_size=25), max_size=8))
    cut, parallelisms = data.draw(st.integers(0, 8)), [1, 1]
    if keyed:
        parallelisms = [data.draw(st.integers(1, 3)) for _ in range(2)]
    found = []
    operator = CountAggregate(window, plan(keyed))
    for harnesses in in_parts(start, make_batch, operator, batches, cut, parallelisms, keyed):
        found += [row for harness in harnesses for row in harness.output.rows()]
    wanted = count_model(window, [row for rows in batches for row in rows], keyed)
    if parallelisms == [1, 1]:
        assert found == wanted
    assert sorted(found, key=str) == sorted(wanted, key=str)


@pytest.mark.parametrize("sizes", [(1, 1), (4, 2), (5, 3), (1, 3), (6, 6)])
def test_cells_of_count_windows_do_not_pile_up(start, make_batch, sizes):
    window, most = CountWindow(*sizes), 0
    harness = start(CountAggregate(window, plan()))
    for number in range(30):
        names = ["ab"[number % 2], "c", "d", f"once {number}"]
        harness.process(make_batch([(name, 1, 1) for name in names * 6], SCHEMA))
        most = builtins.max(most, harness.tables()["counts"].num_rows)
    needed = 33 * (window.size + 1)
    assert most <= 2 * needed + 24 if count_table.DEAD_MIN < 100 else most <= 30 * 24


def test_a_snapshot_of_other_count_windows_is_refused(start, make_batch):
    harness = start(CountAggregate(CountWindow(6, 6), plan()))
    harness.process(make_batch([("a", 1, 1)] * 5, SCHEMA))
    with pytest.raises(StateError, match="other windows new=`count 4`"):
        start(CountAggregate(CountWindow(4, 4), plan()), harness.tables())


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "whole"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_global_windows_show_what_changed_and_all_at_the_end(start, make_batch, keyed, data):
    window = GlobalWindow(Early(0, data.draw(st.sampled_from([0, 1, 7]))))
    batches = data.draw(st.lists(st.lists(rows_, max_size=15), max_size=6))
    cut, parallelisms = data.draw(st.integers(0, 6)), [1, data.draw(st.integers(1, 3))]
    parallelisms = parallelisms if keyed else [1, 1]
    operator, harnesses, rows = GlobalAggregate(window, plan(keyed)), [], sum_of(batches)
    for harnesses in in_parts(start, make_batch, operator, batches, cut, parallelisms, keyed):
        shown = [row for harness in harnesses for row in harness.output.rows()]
        assert window.early or not shown
    state = {}
    for row in rows:
        state.setdefault(row[0] if keyed else None, []).append(row)
    found = []
    for harness in harnesses:
        harness.output.events.clear()
        harness.watermark(WATERMARK_MAX)
        harness.operator.finish()
        found += [row[:-1] for row in harness.output.rows()]
        assert harness.output.events[-1] == ("watermark", WATERMARK_MAX)
    wanted = [((key,) if keyed else ()) + expected(records) for key, records in state.items()]
    assert sorted(found, key=str) == sorted(wanted, key=str)


def sum_of(batches):
    return [row for rows in batches for row in rows]


def test_global_windows_show_the_keys_that_changed(start, make_batch):
    harness = start(GlobalAggregate(GlobalWindow(Early(1_000)), plan()))
    harness.process(make_batch([("a", 1, 5), ("b", 2, 9)], SCHEMA))
    assert harness.output.rows() == []
    harness.timers.move(1_000)
    harness.process(make_batch([("b", 3, 7)], SCHEMA))
    harness.timers.move(1_000)
    harness.timers.move(5_000)
    assert harness.output.rows() == [
        ("a", 1, 1, 1, 1.0, 9), ("b", 1, 2, 2, 2.0, 9), ("b", 2, 5, 3, 2.5, 9),
    ]  # fmt: skip
    harness.process(make_batch([("a", 3, 20)], SCHEMA))
    harness.operator.close()
    assert harness.timers.waiting == []
