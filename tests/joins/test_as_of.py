"""Temporal joins against a model that goes record by record."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.operators.elements import WATERMARK_MAX, ColumnBatch
from headgate.operators.joins.as_of import AsOfJoin
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.step import JoinStep, outer_sides
from headgate.operators.origin import Origin

KEYS = (("k", "c"), ("k", "d"))
SCHEMAS = (
    pa.schema([("k", pa.int64()), ("c", pa.string()), ("a", pa.int64())]),
    pa.schema([("b", pa.string()), ("d", pa.string()), ("k", pa.int64())]),
)


def operator(how, valid_for=None):
    columns = join_columns(
        SCHEMAS, KEYS, (False, how == "left"), None, ("rows", "versions"), Origin("here")
    )
    return AsOfJoin(JoinStep("join", columns, outer_sides(how)), valid_for)


def batch(side, rows):
    keys = pa.array([row[0] for row in rows], pa.int64())
    texts = pa.array([None if row[0] is None else f"c{row[0]}" for row in rows], pa.string())
    numbers = [row[2] for row in rows]
    columns = [keys, texts, pa.array(numbers)]
    if side:
        columns = [pa.array([f"v{n}" for n in numbers]), texts, keys]
    data = pa.RecordBatch.from_arrays(columns, schema=SCHEMAS[side])
    return ColumnBatch(data, np.array([row[1] for row in rows], np.int64))


class Model:
    """Rows and versions (key, time, number); all versions that ever counted are kept."""

    def __init__(self, how, valid_for=None):
        self.outer, self.watermark = how == "left", -(2**62)
        self.valid_for = 2**62 if valid_for is None else valid_for
        self.waiting, self.versions = [], defaultdict(list)
        self.out, self.late = [], ([], [])

    def process(self, side, row):
        if side == 0:
            (self.late[0] if row[1] <= self.watermark else self.waiting).append(row)
            return
        passed = [v[1] for v in self.versions[row[0]] if v[1] <= self.watermark]
        old = row[1] + self.valid_for <= self.watermark + 1
        if old or (row[1] <= self.watermark and passed and max(passed) > row[1]):
            self.late[1].append(row)
        else:
            self.versions[row[0]].append(row)

    def advance(self, watermark):
        self.watermark = max(self.watermark, watermark)
        due = [row for row in self.waiting if row[1] <= self.watermark]
        self.waiting = [row for row in self.waiting if row[1] > self.watermark]
        for key, time, number in sorted(due, key=lambda row: row[1]):
            valid = [v for v in self.versions[key] if v[1] <= time]
            text = None if key is None else f"c{key}"
            if valid and time - max(v[1] for v in valid) < self.valid_for:
                version = max(valid, key=lambda v: (v[1], v[2]))
                self.out.append((key, text, number, f"v{version[2]}", text, time))
            elif self.outer:
                self.out.append((key, text, number, None, None, time))


def by_key(rows):
    found = defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return dict(found)


rows_ = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 2)), st.integers(-8, 25)), min_size=1, max_size=14
)
event = st.one_of(
    st.tuples(st.just("rows"), st.integers(0, 1), rows_, st.integers(1, 14)),
    st.tuples(st.just("watermark"), st.integers(0, 12)),
    st.tuples(st.just("cut"), st.booleans()),
    st.tuples(st.just("restore"), st.integers(1, 3)),
)


@pytest.mark.parametrize("how", ["inner", "left"])
@settings(
    max_examples=45, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    history=st.lists(event, max_size=16),
    parallelism=st.integers(1, 3),
    valid_for=st.sampled_from([None, None, 1, 5, 20]),
)
def test_any_history(fleet, replay, bounds, how, history, parallelism, valid_for):
    model = Model(how, valid_for)
    running = fleet(partial(operator, how, valid_for), KEYS, parallelism)
    found = replay(running, model, history, batch)
    assert by_key(found.out) == by_key(model.out)
    assert found.dropped == len(model.late[0]) + len(model.late[1])
    assert sorted(row[2] for row in found.late[0]) == sorted(row[2] for row in model.late[0])
    assert sorted(row[0] for row in found.late[1]) == sorted(f"v{row[2]}" for row in model.late[1])
    assert found.fleet.gauge("left") == 0
    keys = [key for key, versions in model.versions.items() if versions]
    waiting = len(keys) if valid_for is None else 0
    assert found.fleet.gauge("right") == waiting


def test_of_each_key_one_version_is_kept_behind_the_watermark(fleet):
    """A few keys that change for ever take no more memory than at the beginning."""
    joined, sizes = fleet(partial(operator, "inner"), KEYS), []
    for number in range(100):
        times = np.arange(number * 1_000, (number + 1) * 1_000)
        rows = [(int(time) % 7, int(time), int(time)) for time in times]
        joined.process(1, batch(1, rows))
        joined.process(0, batch(0, rows[::100]))
        joined.watermark(int(times[-1]))
        assert joined.gauge("right") == 7
        assert joined.gauge("left") == 0
        sizes.append(sum(side.nbytes for side in joined.operators[0]._sides))
    assert max(sizes[50:]) <= 1.1 * max(sizes[:50])
    out = joined.take()
    assert [(row[2], row[3]) for row in out] == [(n, f"v{n}") for n in range(0, 100_000, 100)]


def test_a_key_with_many_versions_to_come(fleet):
    joined = fleet(partial(operator, "inner"), KEYS)
    joined.process(1, batch(1, [(1, time, time) for time in range(0, 20_000, 2)]))
    joined.process(0, batch(0, [(1, time, time) for time in range(20_000)]))
    joined.watermark(WATERMARK_MAX)
    assert [row[3] for row in joined.take()] == [f"v{n - n % 2}" for n in range(20_000)]


@pytest.mark.parametrize("size", [1, 9])
def test_versions_behind_the_watermark(fleet, size):
    """The newest one counts from now on, of equal ones the last; older ones can change nothing."""
    joined = fleet(partial(operator, "left"), KEYS)
    joined.process(1, batch(1, [(1, 5, 1)]))
    joined.watermark(10)
    versions = [(1, 5, 2), (1, 4, 3), (1, 8, 4), (1, 7, 5), (1, 8, 6), (2, 3, 7), (2, 1, 8)]
    for low in range(0, len(versions), size):
        joined.process(1, batch(1, versions[low : low + size]))
    assert [row[0] for row in joined.take("late_other")] == ["v3", "v5", "v8"]
    assert joined.gauge("right") == 2
    joined.process(0, batch(0, [(1, 11, 1), (2, 12, 2), (3, 11, 3), (1, 10, 4)]))
    joined.watermark(WATERMARK_MAX)
    assert [(row[2], row[3]) for row in joined.take()] == [(1, "v6"), (3, None), (2, "v7")]
    assert [row[2] for row in joined.take("late")] == [4]


@pytest.mark.parametrize("others", [0, 100])
def test_of_versions_of_equal_times_the_last_one_counts(fleet, others):
    joined = fleet(partial(operator, "inner"), KEYS)
    versions = [(1, 20, 1), (1, 20, 2), (1, 19, 3), *((1, 1, 4) for _ in range(others))]
    joined.process(1, batch(1, versions))
    joined = joined.restored(joined.complete(joined.cut()), 2)
    joined.process(0, batch(0, [(1, 25, 1), (1, 19, 2)]))
    joined.watermark(30)
    assert [row[3] for row in joined.take()] == ["v3", "v2"]
    joined.process(0, batch(0, [(1, 31, 3)]))
    joined.watermark(WATERMARK_MAX)
    assert [row[3] for row in joined.take()] == ["v2"]


def test_keys_that_never_come_back_are_forgotten(fleet):
    """With a bound on how long versions are valid, also of keys without another version."""
    joined, sizes = fleet(partial(operator, "inner", 4_000), KEYS), []
    for number in range(100):
        times = range(number * 2_000, (number + 1) * 2_000)
        joined.process(1, batch(1, [(time, time, time) for time in times]))
        joined.process(0, batch(0, [(time - 3_999, time, time) for time in times[::100]]))
        joined.process(0, batch(0, [(time - 4_000, time, -time) for time in times[::100]]))
        joined.watermark(times[-1])
        # as long as they are valid, and the eighth of that between two sweeps
        assert joined.gauge("right") <= 4_500
        (only,) = joined.operators
        sizes.append(only._keys.nbytes + sum(side.nbytes for side in only._sides))
    assert max(sizes[60:]) <= 1.1 * max(sizes[:60])
    out = joined.take()
    assert [(row[2], row[3]) for row in out] == [
        (n, f"v{n - 3_999}") for n in range(4_000, 200_000, 100)
    ]


def test_what_is_valid_no_more_does_not_come_back(fleet):
    """Neither from an older base, nor with another bound."""
    joined = fleet(partial(operator, "left", 10), KEYS)
    joined.process(1, batch(1, [(1, 0, 1), (2, 5, 2)]))
    joined.watermark(8)
    joined.complete(joined.cut())
    joined.watermark(12)
    chains = joined.complete(joined.cut())
    again = fleet(partial(operator, "left", 1_000), KEYS, 1, chains)
    assert again.gauge("right") == 1
    again.process(1, batch(1, [(1, 3, 3), (1, 4, 4)]))
    assert [row[0] for row in again.take("late_other")] == ["v3"]
    again.process(0, batch(0, [(1, 20, 1), (2, 20, 2)]))
    again.watermark(WATERMARK_MAX)
    assert [(row[2], row[3]) for row in again.take()] == [(1, "v4"), (2, "v2")]
