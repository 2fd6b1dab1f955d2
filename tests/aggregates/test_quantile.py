"""Quantiles within their error, the same however batches are cut."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError
from headgate.operators.aggregation.aggregates import parse_aggregate, quantile
from headgate.state.aggregates.sketches import ACCURACY

from .conftest import SLOTS, Aggregated, whole_and_in_parts

SCHEMA = pa.schema([("x", pa.float64())])
QUARTERS = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])


def exact(values, q):
    """NaN is greater than any number."""
    ordered = sorted(values, key=lambda value: (math.isnan(value), value))
    return ordered[math.floor(q * (len(ordered) - 1))] if ordered else None


def near(found, expected, error):
    if expected is None or math.isinf(expected) or expected == 0:
        return found == expected
    if math.isnan(expected):
        return math.isnan(found)
    return abs(found - expected) <= error * abs(expected) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_within_the_error_however_batches_are_cut(data):
    small = st.floats(1.0, 20_000.0)
    value = small | small.map(lambda x: -x) | st.sampled_from([0.0, math.inf, -math.inf, math.nan])
    rows = data.draw(st.lists(st.tuples(st.integers(0, 4), st.just(0), st.none() | value)))
    q = data.draw(QUARTERS)
    whole, parts = whole_and_in_parts(quantile("x", q), SCHEMA, rows, data)
    assert str(whole) == str(parts)
    for slot in range(SLOTS):
        mine = [row[2] for row in rows if row[0] == slot and row[2] is not None]
        assert near(whole[slot], exact(mine, q), ACCURACY)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_numbers_far_apart_share_buckets_the_same_way_in_any_order(data):
    value = st.builds(lambda m, e: m * 10.0**e, st.floats(-9, 9), st.integers(-300, 300))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 1), st.just(0), value)))
    q = data.draw(QUARTERS)
    whole, parts = whole_and_in_parts(quantile("x", q), SCHEMA, rows, data)
    assert whole == parts
    for slot in range(2):
        mine = [row[2] for row in rows if row[0] == slot]
        magnitudes = [abs(x) for x in mine if x]
        spread = math.log(max(magnitudes)) - math.log(min(magnitudes)) if magnitudes else 0.0
        width = 2 * math.atanh(ACCURACY)
        while spread / width + 1 >= 511:
            width *= 2
        assert near(whole[slot], exact(mine, q), math.tanh(width / 2))


@pytest.mark.parametrize("span", [(1, 20_000, 0.01), (1, 500_000_000, 0.02)])
def test_promised_errors_on_many_numbers(span):
    low, high, error = span
    values = np.exp(np.random.default_rng(1).uniform(math.log(low), math.log(high), 50_000))
    for q in (0.01, 0.5, 0.99):
        state = Aggregated(quantile("x", q), SCHEMA)
        state.add([(0, 0, value) for value in values.tolist()], 1)
        assert near(state.results(1)[0], exact(values.tolist(), q), error)


def test_extremes_of_float64():
    for value in (5e-324, 1.7e308, -1.7e308, -5e-324):
        state = Aggregated(quantile("x", 0.5), SCHEMA)
        state.add([(0, 0, value)], 1)
        assert state.results(1)[0] == pytest.approx(value, rel=0.01, abs=5e-324)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan, "x"])
def test_other_places_are_refused(q):
    with pytest.raises(PlanError, match="from 0 to 1"):
        quantile("x", q)


def test_texts():
    assert parse_aggregate("quantile(x, 0.99)") == quantile("x", 0.99)
    assert parse_aggregate(str(quantile("odd name", 1e-5))) == quantile("odd name", 1e-5)
    for text in (
        "quantile(x)",
        "quantile(x, 2)",
        "sum(x, 3)",
        "quantile(x, 0.5, by=y)",
        "min_by(x)",
    ):
        with pytest.raises(PlanError):
            parse_aggregate(text)
