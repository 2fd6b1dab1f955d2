"""Interval joins against a model that goes record by record, whatever the cuts, crashes and rescales."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.operators.elements import WATERMARK_MAX, ColumnBatch
from headgate.operators.graph import Origin
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep, outer_sides

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
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    history=st.lists(event, max_size=14),
    bounds_=st.tuples(st.integers(-9, 9), st.integers(0, 9)),
    key_type=st.sampled_from(KEY_TYPES),
    parallelism=st.integers(1, 3),
)
def test_any_history(fleet, bounds, how, history, bounds_, key_type, parallelism):
    """Rows, watermarks, cuts made late or dropped, restores from base and deltas at any parallelism."""
    lower, upper = bounds_[0], bounds_[0] + bounds_[1]
    model = Model(how, lower, upper)
    running = fleet(partial(operator, how, lower, upper, key_type), KEYS, parallelism)
    out, late, number, now, lates = [], ([], []), 0, 0, 0
    pending = None
    for kind, *what in [*history, ("restore", 2), ("end",)]:
        if kind == "rows":
            side, rows, size = what
            numbered = [(key, now + t, number + i) for i, (key, t) in enumerate(rows)]
            number += len(rows)
            for row in numbered:
                model.process(side, row)
            for low in range(0, len(rows), size):
                running.process(side, batch(side, numbered[low : low + size], key_type))
        elif kind == "watermark":
            now += what[0]
            model.advance(now)
            running.watermark(now)
        elif kind == "cut":
            if pending is not None:
                if what[0]:
                    running.complete(pending)
                else:
                    for each in pending:
                        each.discard()
            pending = running.cut()
        elif kind == "restore":
            # A failure right behind the barrier: what was emitted before it stays.
            out += running.take()
            for side, tag in enumerate(("late", "late_other")):
                late[side].extend(running.take(tag))
            lates += running.counter("numLateRecordsDropped")
            if pending is not None:
                running.complete(pending)
                pending = None
            running = running.restored(running.complete(running.cut()), what[0])
        else:
            model.advance(WATERMARK_MAX)
            running.watermark(WATERMARK_MAX)
    out += running.take()
    assert by_key(out, key_type) == by_key(expected(model, key_type), key_type)
    assert lates == len(model.late[0]) + len(model.late[1])
    assert sorted(row[1] for row in late[0]) == sorted(row[2] for row in model.late[0])
    assert sorted(row[0] for row in late[1]) == sorted(float(row[2]) for row in model.late[1])
    assert running.gauge("numLeftRowsWaiting") == running.gauge("numRightRowsWaiting") == 0
