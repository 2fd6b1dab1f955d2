"""JSON whose schemas are in a registry: messages have its header, and the schema says their types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from ...errors import UsageError
from .format import Decode, Encode, Values, with_tombstones
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
from .text import JsonFormat

_DRAFT: Final = "http://json-schema.org/draft-07/schema#"


class RegisteredJsonFormat(JsonFormat):
    """Objects behind the header of a schema registry."""

    reads_lines = False

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry

    def check_connection(self) -> None:
        RegistryClient(self._registry).check()

    def decoder(self, schema: pa.Schema) -> Decode:
        decode = super().decoder(schema)

        def make(registered: Registered) -> DecodeBehind:
            _check_registered(registered, schema)
            return lambda messages: decode([each[HEADER_BYTES:] for each in messages])

        cache = SchemaCache(RegistryClient(self._registry), make, self._registry.cached)
        return lambda payloads: with_tombstones(
            payloads, lambda messages: decode_by_id(messages, cache)
        )

    def encoder(self, schema: pa.Schema, topic: str) -> Encode:
        encode = super().encoder(schema, topic)
        if self._registry.auto_register:
            text = json.dumps(json_schema_of(schema))
            header = header_of(written_id(self._registry, topic, "JSON", text))
        else:
            registered = newest(self._registry, topic)
            try:
                _check_registered(registered, schema)
            except ValueError as error:
                raise UsageError(
                    f"the columns do not fit the newest schema of the topic topic=`{topic}`: {error}",
                    fix="cast the column, or register another schema",
                ) from None
            header = header_of(registered.id)

        def encode_behind(batch: pa.RecordBatch) -> Values:
            return [header + (value or b"") for value in encode(batch)]

        return encode_behind


def _check_registered(registered: Registered, schema: pa.Schema) -> None:
    """Check that the types of columns are those of a schema, as far as it says them plainly.

    Raises:
        ValueError: it is no schema of JSON, or a column cannot have values of its type.
    """
    if registered.kind != "JSON":
        raise ValueError(f"it is of type {registered.kind}, not of JSON")
    try:
        found = json.loads(registered.text)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    properties = found.get("properties") if isinstance(found, dict) else None
    if not isinstance(properties, dict):
        return
    for column in schema:
        described = properties.get(column.name)
        kinds = described.get("type") if isinstance(described, dict) else None
        if isinstance(kinds, str):
            kinds = [kinds]
        if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds):
            continue
        own = _kind_of(column.type)
        fitting = {own, "null"} | ({"integer"} if own == "number" else set())
        if own and not fitting & set(kinds) - {"null"} and set(kinds) != {"null"}:
            raise ValueError(
                f"`{column.name}` is {' or '.join(kinds)}, and does not fit into {column.type}"
            )


def _kind_of(kind: pa.DataType) -> str:
    """Return the type of JSON that values of a column have; an empty text if that is not known."""
    is_a = pa.types
    for name, applies in (
        ("integer", is_a.is_integer),
        ("number", is_a.is_floating),
        ("boolean", is_a.is_boolean),
        ("string", is_a.is_string),
        ("string", is_a.is_large_string),
        ("string", is_a.is_timestamp),
        ("string", is_a.is_date),
        ("array", is_a.is_list),
        ("array", is_a.is_large_list),
        ("object", is_a.is_struct),
    ):
        if applies(kind):
            return name
    return ""


def json_schema_of(schema: pa.Schema) -> Mapping[str, Any]:
    """Return the JSON Schema of objects with these columns."""
    properties = {column.name: _described(column.type, column.nullable) for column in schema}
    return {"$schema": _DRAFT, "type": "object", "properties": properties}


def _described(kind: pa.DataType, nullable: bool) -> dict[str, Any]:
    name = _kind_of(kind)
    made: dict[str, Any] = {"type": [name, "null"] if nullable else name} if name else {}
    if name == "array":
        made["items"] = _described(kind.value_type, kind.value_field.nullable)
    if name == "object":
        parts = [kind.field(at) for at in range(kind.num_fields)]
        made["properties"] = {each.name: _described(each.type, each.nullable) for each in parts}
    return made


def json_format(*, registry: SchemaRegistry) -> RegisteredJsonFormat:
    """Return the format JSON with a schema registry, for `kafka_source` and `kafka_sink`.

    JSON without a registry is `format="json"`. Schemas are read for the types of the columns only: the
    values of messages are not checked against them.

    Args:
        registry: of the schemas of messages, as `schema_registry` returns it.
    """
    return RegisteredJsonFormat(registry)
