"""The rows of a scan as an Arrow IPC stream: typed columns of keys, and of values whose type is known."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...operators.queries import QueryableState, key_as_json

_JSON: Final = {b"encoding": b"json"}
"""The metadata of columns whose texts are JSON."""


def stream_schema(state: QueryableState) -> pa.Schema:
    """Return the columns of a scan of a state."""
    shape = state.keys
    if shape.columns is None:
        keys = [pa.field("key", pa.string(), metadata=_JSON)]
    else:
        names = state.columns or shape.names
        keys = [pa.field(n, c.type) for n, c in zip(names, shape.columns, strict=True)]
    taken = {key.name for key in keys}
    values = [
        field.with_nullable(True).with_name(
            f"value_{field.name}" if field.name in taken else field.name
        )
        for field in state.values or pa.schema([pa.field("value", pa.string(), metadata=_JSON)])
    ]
    return pa.schema([*keys, *values])


def to_stream(state: QueryableState, rows: Sequence[tuple[Any, bytes]]) -> bytes:
    """Return keys, and values that are JSON, as an Arrow IPC stream."""
    schema, shape = stream_schema(state), state.keys
    keys = [key for key, _ in rows]
    if shape.columns is None:
        texts = [msgspec.json.encode(key_as_json(state, key)).decode() for key in keys]
        columns = [pa.array(texts, pa.string())]
    else:
        columns = shape.to_arrays(keys)
    if state.values is None:
        columns.append(pa.array([value.decode() for _, value in rows], pa.string()))
    else:
        values = [msgspec.json.decode(value) for _, value in rows]
        for field in state.values:
            # The value of a state that has one column `value` is that column; others are objects.
            found = values if state.is_one_value else [value.get(field.name) for value in values]
            made = _maker(field.type)
            columns.append(pa.array([None if v is None else made(v) for v in found], field.type))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _maker(type_: pa.DataType) -> Callable[[Any], Any]:
    """Return a function from plain data of JSON to a Python value of this type."""
    types = pa.types
    if types.is_timestamp(type_):
        return datetime.fromisoformat
    if types.is_date(type_):
        return date.fromisoformat
    if types.is_time(type_):
        return time.fromisoformat
    if types.is_decimal(type_):
        return Decimal
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_):
        return base64.b64decode
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        each = _maker(type_.value_type)
        return lambda values: [None if value is None else each(value) for value in values]
    if types.is_struct(type_):
        members = {field.name: _maker(field.type) for field in type_}
        return lambda value: {
            name: None if value.get(name) is None else make(value[name])
            for name, make in members.items()
        }
    if types.is_map(type_):
        key, item = _maker(type_.key_type), _maker(type_.item_type)
        if types.is_integer(type_.key_type):
            key = int  # the names of an object's members are texts
        return lambda value: [
            (key(k), None if v is None else item(v))
            for k, v in (value.items() if isinstance(value, dict) else value)
        ]
    return lambda value: value
