"""Counts of different values, exact and estimated."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError, StateError
from headgate.operators.aggregation.aggregates import (
    AggregatePlan,
    approx_count_distinct,
    count_distinct,
)
from headgate.state.aggregates.sketches import REGISTERS
from headgate.state.slots.arrays import SlotLists
from headgate.state.values import values_of

from .conftest import SLOTS, Aggregated, whole_and_in_parts

quick = settings(max_examples=15, deadline=None)
TYPES = [
    (pa.int8(), st.integers(-3, 3)),
    (pa.uint64(), st.sampled_from([0, 2**63, 2**64 - 1])),
    (pa.float64(), st.sampled_from([0.0, -0.0, math.nan, -math.inf, 1.5])),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=1)),
    (pa.decimal128(5, 1), st.sampled_from([Decimal("1.0"), Decimal("2.5")])),
    (pa.binary(2), st.sampled_from([b"ab", b"cd"])),
]


@pytest.mark.parametrize(("type_", "values"), TYPES, ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("kind", [count_distinct, approx_count_distinct])
@quick
@given(data=st.data())
def test_counts_different_values_however_batches_are_cut(type_, values, kind, data):
    row = st.tuples(st.integers(0, SLOTS - 1), st.just(0), st.none() | values)
    rows = data.draw(st.lists(row, max_size=60))
    expected = []
    for slot in range(SLOTS):
        mine = {"nan" if row[2] != row[2] else row[2] for row in rows if row[0] == slot}
        expected.append(len(mine - {None}))
    found = whole_and_in_parts(kind("x"), pa.schema([("x", type_)]), rows, data)
    assert found == (expected, expected)


@pytest.mark.parametrize("count", [1, 100, 1_500, 5_000, 20_000, 200_000])
@pytest.mark.parametrize("type_", [pa.int64(), pa.float64()], ids=str)
def test_estimates_keep_to_their_error(count, type_):
    errors = []
    for seed in range(32):
        values = pa.array(np.arange(count) * 3 + seed * 10**7).cast(type_)
        state = Aggregated(approx_count_distinct("x"), pa.schema([("x", type_)]))
        columns = pa.record_batch([values], names=["x"])
        state.state.add(*_rows(columns), 1)
        state.state.add(*_rows(columns.slice(0, count // 2)), 1)
        errors.append(state.results(1)[0] / count - 1)
    promised = 1.04 / math.sqrt(REGISTERS)
    assert np.sqrt(np.mean(np.square(errors))) < 1.3 * promised
    assert abs(np.mean(errors)) < promised / 2


def _rows(batch):
    return np.zeros(batch.num_rows, np.intp), {"x": values_of(batch.column(0))}


def test_a_cut_keeps_its_values_while_more_come():
    state = Aggregated(count_distinct("x"), pa.schema([("x", pa.int64())]))
    state.add([(0, 0, 1), (0, 0, 2), (1, 0, 3)], 2)
    cut = state.state.cut(1)
    state.state._changed.table.cut()
    state.add([(0, 0, value) for value in range(10_000)], 2)
    assert [one.to_pylist() for one in cut.columns(cut.slots(None))] == [[[1, 2], [3]]]
    assert state.results(2) == [10_000, 1]


def test_lists_grow_in_twice_the_room_at_most():
    lists = SlotLists()
    lists.reserve(3)
    rng = np.random.default_rng(2)
    held = [[], [], []]
    for _ in range(200):
        slots = rng.integers(0, 3, rng.integers(0, 20))
        items = rng.integers(0, 99, len(slots))
        lists.append(slots, items)
        for slot, item in zip(slots.tolist(), items.tolist(), strict=True):
            held[slot].append(item)
    lengths, items = lists.of(np.arange(3))
    assert lengths.tolist() == [len(part) for part in held]
    assert items.tolist() == [item for part in held for item in part]
    # all rooms that lists have moved out of are together no larger than the last one
    assert lists.nbytes <= 4 * 8 * sum(lengths.tolist())


def test_memory_grows_with_the_values_and_is_given_up():
    state = Aggregated(count_distinct("x"), pa.schema([("x", pa.string())]))
    state.add([(0, 0, "a" * 500), (0, 0, "a" * 500)], 1)
    once = state.state.object_bytes
    state.add([(1, 0, "a" * 500)], 2)
    assert state.state.object_bytes - once < 100
    state.state.reset()
    state.add([(0, 0, "b")], 1)
    assert state.results(1) == [1]
    assert state.state.object_bytes < once


@pytest.mark.parametrize("kind", [count_distinct, approx_count_distinct])
def test_what_cannot_be_told_apart_is_refused(kind):
    with pytest.raises(PlanError, match="told apart"):
        AggregatePlan((), {"r": kind("x")}, pa.schema([("x", pa.list_(pa.int8()))]))


@pytest.mark.parametrize("kind", [count_distinct, approx_count_distinct])
def test_a_snapshot_of_another_type_is_refused(kind):
    state = Aggregated(kind("x"), pa.schema([("x", pa.int64())]))
    with pytest.raises(StateError, match="does not fit"):
        state.state.load(np.zeros(1, np.intp), pa.table({"r": [1.5]}), 1)
