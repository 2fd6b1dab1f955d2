"""Aggregates and windows as text, and their checks at plan time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError, UsageError
from headgate.operators.aggregation.aggregates import (
    Aggregate,
    AggregatePlan,
    avg,
    count,
    max,
    min,
    parse_aggregate,
    sum,
)
from headgate.operators.windows.kinds import (
    WINDOW_FIELDS,
    TumblingWindow,
    cumulative,
    sliding,
    tumbling,
)

SCHEMA = pa.schema(
    [
        pa.field("user", pa.dictionary(pa.int8(), pa.string()), False),
        pa.field("amount", pa.int32()),
        pa.field("price", pa.float32()),
        pa.field("cost", pa.decimal128(10, 2)),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("weight", pa.float64()),
    ]
)


@pytest.mark.parametrize(
    ("text", "aggregate"),
    [
        ("count()", count()),
        ("count(*)", count()),
        (" COUNT ( user ) ", count("user")),
        ("sum(amount)", sum("amount")),
        ("min(at)", min("at")),
        ("max(`odd name`)", max("odd name")),
        ('avg("odd name")', avg("odd name")),
    ],
)
def test_parses(text, aggregate):
    assert parse_aggregate(text) == aggregate
    assert parse_aggregate(str(aggregate)) == aggregate


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("sum", "write count()"),
        ("sum(a) + 1", "write count()"),
        ("", "write count()"),
        ("summ(a)", "did you mean `sum`"),
        ("sum()", "sum needs a column"),
        ("sum(*)", "sum needs a column"),
    ],
)
def test_mistakes_come_with_a_hint(text, hint):
    with pytest.raises(PlanError) as error:
        parse_aggregate(text)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("count()", pa.int64()),
        ("count(user)", pa.int64()),
        ("sum(amount)", pa.int64()),
        ("sum(price)", pa.float64()),
        ("sum(cost)", pa.decimal128(38, 2)),
        ("min(amount)", pa.int32()),
        ("max(at)", pa.timestamp("us", tz="UTC")),
        ("max(user)", pa.string()),
        ("min(cost)", pa.decimal128(10, 2)),
        ("avg(amount)", pa.float64()),
    ],
)
def test_output_types(text, type_):
    assert parse_aggregate(text).output_type(SCHEMA) == type_


def test_a_plan_says_what_comes_out_and_what_it_reads():
    plan = AggregatePlan(("user",), {"n": count(), "m": avg("price")}, SCHEMA, WINDOW_FIELDS)
    assert plan.result_schema.names == ["user", "window_start", "window_end", "n", "m"]
    assert plan.result_schema.types[0] == pa.string()
    assert plan.columns_read == {"user", "price"}


@pytest.mark.parametrize(
    ("keys", "aggregates", "said"),
    [
        (("user",), {}, "no aggregates"),
        (("usr",), {"n": count()}, "did you mean `user`"),
        (("user",), {"n": sum("amont")}, "did you mean `amount`"),
        (("weight",), {"n": count()}, "weight"),
        (("user",), {"n": sum("user")}, "cannot take the sum"),
        (("user",), {"user": count()}, "two columns are called `user`"),
        (("user",), {"window_end": count()}, "two columns are called `window_end`"),
        (("user",), {"key_group": count()}, "two columns are called `key_group`"),
        (("user",), {"m": avg("price"), "m__sum": count()}, "two columns are called `m__sum`"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(keys, aggregates, said):
    with pytest.raises(PlanError) as error:
        AggregatePlan(keys, aggregates, SCHEMA, WINDOW_FIELDS, where="job.py:3")
    assert said in str(error.value)
    assert "job.py:3" in str(error.value)


def test_tumbling_reads_durations():
    window = tumbling("1m", offset="15s", allowed_lateness="5m")
    assert window == TumblingWindow(60_000, 15_000, 300_000)
    assert window.describe() == "tumbling 1m, offset 15s, allowed lateness 5m"


@pytest.mark.parametrize(("size", "offset"), [("0s", "0s"), ("1m", "1m"), ("1", "0s")])
def test_windows_that_make_no_sense_are_refused(size, offset):
    with pytest.raises(UsageError):
        tumbling(size, offset=offset)


times = st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=50)


@settings(max_examples=60, deadline=None)
@given(times, st.integers(1, 2_000), st.integers(0, 1_999), st.booleans())
def test_windows_cover_time_without_gap_or_overlap(timestamps, size, offset, ascending):
    window = TumblingWindow(size, offset % size)
    moments = np.array(sorted(timestamps) if ascending else timestamps, np.int64)
    starts = np.array([window.start_of(moment) for moment in moments.tolist()])
    assert ((starts <= moments) & (moments < starts + size)).all()
    assert ((starts - window.offset_ms) % size == 0).all()
    pieces = [
        (start, np.arange(len(moments))[rows].tolist()) for start, rows in window.split(moments)
    ]
    assert [start for start, _ in pieces] == sorted(set(starts.tolist()))
    for start, rows in pieces:
        assert rows == np.flatnonzero(starts == start).tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(-500, 500), st.integers(1, 50), st.integers(0, 49), st.integers(0, 100))
def test_the_first_kept_window_is_the_first_not_late(watermark, size, offset, lateness):
    window = TumblingWindow(size, offset % size, lateness)
    first = window.first_kept(watermark)
    assert window.due_at(first) + lateness > watermark
    assert window.due_at(first - size) + lateness <= watermark
    assert window.start_of(first) == first


def test_aggregates_are_values():
    assert Aggregate("sum", "x") == sum("x")
    assert {sum("x"): 1}[sum("x")] == 1


def test_a_record_is_in_at_most_100_000_windows():
    assert sliding("100s", "1ms").describe() == "sliding 1m 40s every 1ms"
    assert cumulative("100s", "1ms").describe() == "cumulative 1m 40s by 1ms"
    for make in (sliding, cumulative):
        said = rf"up to 86,400,000 windows of {make.__name__}\('1d', '1ms'\), and at most 100,000"
        with pytest.raises(PlanError, match=said) as error:
            make("1d", "1ms")
        assert "test_aggregate_texts.py" in error.value.where
