"""Records of a column stream as values of state: stored as columns, not pickled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from ..state.codecs import Codec
from .rows import getter_of, to_columns, to_rows


def row_codec(schema: pa.Schema, record_class: type[Any] | None) -> RowCodec | None:
    """Return the codec of a stream's records; None if a column has mutable values."""
    fields = [pa.field(field.name, _lossless(field.type)) for field in schema]
    if any(field.type == pa.null() for field in fields):
        return None
    return RowCodec(pa.schema(fields), record_class)


def _lossless(kind: pa.DataType) -> pa.DataType:
    """Return the type that holds every Python value of a column without loss; null if there is none.

    A function computes with Python's floats and datetimes, which are finer than some columns: a
    restored value must not be rounded.
    """
    types = pa.types
    if types.is_dictionary(kind):
        return _lossless(kind.value_type)
    if types.is_floating(kind):
        return pa.float64()
    if types.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", tz=kind.tz)
    kept = (
        types.is_integer, types.is_boolean, types.is_string, types.is_large_string,
        types.is_binary, types.is_date32, types.is_decimal,
    )  # fmt: skip
    return kind if any(is_kept(kind) for is_kept in kept) else pa.null()


class RowCodec(Codec):
    """Stores records as tuples of their columns, which are immutable.

    Unlike other codecs, its `to_array` takes the results of `hold`.
    """

    adapts = True

    def __init__(self, schema: pa.Schema, record_class: type[Any] | None) -> None:
        self._schema = schema
        self._record_class = record_class
        self.type_ = pa.struct(list(schema))

    def hold(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        names = self._schema.names
        if isinstance(value, Mapping):
            return tuple(value[name] for name in names)
        return tuple(getter_of(value, name)(value) for name in names)

    def release(self, held: tuple[Any, ...]) -> Any:
        return to_rows(to_columns([held], self._schema), self._record_class)[0]

    def encode(self, value: Any) -> bytes:
        raise NotImplementedError("rows are stored as columns only")

    def decode(self, data: bytes) -> Any:
        raise NotImplementedError("rows are stored as columns only")

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        data = to_columns(list(values), self._schema)
        return pa.StructArray.from_arrays(data.columns, fields=list(self._schema))

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        """Return the records; columns that they lacked when they were stored are null."""
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        stored = {field.name: array.field(index) for index, field in enumerate(array.type)}
        columns = [
            stored[field.name].cast(field.type)
            if field.name in stored
            else pa.nulls(len(array), field.type)
            for field in self._schema
        ]
        data = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return to_rows(data, self._record_class)
