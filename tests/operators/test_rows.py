"""Columns to records and back: nothing lost, nothing bent, errors name the record."""

from __future__ import annotations

import dataclasses
import pickle
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.rows import RowMismatch, RowReader, row_type, to_columns, to_list, to_rows

WIDE = pa.schema(
    {
        "i": pa.int64(),
        "small": pa.int8(),
        "f": pa.float64(),
        "s": pa.string(),
        "b": pa.bool_(),
        "raw": pa.binary(),
        "ts": pa.timestamp("us", tz="UTC"),
        "day": pa.date32(),
        "dec": pa.decimal128(10, 2),
        "list": pa.list_(pa.int64()),
    }
)
VALUES = st.fixed_dictionaries(
    {
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "small": st.none() | st.integers(-128, 127),
        "f": st.none() | st.floats(allow_nan=False),
        "s": st.none() | st.text(),
        "b": st.none() | st.booleans(),
        "raw": st.none() | st.binary(),
        "ts": st.none()
        | st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),
        "day": st.none() | st.dates(),
        "dec": st.none() | st.decimals(-(10**7), 10**7, places=2),
        "list": st.none() | st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=3),
    }
)


@settings(deadline=None)
@given(st.lists(VALUES, max_size=5))
def test_values_survive_the_way_into_columns_and_back(records):
    data = to_columns(records, WIDE)
    assert data.schema == WIDE
    rows = to_rows(data)
    assert [{name: row[name] for name in WIDE.names} for row in rows] == records
    assert to_columns(rows, WIDE).equals(data)
    assert to_columns([tuple(map(record.get, WIDE.names)) for record in records], WIDE).equals(data)


class Click(msgspec.Struct):
    url: str
    n: int


class Keyword(msgspec.Struct, kw_only=True):
    url: str
    n: int


@dataclasses.dataclass
class Plain:
    n: int
    url: str


CLICKS = pa.schema({"url": pa.string(), "n": pa.int64()})


@pytest.mark.parametrize("kind", [Click, Keyword, Plain])
def test_a_users_class_is_filled_by_name(kind):
    data = to_columns([{"url": "a", "n": 1}, {"url": "b", "n": 2}], CLICKS)
    rows = to_rows(data, kind)
    assert rows == [kind(url="a", n=1), kind(url="b", n=2)]
    assert to_columns(rows, CLICKS).equals(data)


def test_generated_rows_read_by_attribute_and_by_name():
    row = row_type(("url", "my column", "class"))("a", 1, 2)
    assert (row.url, row["url"], row["my column"], row["class"]) == ("a", "a", 1, 2)
    with pytest.raises(KeyError, match="urll; columns: url, my column, class"):
        row["urll"]


def test_generated_rows_pickle_without_their_class():
    row = row_type(("url", "class"))("a", None)
    text = pickle.dumps(row)
    row_type.cache_clear()
    back = pickle.loads(text)
    assert (back.url, back["class"]) == ("a", None)


def test_only_the_named_columns_become_objects():
    data = to_columns([{"url": "a", "n": 1}], CLICKS)
    (row,) = to_rows(data, None, ["n"])
    assert row.n == 1
    assert not hasattr(row, "url")


def test_no_columns_still_make_as_many_rows():
    assert len(to_rows(to_columns([{"url": "a", "n": 1}] * 3, CLICKS), None, [])) == 3


def test_timestamps_of_any_unit_and_zone_are_utc():
    moment = datetime(2024, 3, 5, 17, 20, 11, 250_000, tzinfo=UTC)
    for kind in (
        pa.timestamp("ms"),
        pa.timestamp("ns", tz="UTC"),
        pa.timestamp("us", "Europe/Berlin"),
    ):
        column = pa.array([moment, None], kind)
        assert to_list(column) == [moment, None]
        assert to_list(column)[0].utcoffset() == timedelta(0)


def test_nanoseconds_are_not_cut_off():
    with pytest.raises(pa.ArrowInvalid, match="lose data"):
        to_list(pa.array([1], pa.timestamp("ns")))


