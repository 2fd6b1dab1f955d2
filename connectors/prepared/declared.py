"""Compares the columns of a result with those that a schema declares."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from ...errors import PlanError
from ...operators.suggestions import suggest

_WIDER: Final = (
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.float32(), pa.float64()),
    (pa.string(), pa.large_string()),
    (pa.binary(), pa.large_binary()),
)
"""A value of a type is also a value of every type behind it."""


def check_declared(declared: pa.Schema, found: pa.Schema, by: str, what: str) -> None:
    """Raise PlanError unless rows with the columns `found` can be read as `declared`.

    Columns that are not declared do not matter. Types may be wider than those found, and times may have
    another unit. Each value is then checked for whether it fits, and for nulls.

    Args:
        by: the name of what made the rows, such as `Spark`.
        what: the thing it made them of, `query` or `dataset`.
    """
    for field in declared:
        if field.name not in found.names:
            raise PlanError(
                f"the {by} {what} has no such column column=`{field.name}`",
                fix=suggest(field.name, found.names, f"columns of the {what}"),
            )
        there = found.field(field.name).type
        if not _readable(there, field.type):
            raise PlanError(
                f"the {by} {what} has another type than the schema says column=`{field.name}` "
                f"{what}=`{there}` schema=`{field.type}`",
                fix=f"declare `{there}`, or cast the column in the {what}",
            )


def _readable(found: pa.DataType, declared: pa.DataType) -> bool:
    kinds = pa.types
    if kinds.is_map(declared):
        entry = [("key", declared.key_type), ("value", declared.item_type)]
        declared = pa.list_(pa.struct(entry))
    if found == declared:
        return True
    for wider in _WIDER:
        if found in wider and declared in wider:
            return bool(wider.index(found) < wider.index(declared))
    if kinds.is_timestamp(found) and kinds.is_timestamp(declared):
        return bool((found.tz is None) == (declared.tz is None))
    if kinds.is_duration(found) or kinds.is_time(found):
        return type(found) is type(declared)
    if kinds.is_decimal(found) and kinds.is_decimal(declared):
        whole = declared.precision - declared.scale
        return bool(whole >= found.precision - found.scale and declared.scale >= found.scale)
    if kinds.is_list(found) and (kinds.is_list(declared) or kinds.is_large_list(declared)):
        return _readable(found.value_type, declared.value_type)
    if kinds.is_struct(found) and kinds.is_struct(declared):
        return [f.name for f in found] == [f.name for f in declared] and all(
            _readable(a.type, b.type) for a, b in zip(found, declared, strict=True)
        )
    return False
