"""Avro as a format of messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from ...errors import UsageError
from .avro_decode import AvroDecoder
from .avro_encode import record_writer
from .avro_schema import AvroType, Unfit, avro_of, columns_of, parse_avro
from .format import Decode, Encode, Format, Values, check_not_empty, with_tombstones
from .schema_registry import (
    HEADER_BYTES,
    DecodeBehind,
    Registered,
    RegistryClient,
    SchemaCache,
    SchemaRegistry,
    decode_by_id,
    header_of,
    newest,
    written_id,
)

T = TypeVar("T")
RECORD_NAME: Final = "Value"
"""The name of the record in a schema that is made from columns."""


class AvroFormat(Format):
    """Messages of Avro, which all have one schema, or name theirs in a header."""

    name = "avro"
    columns_apart = True

    def __init__(self, schema: str | None, registry: SchemaRegistry | None) -> None:
        self._schema = schema
        self._registry = registry

    def _parsed(self) -> AvroType | None:
        return None if self._schema is None else parse_avro(self._schema)

    def columns(self) -> pa.Schema:
        avro = self._parsed()
        return super().columns() if avro is None else columns_of(avro)

    def check_connection(self) -> None:
        if self._registry is not None:
            RegistryClient(self._registry).check()

    def check_columns(self, schema: pa.Schema) -> None:
        avro = self._parsed()
        if avro is not None:
            _fit(lambda: AvroDecoder(avro, schema, avro))
        elif self._registry is None:
            raise UsageError(
                "messages of Avro are read by the schema of their writer",
                fix="avro_format(schema=...), or registry=schema_registry(...)",
            )

    def decoder(self, schema: pa.Schema) -> Decode:
        avro = self._parsed()
        if self._registry is None:
            assert avro is not None  # check_columns
            decode = AvroDecoder(avro, schema, avro)
            return lambda payloads: with_tombstones(payloads, decode)

        def make(registered: Registered) -> DecodeBehind:
            decode = _decoder_of(registered, schema, avro)
            return lambda messages: decode(messages, HEADER_BYTES)

        client = RegistryClient(self._registry)
        cache = SchemaCache(client, make, self._registry.cached)
        return lambda payloads: with_tombstones(
            payloads, lambda messages: decode_by_id(messages, cache)
        )

    def check_output(self, schema: pa.Schema) -> None:
        check_not_empty(schema)
        if self._schema is not None or self._registry is None or self._registry.auto_register:
            text = self._written(schema)
            _fit(lambda: record_writer(parse_avro(text), schema))

    def encoder(self, schema: pa.Schema, topic: str) -> Encode:
        header = b""
        if self._registry is None:
            avro = parse_avro(self._written(schema))
        elif self._schema is None and not self._registry.auto_register:
            registered = newest(self._registry, topic)
            avro, header = _avro_of(registered), header_of(registered.id)
        else:
            text = self._written(schema)
            avro, header = (
                parse_avro(text),
                header_of(written_id(self._registry, topic, "AVRO", text)),
            )
        write = _fit(lambda: record_writer(avro, schema))

        def encode(batch: pa.RecordBatch) -> Values:
            encoded = write(batch)
            if header:
                encoded = pc.binary_join_element_wise(pa.scalar(header), encoded, b"")
            values: Values = encoded.to_pylist()
            return values

        return encode

    def _written(self, schema: pa.Schema) -> str:
        """Return the schema of messages with these columns."""
        return self._schema or json.dumps(avro_of(schema, RECORD_NAME))


def _decoder_of(registered: Registered, schema: pa.Schema, reader: AvroType | None) -> AvroDecoder:
    """Return the decoder of messages of a registered schema; raises ValueError if there is none."""
    try:
        return AvroDecoder(_avro_of(registered), schema, reader)
    except (Unfit, UsageError) as error:
        raise ValueError(str(error).splitlines()[0]) from error


def _avro_of(registered: Registered) -> AvroType:
    if registered.kind != "AVRO":
        raise UsageError(
            f"a schema of type {registered.kind}, not of Avro", fix="use its own format"
        )
    return parse_avro(registered.text, [text for _, text in registered.references])


def _fit(make: Callable[[], T]) -> T:
    """Call, and say what to do if columns and a schema of Avro do not fit.

    Raises:
        UsageError: they do not.
    """
    try:
        return make()
    except Unfit as error:
        raise UsageError(
            f"the columns do not fit the Avro schema: {error}",
            fix="change the type of the column, or the schema; docs/formats.md has the table of types",
        ) from None


def avro_format(
    *,
    schema: str | Mapping[str, Any] | None = None,
    registry: SchemaRegistry | None = None,
) -> Format:
    """Return the format Avro, for `kafka_source` and `kafka_sink`.

    Args:
        schema: a schema of Avro, as JSON or as what JSON makes. Without a registry, all messages are
            written with it. With one, it is the schema of the reader: its aliases and defaults count. A
            source that declares no columns takes those of the schema. A sink without it makes one from
            its columns, or takes the newest one of the registry.
        registry: of the schemas of messages, as `schema_registry` returns it. Then each message names its
            schema in a header.

    Raises:
        UsageError: it is no schema of Avro.
    """
    if schema is None:
        return AvroFormat(None, registry)
    parse_avro(schema)
    return AvroFormat(schema if isinstance(schema, str) else json.dumps(schema), registry)