def test_datetimes_of_other_zones_are_converted():
    east = timezone(timedelta(hours=2))
    schema = pa.schema({"ts": pa.timestamp("ms", tz="UTC")})
    data = to_columns([{"ts": datetime(2024, 1, 1, 2, tzinfo=east)}], schema)
    assert data.column("ts")[0].as_py() == datetime(2024, 1, 1, tzinfo=UTC)


def test_datetimes_are_rounded_down_to_the_unit_of_the_column():
    moments = [datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), None]
    for kind, expected in (("ms", -1), ("s", -1)):
        schema = pa.schema({"ts": pa.timestamp(kind, tz="UTC")})
        column = to_columns([{"ts": moment} for moment in moments], schema).column("ts")
        assert column.cast(pa.int64()).to_pylist() == [expected, None]


def test_naive_datetimes_count_as_utc():
    schema = pa.schema({"ts": pa.timestamp("ns", tz="UTC")})
    data = to_columns([{"ts": datetime(2024, 1, 1)}, {"ts": None}], schema)
    assert to_list(data.column("ts")) == [datetime(2024, 1, 1, tzinfo=UTC), None]


def test_generated_rows_with_odd_column_names_become_columns_again():
    schema = pa.schema({"my column": pa.int64(), "class": pa.string(), "a.b": pa.int64()})
    data = to_columns([{"my column": 1, "class": "x", "a.b": 2}], schema)
    assert to_columns(to_rows(data), schema).equals(data)


def test_slices_and_dictionaries_read_right():
    column = pa.array(["a", "b", None, "b"]).dictionary_encode()
    assert to_list(column.slice(1)) == ["b", None, "b"]
    assert to_list(pa.array([1, None, 3]).slice(1)) == [None, 3]


@pytest.mark.parametrize(
    ("records", "text", "index"),
    [
        ([{"url": "a", "n": 1}, {"url": "b"}], "returned a dict without `n`", 1),
        ([Click("a", 1), Click("b", 1.5)], "returned a float for column `n` of type int64", 1),
        ([{"url": "a", "n": 1}, {"url": "b", "n": 1.5}], "returned a float for column `n`", 1),
        ([{"url": "a", "n": True}], "returned a bool for column `n`", 0),
        ([{"url": "a", "n": "7"}], "returned a str for column `n`", 0),
        ([{"url": 3, "n": 1}], "returned a int for column `url` of type string", 0),
        ([{"url": "a", "n": 2**70}], "returned a int for column `n`", 0),
        ([("a", 1), ("a", 1, 2)], "returned a tuple of 3 values for 2 columns: url, n", 1),
        ([("a", 1), {"url": "b", "n": 2}], "returned a dict after tuples", 1),
        ([Click("a", 1), None], "returned a NoneType without `url`", 1),
        (["text"], "returned a str without `url`", 0),
    ],
)
def test_records_that_do_not_fit_are_named(records, text, index):
    with pytest.raises(RowMismatch) as caught:
        to_columns(records, CLICKS)
    assert str(caught.value).startswith(text)
    assert caught.value.index == index


def test_none_in_a_column_that_is_not_optional_is_refused():
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    with pytest.raises(RowMismatch, match="None for column `n`, which is not optional"):
        to_columns([{"n": 1}, {"n": None}], schema)


def test_a_reader_takes_only_what_the_function_reads():
    batch = ColumnBatch(to_columns([Click("a", 1)], CLICKS), np.array([5]))
    narrow = RowReader(CLICKS, Click, lambda row: row.n)
    whole = RowReader(CLICKS, Click, lambda row: str(row))
    assert narrow.columns_read == {"n"}
    assert whole.columns_read is None
    assert not hasattr(narrow(batch)[0], "url")
    assert whole(batch) == [Click("a", 1)]
    assert RowReader(None, None, len)(ObjectBatch([1, 2])) == [1, 2]


def test_a_method_of_the_users_class_needs_the_whole_record():
    reader = RowReader(CLICKS, Click, lambda row: row.n + row.bonus())
    assert reader.columns_read is None


def test_odd_types_read_too():
    assert to_list(pa.array([Decimal("1.50"), None])) == [Decimal("1.50"), None]
    assert to_list(pa.array([date(2024, 1, 1)])) == [date(2024, 1, 1)]
    assert to_list(pa.array([{"x": 1}])) == [{"x": 1}]
