"""JSON behind the header of a schema registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors.formats.format import NO_VALUE
from headgate.connectors.formats.json import json_format, json_schema_of
from headgate.connectors.formats.schema_registry import RegistryError, header_of, schema_registry
from headgate.errors import UsageError
from headgate.tests.formats.test_avro import rows_of
from headgate.tests.support.registry_stub import RegistryStub, registry_stub

SCHEMA = pa.schema([("id", pa.int64()), ("user", pa.string()), ("at", pa.timestamp("ms", "UTC"))])


@pytest.fixture
def stub() -> Iterator[RegistryStub]:
    with registry_stub() as running:
        yield running


def format(stub: RegistryStub, **options: Any) -> Any:
    return json_format(registry=schema_registry(stub.url, patience="200ms", **options))


def test_messages_come_back_as_they_were(stub: RegistryStub) -> None:
    rows = [{"id": n, "user": f"u\n{n}", "at": datetime(2026, 1, 1, tzinfo=UTC)} for n in range(3)]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    with pytest.raises(RegistryError, match="auto_register"):
        format(stub).encoder(SCHEMA, "t")
    messages = list(format(stub, auto_register=True).encoder(SCHEMA, "t")(batch))
    assert messages == list(format(stub).encoder(SCHEMA, "t")(batch))
    harmed = [
        b"\1" + messages[0][1:],
        messages[0],
        None,
        messages[1][:-1],
        messages[1],
        messages[2][:5],
    ]
    decoded = format(stub).decoder(SCHEMA)(harmed)
    assert [index for index, _ in decoded.bad] == [0, 2, 3, 5]
    assert decoded.bad[1] == (2, NO_VALUE)
    assert rows_of(decoded) == rows[:2]


@pytest.mark.parametrize(
    ("described", "kind", "fits"),
    [
        ({"type": "integer"}, pa.int64(), True),
        ({"type": ["null", "integer"]}, pa.float64(), True),
        ({"type": "number"}, pa.float64(), True),
        ({"type": "number"}, pa.int64(), False),
        ({"type": "string"}, pa.int64(), False),
        ({"type": ["string", "integer"]}, pa.int64(), True),
        ({"type": "string"}, pa.timestamp("ms", "UTC"), True),
        ({"type": "array"}, pa.list_(pa.int64()), True),
        ({"type": "object"}, pa.string(), False),
        ({"$ref": "#/x"}, pa.int64(), True),
        ({}, pa.int64(), True),
        (True, pa.int64(), True),
    ],
)
def test_types_of_columns_are_checked(
    stub: RegistryStub, described: Any, kind: pa.DataType, fits: bool
) -> None:
    id = stub.add("t-value", {"type": "object", "properties": {"a": described}}, "JSON")
    schema = pa.schema([("a", kind)])
    decoded = format(stub).decoder(schema)([header_of(id) + b"{}"])
    if fits:
        assert rows_of(decoded) == [{"a": None}]
        format(stub).encoder(schema, "t")
    else:
        assert "`a` is" in decoded.bad[0][1]
        with pytest.raises(UsageError, match="`a` is"):
            format(stub).encoder(schema, "t")


@pytest.mark.parametrize(("schema", "kind"), [("{", "JSON"), ('"int"', "AVRO")])
def test_schemas_that_are_none_of_json(stub: RegistryStub, schema: str, kind: str) -> None:
    id = stub.add("t-value", schema, kind)
    assert len(format(stub).decoder(SCHEMA)([header_of(id) + b"{}"]).bad) == 1


def test_the_schema_of_columns() -> None:
    item = pa.struct([pa.field("x", pa.float64(), nullable=False)])
    made = json_schema_of(pa.schema([("a", pa.list_(item)), ("b", pa.decimal128(5, 2))]))
    assert json.loads(json.dumps(made))["properties"] == {
        "a": {
            "type": ["array", "null"],
            "items": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}},
        },
        "b": {},
    }
