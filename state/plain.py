"""Values of a state without their class: their encoding describes itself, and the column says the type."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from ..errors import StateError

Plain: TypeAlias = Callable[[Any], Any]
_TIMES = (
    (pa.types.is_timestamp, datetime),
    (pa.types.is_date, date),
    (pa.types.is_time, time),
    (pa.types.is_duration, timedelta),
)


def plain_of(type_: pa.DataType) -> Plain:
    """From what msgpack says, without types, to what Arrow takes for a type."""
    found = _known_plain(type_)
    return lambda value: None if value is None else found(value)


def _known_plain(type_: pa.DataType) -> Plain:
    if pa.types.is_struct(type_):
        return _struct(type_)
    if pa.types.is_map(type_):
        keys, items = plain_of(type_.key_type), plain_of(type_.item_type)
        return lambda value: [(keys(k), items(v)) for k, v in value.items()]
    if pa.types.is_list(type_):
        item = plain_of(type_.value_type)
        return lambda value: [item(element) for element in value]
    for is_one, kind in _TIMES:
        if is_one(type_):
            return lambda value: msgspec.convert(value, kind)
    return lambda value: value


def _struct(type_: pa.DataType) -> Plain:
    fields = {field.name: plain_of(field.type) for field in type_}

    def plain(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):  # a tuple, or a Struct written as an array
            value = dict(zip(fields, value, strict=True))
        unknown = value.keys() - fields.keys()
        if unknown:
            raise StateError(
                f"a stored value has fields that its type did not declare fields=`{sorted(unknown)}`",
                fix="restore from a canonical savepoint, which keeps the names of fields",
            )
        return {name: read(value.get(name)) for name, read in fields.items()}

    return plain
