"""Avro as a format of messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

from ...errors import UsageError
from .avro_decode import AvroDecoder
from .avro_encode import record_writer
from .avro_schema import AvroType, Unfit, avro_of, columns_of, parse_avro
from .format import Decode, Encode, Format, Values, with_tombstones

RECORD_NAME: Final = "Value"
"""The name of the record in a schema that is made from columns."""


class AvroFormat(Format):
    """Messages of Avro, which all have one schema."""

    name = "avro"
    columns_apart = True

    def __init__(self, schema: str | None) -> None:
        self._schema = schema

    def _parsed(self) -> AvroType | None:
        return None if self._schema is None else parse_avro(self._schema)

    def columns(self) -> pa.Schema:
        avro = self._parsed()
        return super().columns() if avro is None else columns_of(avro)

    def check_columns(self, schema: pa.Schema) -> None:
        avro = self._parsed()
        if avro is None:
            raise UsageError(
                "messages of Avro are read by the schema of their writer",
                fix="avro_format(schema=...), or registry=schema_registry(...)",
            )
        _fit(lambda: AvroDecoder(avro, schema, avro))

    def decoder(self, schema: pa.Schema) -> Decode:
        avro = self._parsed()
        assert avro is not None  # check_columns
        decode = AvroDecoder(avro, schema, avro)
        return lambda payloads: with_tombstones(payloads, decode)

    def check_output(self, schema: pa.Schema) -> None:
        _check_not_empty(schema)
        _fit(lambda: record_writer(self._written(schema), schema))

    def encoder(self, schema: pa.Schema, topic: str) -> Encode:
        write = record_writer(self._written(schema), schema)

        def encode(batch: pa.RecordBatch) -> Values:
            values: Values = write(batch).to_pylist()
            return values

        return encode

    def _written(self, schema: pa.Schema) -> AvroType:
        """Return the schema of messages with these columns."""
        return self._parsed() or parse_avro(avro_of(schema, RECORD_NAME))


def _check_not_empty(schema: pa.Schema) -> None:
    if not schema.names:
        raise UsageError("no column is left for the value", fix="select another one")


def _fit(make: Callable[[], object]) -> None:
    """Call, and say what to do if columns and a schema of Avro do not fit.

    Raises:
        UsageError: they do not.
    """
    try:
        make()
    except Unfit as error:
        raise UsageError(
            f"the columns do not fit the Avro schema: {error}",
            fix="change the type of the column, or the schema; docs/formats.md has the table of types",
        ) from None


def avro_format(*, schema: str | Mapping[str, Any] | None = None) -> Format:
    """Return the format Avro, for `kafka_source` and `kafka_sink`.

    Args:
        schema: a schema of Avro, as JSON or as what JSON makes, with which all messages are written. A
            sink without one makes it from its columns, and a source without declared columns takes those
            of the schema.

    Raises:
        UsageError: it is no schema of Avro.
    """
    if schema is None:
        return AvroFormat(None)
    parse_avro(schema)
    return AvroFormat(schema if isinstance(schema, str) else json.dumps(schema))
