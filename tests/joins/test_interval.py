"""Interval joins against a model that goes record by record, whatever the cuts, crashes and rescales."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError, StateError
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch, ObjectBatch
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep, outer_sides
from headgate.operators.origin import Origin
from headgate.state.snapshot import RestoredState

HOWS = ["inner", "left", "right", "full"]
KEY_TYPES = [pa.int64(), pa.string(), pa.dictionary(pa.int32(), pa.string())]
KEYS = (("k",), ("k",))


def schemas(key_type):
    left = pa.schema(
        [pa.field("k", key_type), pa.field("a", pa.int64()), pa.field("t", pa.string())]
    )
    right = pa.schema([pa.field("b", pa.float64()), pa.field("k", key_type)])
    return left, right


def operator(how, lower, upper, key_type=KEY_TYPES[0], name="join"):
    outer = outer_sides(how)
    columns = join_columns(
        schemas(key_type), KEYS, (outer[1], outer[0]), None, ("l", "r"), Origin("here")
    )
    return IntervalJoin(JoinStep(name, columns, outer), Interval(lower, upper))


def key_of(number, key_type):
    if number is None:
        return None
    return number if key_type == pa.int64() else f"key {number}" * (1 + number % 2)


def batch(side, rows, key_type=KEY_TYPES[0]):
    """Rows (key, time, number) as a batch of one side."""
    keys = pa.array([key_of(row[0], key_type) for row in rows], key_type)
    numbers = [row[2] for row in rows]
    if side == 0:
        columns = [keys, pa.array(numbers), pa.array([f"t{n}" for n in numbers])]
    else:
        columns = [pa.array(numbers, pa.float64()), keys]
    data = pa.RecordBatch.from_arrays(columns, schema=schemas(key_type)[side])
    return ColumnBatch(data, np.array([row[1] for row in rows], np.int64))


class Model:
    """One record after the other; rows are (key, time, number)."""

    def __init__(self, how, lower, upper):
        self.outer, self.lower, self.upper = outer_sides(how), lower, upper
        self.watermark = -(2**62)
        self.waiting = ([], [])
        self.late = ([], [])
        self.out = []

    def result(self, left, right):
        key = (left or right)[0]
        time = max(row[1] for row in (left, right) if row)
        a, t = (left[2], f"t{left[2]}") if left else (None, None)
        self.out.append((key, a, t, float(right[2]) if right else None, time))

    def process(self, side, row):
        if row[1] < self.watermark:
            self.late[side].append(row)
            return
        met = False
        for entry in self.waiting[1 - side]:
            pair = (row, entry[0]) if side == 0 else (entry[0], row)
            distance = pair[1][1] - pair[0][1]
            if row[0] == entry[0][0] and self.lower <= distance <= self.upper:
                met = entry[1] = True
                self.result(*pair)
        if not self.gone(side, row):
            self.waiting[side].append([row, met])
        elif not met and self.outer[side]:
            self.alone(side, row)

    def gone(self, side, row):
        last = row[1] + self.upper if side == 0 else row[1] - self.lower
        return last < self.watermark

    def alone(self, side, row):
        self.result(*((row, None) if side == 0 else (None, row)))

    def advance(self, watermark):
        self.watermark = max(watermark, self.watermark)
        for side in (0, 1):
            gone = [entry for entry in self.waiting[side] if self.gone(side, entry[0])]
            self.waiting[side][:] = [e for e in self.waiting[side] if not self.gone(side, e[0])]
            if self.outer[side]:
                for row, met in sorted(gone, key=lambda entry: entry[0][1]):
                    if not met:
                        self.alone(side, row)


def by_key(rows, key_type):
    found = defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return dict(found)


def expected(model, key_type):
    return [(key_of(row[0], key_type), *row[1:]) for row in model.out]


rows_ = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(-15, 25)),
    min_size=1,
    max_size=12,
)
event = st.one_of(
    st.tuples(st.just("rows"), st.integers(0, 1), rows_, st.integers(1, 12)),
    st.tuples(st.just("watermark"), st.integers(0, 12)),
    st.tuples(st.just("cut"), st.booleans()),
    st.tuples(st.just("restore"), st.integers(1, 3)),
)


@pytest.mark.parametrize("how", HOWS)
@settings(
    max_examples=45, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    history=st.lists(event, max_size=14),
    bounds_=st.tuples(st.integers(-9, 9), st.integers(0, 9)),
    key_type=st.sampled_from(KEY_TYPES),
    parallelism=st.integers(1, 3),
)
def test_any_history(fleet, replay, bounds, how, history, bounds_, key_type, parallelism):
    lower, upper = bounds_[0], bounds_[0] + bounds_[1]
    model = Model(how, lower, upper)
    running = fleet(partial(operator, how, lower, upper, key_type), KEYS, parallelism)
    found = replay(running, model, history, partial(batch, key_type=key_type))
    assert by_key(found.out, key_type) == by_key(expected(model, key_type), key_type)
    assert found.dropped == len(model.late[0]) + len(model.late[1])
    assert sorted(row[1] for row in found.late[0]) == sorted(row[2] for row in model.late[0])
    numbers = sorted(float(row[2]) for row in model.late[1])
    assert sorted(row[0] for row in found.late[1]) == numbers
    for side in ("left", "right"):
        assert found.fleet.gauge(side) == 0


def test_partners_keep_their_order_of_arrival_after_a_restore(fleet, replay):
    """Also if one of them was marked as matched after the base of its snapshots was written."""
    history = [
        ("rows", 1, [(2, 16), (2, 15)], 2),
        ("cut", True),
        ("rows", 0, [(2, 9)], 1),
        ("restore", 1),
        ("rows", 0, [(2, 8)], 1),
    ]
    model = Model("right", 7, 8)
    found = replay(fleet(partial(operator, "right", 7, 8), KEYS, 1), model, history, batch)
    assert found.out == expected(model, KEY_TYPES[0])
    assert [row[3:] for row in found.out] == [(0.0, 16), (0.0, 16), (1.0, 15)]


# --- what histories do not show -----------------------------------------------------------------


def running(fleet, how="inner", lower=-10, upper=0, **more):
    return fleet(partial(operator, how, lower, upper, **more), KEYS)


def test_rows_that_can_meet_nothing_more_free_their_memory(fleet):
    """A stream that goes on for long, with keys that never come back, holds no more than its interval."""
    joined = running(fleet, "full")
    sizes = []
    for number in range(160):
        times = np.arange(number * 1_000, (number + 1) * 1_000)
        for side in (0, 1):
            keys = pa.array(times * 2 + side)
            values = pa.array(times.astype(float if side else int))
            columns = [values, keys] if side else [keys, values, pa.array(times).cast(pa.string())]
            data = pa.RecordBatch.from_arrays(columns, schema=schemas(pa.int64())[side])
            joined.process(side, ColumnBatch(data, times))
        joined.watermark(int(times[-1]) - 100)
        (only,) = joined.operators
        sizes.append(only._keys.nbytes + sum(side.nbytes for side in only._sides))
        assert joined.gauge("left") <= 111
    assert max(sizes[90:]) <= 1.1 * max(sizes[:90])
    joined.watermark(WATERMARK_MAX)
    assert len(joined.take()) == 2 * 160_000


def test_a_key_that_everybody_has(fleet, monkeypatch):
    """Long chains are searched, not walked: rows out of reach are not looked at one by one."""
    from headgate.operators.joins import matching

    joined = running(fleet, "inner", -5, 0)
    rows = [(1, time, time) for time in range(20_000)]
    joined.process(1, batch(1, rows))
    walked = []
    real = matching.Chains._walked

    def counting(self, probe, *rest):
        walked.append(len(probe))
        return real(self, probe, *rest)

    monkeypatch.setattr(matching.Chains, "_walked", counting)
    joined.process(0, batch(0, rows))
    assert sum(walked) == 0
    assert len(joined.take()) == 6 * 20_000 - 15


@pytest.mark.parametrize(
    ("how", "lower", "upper", "delay"),
    [
        ("inner", -10, 5, 0),
        ("left", -10, 5, 6),
        ("right", -10, 5, 11),
        ("full", -10, 5, 11),
        ("left", -10, -5, 0),
        ("left", -10, 0, 1),
        ("right", 3, 5, 0),
    ],
)
def test_watermarks_stay_behind_rows_that_wait_to_go_out_alone(fleet, how, lower, upper, delay):
    joined = running(fleet, how, lower, upper)
    for watermark in (100, 200, WATERMARK_MAX):
        joined.process(0, batch(0, [(1, watermark - 50, 1)]))
        joined.watermark(watermark)
    (recorder,) = joined.recorders
    passed = [what for kind, what in recorder.events if kind == "watermark"]
    assert passed == [100 - delay, 200 - delay, WATERMARK_MAX]
    now = -(2**62)
    for kind, what in recorder.events:
        if kind == "rows":
            assert what.timestamps.min() > now
        elif kind == "watermark":
            now = what


def test_a_snapshot_of_another_how_is_refused(fleet):
    inner = running(fleet, "inner")
    inner.process(0, batch(0, [(1, 5, 1)]))
    tables = {name: parts[-1] for name, (_, parts) in inner.complete(inner.cut())[0].items()}
    outer = operator("left", -10, 0)
    with pytest.raises(StateError, match="another `how`"):
        restore(fleet, outer, tables)


def restore(fleet, made, tables):
    started = fleet(lambda: made, KEYS)
    started.operators[0].restore(RestoredState(tables=tables))
    return started


def test_columns_may_come_and_go(fleet):
    inner = running(fleet, "inner")
    inner.process(0, batch(0, [(1, 5, 1)]))
    tables = {name: parts[-1] for name, (_, parts) in inner.complete(inner.cut())[0].items()}
    tables["left"] = tables["left"].rename_columns(
        ["old" if name == "t" else name for name in tables["left"].column_names]
    )
    again = restore(fleet, operator("inner", -10, 0), tables)
    again.process(1, batch(1, [(1, 0, 7)]))
    assert again.take() == [(1, 1, None, 7.0, 5)]
    tables["left"] = tables["left"].set_column(4, "a", pa.array(["one"]))
    with pytest.raises(StateError, match="column `a` was string and is now int64"):
        restore(fleet, operator("inner", -10, 0), tables)


def test_an_interval_may_change_between_runs(fleet):
    """What had stopped waiting does not come back; what has no time left goes with the next watermark."""
    before = running(fleet, "left", -10, 5)
    before.process(0, batch(0, [(1, 10, 1), (1, 20, 2)]))
    before.watermark(16)
    assert before.take() == [(1, 1, "t1", None, 10)]
    chains = before.complete(before.cut())
    longer = fleet(partial(operator, "left", -10, 50), KEYS, 1, chains)
    longer.process(1, batch(1, [(1, 16, 7)]))
    longer.watermark(WATERMARK_MAX)
    assert longer.take() == [(1, 2, "t2", 7.0, 20)]
    shorter = fleet(partial(operator, "left", -10, -9), KEYS, 1, chains)
    again = shorter.restored(shorter.complete(shorter.cut()), 1)
    for each in (shorter, again):
        each.watermark(17)
        assert each.take() == [(1, 2, "t2", None, 20)]


def test_batches_of_objects_and_without_times_are_refused(fleet):
    joined = running(fleet)
    (only,) = joined.operators
    with pytest.raises(PlanError, match="columns"):
        only.process(ObjectBatch([1], np.array([1])), 0)
    with pytest.raises(PlanError, match="needs event time"):
        only.process(ColumnBatch(batch(0, [(1, 1, 1)]).data, None), 0)
