"""The best records of each slot, against a model that sorts them all."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError
from headgate.operators.aggregation.aggregates import (
    AggregatePlan,
    max_by,
    min_by,
    parse_aggregate,
    top_n,
)

from .conftest import SLOTS, Aggregated, whole_and_in_parts

quick = settings(max_examples=15, deadline=None)
VALUES = [
    (pa.int16(), st.integers(-9, 9)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=2)),
    (pa.decimal128(5, 1), st.sampled_from([Decimal("1.0"), Decimal("2.5")])),
    (pa.struct([("a", pa.int64())]), st.fixed_dictionaries({"a": st.integers(0, 3)})),
]
ORDERS = [
    (pa.int64(), st.sampled_from([-(2**63), -1, 0, 2**63 - 1])),
    (pa.uint64(), st.sampled_from([0, 1, 2**63, 2**64 - 1])),
    (pa.float32(), st.sampled_from([float("-inf"), -1.5, -0.0, 0.0, 2.5, float("inf")])),
    (pa.date32(), st.dates(date(1960, 1, 1), date(1990, 1, 1))),
]


def model(rows, n, ascending, timed=True):
    """The values of the first `n` rows of each slot in order, or of the last `n`, backwards."""
    found = []
    for slot in range(SLOTS):
        some = [row for row in rows if row[0] == slot and None not in row[2:]]
        some.sort(key=lambda row: (row[3], row[1] if timed else 0))
        values = [row[2] for row in some]
        found.append(values[:n] if ascending else values[-n:][::-1])
    return found


@pytest.mark.parametrize(("type_", "values"), VALUES, ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("timed", [True, False])
@quick
@given(data=st.data())
def test_values_of_any_type(type_, values, ascending, timed, data):
    row = st.tuples(
        st.integers(0, SLOTS - 1), st.integers(0, 2), st.none() | values, st.integers(0, 3)
    )
    rows, n = data.draw(st.lists(row)), data.draw(st.integers(1, 4))
    expected = model(rows, n, ascending, timed)
    schema = pa.schema([("x", type_), ("y", pa.int8())])
    aggregate = top_n("x", n, by="y", ascending=ascending)
    found = whole_and_in_parts(aggregate, schema, rows, data, timed)
    assert str(found) == str((expected, expected))


@pytest.mark.parametrize(("type_", "values"), ORDERS, ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("ascending", [True, False])
@quick
@given(data=st.data())
def test_by_columns_of_any_order(type_, values, ascending, data):
    row = st.tuples(
        st.integers(0, SLOTS - 1), st.integers(0, 1), st.integers(0, 99), st.none() | values
    )
    rows = data.draw(st.lists(row))
    expected = model(rows, 2, ascending)
    schema = pa.schema([("x", pa.int64()), ("y", type_)])
    aggregate = top_n("x", 2, by="y", ascending=ascending)
    assert whole_and_in_parts(aggregate, schema, rows, data) == (expected, expected)


def test_the_best_is_that_of_max_by_and_min_by():
    rng = np.random.default_rng(1)
    schema = pa.schema([("x", pa.int64()), ("y", pa.int64())])
    rows = [(0, int(rng.integers(3)), at, int(rng.integers(3))) for at in range(50)]
    for ascending, by in ((False, max_by), (True, min_by)):
        top, one = Aggregated(top_n("x", 3, by="y", ascending=ascending), schema), None
        top.add(rows, 1)
        one = Aggregated(by("x", "y"), schema)
        one.add(rows, 1)
        assert top.results(1)[0][:1] == one.results(1)


def test_by_the_column_itself_and_nan_is_greater_than_any_number():
    state = Aggregated(top_n("x", 2), pa.schema([("x", pa.float64())]))
    state.add([(0, 0, 5.0), (0, 0, float("nan")), (0, 0, 7.0), (0, 0, None)], 1)
    assert str(state.results(1)) == "[[nan, 7.0]]"


@pytest.mark.parametrize("ascending", [True, False])
def test_n_may_change_between_runs(ascending):
    schema = pa.schema([("x", pa.int64())])
    state = Aggregated(top_n("x", 4, ascending=ascending), schema)
    state.add([(0, 0, value) for value in (5, 1, 4, 2, 3)], 1)
    table = state.table(np.zeros(1, np.intp))
    for n in (2, 6):
        other = Aggregated(top_n("x", n, ascending=ascending), schema)
        other.state.load(np.zeros(1, np.intp), table, 1)
        other.add([(0, 0, 9), (0, 0, 0)], 1)
        expected = [0, 1, 2, 3, 4, 9] if ascending else [9, 5, 4, 3, 2, 0]
        assert other.results(1) == [expected[:n]]


def test_memory_of_text_is_counted_and_given_up():
    state = Aggregated(top_n("x", 2, by="y"), pa.schema([("x", pa.string()), ("y", pa.int64())]))
    state.add([(0, 0, "a" * 1_000, 1), (0, 0, "b" * 1_000, 2)], 1)
    assert state.state.object_bytes > 2_000
    state.add([(0, 0, "c", 3), (0, 0, "d", 4)], 1)
    assert 0 < state.state.object_bytes < 300
    state.state.reset()
    assert state.state.object_bytes == 0


@pytest.mark.parametrize("n", [0, -1, 1_001, 2.5, "three"])
def test_numbers_that_make_no_sense_are_refused(n):
    with pytest.raises(PlanError, match=r"n=`"):
        top_n("x", n)


def test_text_that_decides_is_refused():
    with pytest.raises(PlanError, match="numbers, dates or timestamps"):
        AggregatePlan((), {"r": top_n("x", 3)}, pa.schema([("x", pa.string())]))


def test_texts():
    assert parse_aggregate("top_n(x, 3, by=y)") == top_n("x", 3, by="y")
    assert parse_aggregate("top_n(x, 3)") == top_n("x", 3)
    assert parse_aggregate("bottom_n(x, 3, by=`odd name`)") == (
        top_n("x", 3, by="odd name", ascending=True)
    )
    for aggregate in (top_n("x", 3), top_n("x", 1_000, by="odd name", ascending=True)):
        assert parse_aggregate(str(aggregate)) == aggregate
    with pytest.raises(PlanError, match=r"needs a number[\s\S]*top_n\(x, 3\)"):
        parse_aggregate("top_n(x, by=y)")
    with pytest.raises(PlanError, match="out of range"):
        parse_aggregate("top_n(x, 2.5, by=y)")
