"""Arrow types of streams, and those by which a table holds all of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import pyarrow as pa

from ...errors import PlanError

Convert: TypeAlias = Callable[[pa.DataType], pa.DataType | None]

PLAIN: Final = {
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}
"""Types that no table has, and the plain types that hold the same values."""


def stored_type(type_: pa.DataType, primitive: Convert) -> pa.DataType | None:
    """Return the Arrow type by which a table holds all values of a type; None: there is none.

    Args:
        type_: of a column of a stream.
        primitive: gives the same for types that are not made of other types.
    """
    if type_ in PLAIN:
        return PLAIN[type_]
    if pa.types.is_timestamp(type_) and type_.unit != "ns":
        return pa.timestamp("us", None if type_.tz is None else "UTC")
    if pa.types.is_decimal128(type_):
        return type_
    if pa.types.is_dictionary(type_):
        return stored_type(type_.value_type, primitive)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = stored_type(type_.value_type, primitive)
        return None if inner is None else pa.list_(pa.field("element", inner))
    if pa.types.is_map(type_):
        key = stored_type(type_.key_type, primitive)
        item = stored_type(type_.item_type, primitive)
        return None if key is None or item is None else pa.map_(key, item)
    if pa.types.is_struct(type_):
        fields = [(field.name, stored_type(field.type, primitive)) for field in type_]
        return None if any(each is None for _, each in fields) else pa.struct(fields)
    return primitive(type_)


def stored_schema(schema: pa.Schema, convert: Convert, format_: str) -> pa.Schema:
    """Return the columns of a table for a stream.

    Args:
        schema: of the stream.
        convert: gives the type of the table for that of the stream.
        format_: the name of the table format, for errors.

    Raises:
        PlanError: there is no type for a column.
    """
    fields = []
    for field in schema:
        made = convert(field.type)
        if made is None:
            raise PlanError(
                f"{format_} has no type for this column column=`{field.name}` type=`{field.type}`",
                fix="cast it, such as a timestamp to microseconds, or select it out",
            )
        fields.append(pa.field(field.name, made))
    return pa.schema(fields)
