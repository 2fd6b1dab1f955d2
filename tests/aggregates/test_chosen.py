"""first, last, min_by and max_by against a model that takes one record at a time."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError
from headgate.operators.aggregation.aggregates import AggregatePlan, first, last, max_by, min_by

from .conftest import SLOTS, Aggregated, whole_and_in_parts

quick = settings(max_examples=15, deadline=None)
VALUES = [
    (pa.int32(), st.integers(-9, 9)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), st.text(max_size=2)),
    (pa.bool_(), st.booleans()),
    (pa.decimal128(5, 1), st.sampled_from([Decimal("1.5"), Decimal("-2.0")])),
    (pa.list_(pa.int64()), st.lists(st.integers(0, 3), max_size=2)),
]
ORDERS = [
    (pa.int64(), st.sampled_from([-(2**63), -1, 0, 2**63 - 1])),
    (pa.uint64(), st.sampled_from([0, 1, 2**63, 2**64 - 1])),
    (pa.float32(), st.sampled_from([float("-inf"), -1.5, -0.0, 0.0, 2.5, float("inf")])),
    (pa.date32(), st.dates(date(1960, 1, 1), date(1990, 1, 1))),
]


def model(rows, order, last_wins):
    best = {}
    for row in rows:
        slot, value = row[0], row[2]
        if value is None or None in order(row):
            continue
        if slot in best:
            now, before = order(row), order(best[slot])
            if not (now >= before if last_wins else now < before):
                continue
        best[slot] = row
    return [best[slot][2] if slot in best else None for slot in range(SLOTS)]


@pytest.mark.parametrize(("type_", "values"), VALUES, ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("kind", [first, last])
@quick
@given(data=st.data())
def test_by_event_time_then_by_arrival(type_, values, timed, kind, data):
    row = st.tuples(st.integers(0, SLOTS - 1), st.integers(-3, 3), st.none() | values)
    rows = data.draw(st.lists(row))
    expected = model(rows, (lambda row: row[1:2]) if timed else (lambda row: ()), kind is last)
    schema = pa.schema([("x", type_)])
    assert whole_and_in_parts(kind("x"), schema, rows, data, timed) == (expected, expected)


@pytest.mark.parametrize(("type_", "values"), ORDERS, ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("kind", [min_by, max_by])
@quick
@given(data=st.data())
def test_by_another_column(type_, values, kind, data):
    row = st.tuples(
        st.integers(0, SLOTS - 1),
        st.integers(0, 1),
        st.none() | st.integers(0, 99),
        st.none() | values,
    )
    rows = data.draw(st.lists(row))
    expected = model(rows, lambda row: (row[3], row[1]), kind is max_by)
    schema = pa.schema([("x", pa.int64()), ("y", type_)])
    assert whole_and_in_parts(kind("x", "y"), schema, rows, data) == (expected, expected)


def test_nan_is_greater_than_any_number():
    schema = pa.schema([("x", pa.int64()), ("y", pa.float64())])
    rows = [(0, 0, 1, float("inf")), (0, 0, 2, float("nan")), (0, 0, 3, -1.0)]
    for aggregate, expected in ((max_by("x", "y"), 2), (min_by("x", "y"), 3)):
        state = Aggregated(aggregate, schema)
        state.add(rows, 1)
        assert state.results(1) == [expected]


def test_text_that_decides_is_refused_with_the_users_line():
    schema = pa.schema([("x", pa.int64()), ("y", pa.string())])
    with pytest.raises(PlanError, match=r"job.py:7[\s\S]*numbers, dates or timestamps"):
        AggregatePlan((), {"r": max_by("x", "y")}, schema, where="job.py:7").result_schema  # noqa: B018
    with pytest.raises(PlanError, match="unknown column `z`"):
        AggregatePlan((), {"r": max_by("x", "z")}, schema)


def test_memory_of_text_is_counted_and_given_up():
    state = Aggregated(last("x"), pa.schema([("x", pa.string())]))
    state.add([(0, 0, "a" * 1_000)], 1)
    assert state.state.object_bytes > 1_000
    state.add([(0, 1, "b")], 1)
    assert 0 < state.state.object_bytes < 100
    state.state.reset()
    assert state.state.object_bytes == 0
