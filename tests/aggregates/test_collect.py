"""Lists of values: their order, their limit, and what they hold."""

from __future__ import annotations

import math
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import JobError, PlanError
from headgate.operators.aggregation.aggregates import collect, min_by, parse_aggregate

from .conftest import SLOTS, Aggregated, whole_and_in_parts

quick = settings(max_examples=20, deadline=None)
TYPES = [
    (pa.int16(), st.integers(-9, 9)),
    (pa.float32(), st.sampled_from([0.0, -0.0, 1.5])),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=2)),
    (pa.decimal128(5, 1), st.sampled_from([Decimal("1.0"), Decimal("2.5")])),
    (pa.date32(), st.dates()),
]


@pytest.mark.parametrize(("type_", "values"), TYPES, ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("timed", [True, False])
@quick
@given(data=st.data())
def test_all_values_by_time_then_by_arrival(type_, values, timed, data):
    row = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 3), st.none() | values)
    rows = data.draw(st.lists(row))
    inorder = sorted(rows, key=lambda row: row[1]) if timed else rows
    expected = [
        [row[2] for row in inorder if row[0] == slot and row[2] is not None]
        for slot in range(SLOTS)
    ]
    found = whole_and_in_parts(collect("x"), pa.schema([("x", type_)]), rows, data, timed)
    assert str(found) == str((expected, expected))


def test_too_many_values_fail_the_job():
    state = Aggregated(collect("x", limit=3), pa.schema([("x", pa.int64())]))
    state.add([(0, 0, 1), (1, 0, 1), (0, 0, 2), (0, 0, None), (0, 0, 3)], 2)
    with pytest.raises(JobError, match=r"limit=`3`[\s\S]*hg.collect"):
        state.add([(1, 0, 1), (0, 0, 4)], 2)


@pytest.mark.parametrize("limit", [0, -1, 2**31 + 1, math.inf])
def test_limits_that_make_no_sense_are_refused(limit):
    with pytest.raises(PlanError, match="limit"):
        collect("x", limit=limit)


def test_texts():
    assert parse_aggregate("collect(x, 100)") == collect("x", limit=100)
    assert parse_aggregate("collect(x)") == collect("x")
    assert parse_aggregate(str(collect("odd name"))) == collect("odd name")
    assert parse_aggregate("min_by(x, by=`odd name`)") == min_by("x", "odd name")
    assert parse_aggregate(str(min_by("x", "odd name"))) == min_by("x", "odd name")
