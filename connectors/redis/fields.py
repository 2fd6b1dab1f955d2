"""Entries of streams whose fields are columns: values are texts, and null is a field that is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from ...errors import DataError, UsageError
from ..arguments import check_choice
from ..files.decode import Decoded, Unreadable, decode, reason_of
from ..formats.format import Format
from ..formats.text import to_format
from .packed import PACKED, pack

Fields: TypeAlias = Mapping[bytes, bytes]


class FieldsFormat(Format):
    """Each column is a field of the entry, with a text as its value; the entry has no payload."""

    name = "fields"

    def columns(self) -> pa.Schema:
        raise UsageError(
            "fields of entries carry no types: the source needs a schema",
            fix='schema={"id": "int64", "name": "string"}, or a Struct class',
        )

    def check_columns(self, schema: pa.Schema) -> None:
        """Check that fields can have the types of these columns.

        Raises:
            UsageError: they cannot, because a value has no form as a text.
        """
        for field in schema:
            try:
                _from_text(pa.array([], pa.string()), field.type)
                _to_text(pa.array([], field.type))
            except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
                raise UsageError(
                    f"a column cannot be a field of an entry column=`{field.name}: {field.type}`",
                    fix='fields are numbers, texts, bytes and times; use format="json" for other types',
                ) from None

    def check_output(self, schema: pa.Schema) -> None:
        self.check_columns(schema)


def to_entry_format(format: Any, delimiter: str | None, known: Sequence[str]) -> Format:
    """Return the format of entries: their fields are columns, or one of them has a payload.

    Raises:
        UsageError: there is no such format.
    """
    if format == FieldsFormat.name:
        return FieldsFormat()
    if not isinstance(format, Format):
        check_choice("format", format, known, "format of entries", "formats")
    return to_format(format, delimiter)


def entry_decoder(
    format: Format, field: str, schema: pa.Schema
) -> Callable[[Sequence[Fields]], Decoded]:
    """Return a function that makes columns of fields, or of the payload in one field."""
    if isinstance(format, FieldsFormat):
        return _fields_decoder(schema)
    decode_values, name = format.decoder(schema), field.encode()
    return lambda entries: decode_values([each.get(name) for each in entries])


def _fields_decoder(schema: pa.Schema) -> Callable[[Sequence[Fields]], Decoded]:
    names = [name.encode() for name in schema.names]

    def decode_entries(entries: Sequence[Fields]) -> Decoded:
        def convert(start: int, stop: int) -> pa.RecordBatch:
            columns = []
            for name, field in zip(names, schema, strict=True):
                values = pa.array([each.get(name) for each in entries[start:stop]], pa.binary())
                if values.null_count and not field.nullable:
                    raise Unreadable(f"it has no field `{field.name}`")
                try:
                    columns.append(_of_bytes(values, field.type))
                except pa.ArrowException as error:
                    raise Unreadable(f"field `{field.name}`: {reason_of(error)}") from error
            return pa.RecordBatch.from_arrays(columns, schema=schema)

        return decode(len(entries), convert)

    return decode_entries


def _of_bytes(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return values.cast(kind)
    return _from_text(values.cast(pa.string()), kind)


def _from_text(values: pa.Array, kind: pa.DataType) -> pa.Array:
    return values.cast(kind)


def _to_text(values: pa.Array) -> pa.Array:
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        return values.cast(PACKED)
    return values.cast(pa.large_string()).cast(PACKED)


def entry_encoder(
    format: Format, field: str, schema: pa.Schema, stream: str
) -> Callable[[pa.RecordBatch], pa.Array]:
    """Return a function that makes a packed entry of each row."""
    if isinstance(format, FieldsFormat):
        return _encode_fields
    encode, name = format.encoder(schema, stream), field.encode()

    def encode_payloads(batch: pa.RecordBatch) -> pa.Array:
        packed, _ = pack([name], [_all_there(encode(batch), stream)])
        return packed

    return encode_payloads


def _all_there(values: Sequence[bytes | None], stream: str) -> pa.Array:
    found = pa.array(values, PACKED)
    if found.null_count:
        raise DataError(
            f"a record has no value, and an entry needs one stream=`{stream}`",
            fix="filter such records out before the sink",
        )
    return found


def _encode_fields(batch: pa.RecordBatch) -> pa.Array:
    names = [name.encode() for name in batch.schema.names]
    packed, fields = pack(names, [_to_text(column) for column in batch.columns])
    if not fields.all():
        raise DataError(
            "all columns of a record are null, and an entry needs a field",
            fix="filter such records out before the sink",
        )
    return packed
