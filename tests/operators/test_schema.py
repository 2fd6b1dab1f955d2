"""Schemas from classes, names and Arrow; errors name the column."""

from __future__ import annotations

import dataclasses
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, NewType, Optional

import msgspec
import pyarrow as pa
import pytest

from headgate.errors import PlanError
from headgate.operators.schema import difference, parse_type, to_schema

UserId = NewType("UserId", str)


class Click(msgspec.Struct):
    user: UserId
    at: datetime
    day: date
    amount: Annotated[float, "euro"]
    n: int | None
    tags: list[str]
    wait: Optional[timedelta] = None  # noqa: UP045  both spellings


@dataclasses.dataclass
class Point:
    x: int
    y: bytes
    ok: bool


def test_a_struct_becomes_a_schema_with_its_nullability():
    assert to_schema(Click) == pa.schema(
        [
            pa.field("user", pa.string(), False),
            pa.field("at", pa.timestamp("us", tz="UTC"), False),
            pa.field("day", pa.date32(), False),
            pa.field("amount", pa.float64(), False),
            pa.field("n", pa.int64(), True),
            pa.field("tags", pa.list_(pa.string()), False),
            pa.field("wait", pa.duration("us"), True),
        ]
    )


def test_a_dataclass_becomes_a_schema():
    schema = to_schema(Point)
    assert schema.names == ["x", "y", "ok"]
    assert schema.types == [pa.int64(), pa.binary(), pa.bool_()]


def test_a_schema_is_itself_and_a_dict_names_types():
    schema = pa.schema({"a": pa.int8()})
    assert to_schema(schema) is schema
    found = to_schema({"a": "string", "b": "timestamp", "c": "int", "d": pa.int16(), "e": float})
    assert found.types == [
        pa.string(), pa.timestamp("ms", tz="UTC"), pa.int32(), pa.int16(), pa.float64()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("long", pa.int64()),
        ("int64", pa.int64()),
        ("int", pa.int32()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("Boolean", pa.bool_()),
        ("decimal(10, 2)", pa.decimal128(10, 2)),
        ("list<list<date>>", pa.list_(pa.list_(pa.date32()))),
        ("binary", pa.binary()),
    ],
)
def test_type_names(text, kind):
    assert parse_type(text) == kind


def test_an_unknown_type_names_the_column_and_a_near_one():
    with pytest.raises(PlanError) as caught:
        to_schema({"url": "strin"})
    assert caught.value.message == "unknown type `strin` column=`url`"
    assert caught.value.fix.startswith("did you mean `string`? types: string,")


@pytest.mark.parametrize("kind", [Decimal, dict[str, int], int | str, Click])
def test_types_without_a_column_form_are_refused(kind):
    with pytest.raises(PlanError, match="type has no column form column=`a`"):
        to_schema({"a": kind})


@pytest.mark.parametrize("given", [3, "string", pa.schema([]), {}, int])
def test_what_describes_no_columns_is_refused(given):
    with pytest.raises(PlanError):
        to_schema(given)


def test_a_column_given_twice_is_refused():
    with pytest.raises(PlanError, match="column `a` appears twice"):
        to_schema(pa.schema([("a", pa.int8()), ("a", pa.int8())]))


def test_the_difference_of_two_schemas_in_words():
    wanted = pa.schema({"a": pa.int64(), "b": pa.string()})
    found = pa.schema({"c": pa.int8(), "a": pa.int32()})
    assert difference(wanted, found) == (
        "no column `b`, unexpected column `c`, column `a` is int32, not int64"
    )
    assert difference(wanted, pa.schema({"b": pa.string(), "a": pa.int64()})) == ""
