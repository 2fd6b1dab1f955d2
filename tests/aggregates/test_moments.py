"""Variance and standard deviation against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.operators.aggregation.aggregates import stddev, variance

from .conftest import SLOTS, Aggregated, whole_and_in_parts

quick = settings(max_examples=20, deadline=None)
BASES = st.sampled_from([0.0, 1e9, -3e15, 1e-7])
KINDS = [
    (variance("x"), 1, False),
    (variance("x", population=True), 0, False),
    (stddev("x"), 1, True),
    (stddev("x", population=True), 0, True),
]


def exact(values, sample, root):
    values = [Fraction(value) for value in values if value is not None]
    if len(values) <= sample:
        return None
    mean = sum(values) / len(values)
    found = float(sum((value - mean) ** 2 for value in values) / (len(values) - sample))
    return math.sqrt(found) if root else found


@pytest.mark.parametrize(("aggregate", "sample", "root"), KINDS, ids=str)
@quick
@given(data=st.data())
def test_equals_exact_arithmetic_to_12_digits_however_batches_are_cut(
    aggregate, sample, root, data
):
    base = data.draw(BASES)
    values = st.none() | st.floats(-1e3, 1e3).map(lambda value: base + value)
    rows = data.draw(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.just(0), values)))
    found = whole_and_in_parts(aggregate, pa.schema([("x", pa.float64())]), rows, data)
    for slot in range(SLOTS):
        mine = [value for at, _, value in rows if at == slot]
        expected = exact(mine, sample, root)
        for results in found:
            if expected is None:
                assert results[slot] is None
            else:
                assert results[slot] == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_a_large_mean_takes_no_digits():
    rng = np.random.default_rng(5)
    values = (1e12 + rng.normal(size=20_000)).tolist()
    one = Aggregated(variance("x"), pa.schema([("x", pa.float64())]))
    many = Aggregated(variance("x"), pa.schema([("x", pa.float64())]))
    one.add([(0, 0, value) for value in values], 1)
    for low in range(0, len(values), 7):
        many.add([(0, 0, value) for value in values[low : low + 7]], 1)
    expected = exact(values, 1, False)
    assert one.results(1)[0] == pytest.approx(expected, rel=1e-13)
    assert many.results(1)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("type_", [pa.int8(), pa.uint64(), pa.float32(), pa.decimal128(14, 2)])
def test_numbers_of_all_types(type_):
    state = Aggregated(variance("x"), pa.schema([("x", type_)]))
    values = pa.array([3, None, 5, 10], pa.int32()).cast(type_).to_pylist()
    state.add([(0, 0, value) for value in values], 1)
    assert state.results(1) == [13.0]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_makes_the_result_none(odd):
    for values in ([1.0, odd, 2.0], [odd, 1.0, 2.0], [odd, odd]):
        state = Aggregated(stddev("x"), pa.schema([("x", pa.float64())]))
        for value in values:
            state.add([(0, 0, value)], 1)
        assert math.isnan(state.results(1)[0])


def test_many_slots_go_into_one_at_once():
    values = [float(value * value) for value in range(100)]
    state = Aggregated(variance("x"), pa.schema([("x", pa.float64())]))
    state.add([(slot, 0, value) for slot, value in enumerate(values)], 100)
    state.state.merge(np.zeros(99, np.intp), np.arange(1, 100))
    assert state.results(1)[0] == pytest.approx(exact(values, 1, False), rel=1e-13)
