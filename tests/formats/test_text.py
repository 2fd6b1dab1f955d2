"""Decoding of single messages: a damaged one never shifts or hides another."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.connectors.formats.format import NO_VALUE, Decode
from headgate.connectors.formats.text import FormatName, to_format
from headgate.errors import UsageError

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string())])


def decoder(format: FormatName, schema: pa.Schema) -> Decode:
    return to_format(format).decoder(schema)


DAMAGED = [
    None,
    b"",
    b"{",
    b"}",
    b'{"a": 1',
    b'{"a": 1}{"a": 2}',
    b'{"a": 1}\n{"a": 2}',
    b"[]",
    b"1",
    b'{"a": "x"}',
    b'{"a": 99999999999999999999}',
    b'{"b": "\xff"}',
    b"\xef\xbb\xbf{}",
]


def one_by_one(payload: bytes | None) -> dict[str, Any] | None:
    """The row of a payload, by the strict parser of the standard library; None: it is unreadable."""
    try:
        found = json.loads((payload or b"").decode())
    except ValueError:
        return None
    if not isinstance(found, dict) or payload is None or payload.startswith(b"\xef"):
        return None
    if not isinstance(found.get("a", 0), int) or not -(2**63) <= found.get("a", 0) < 2**63:
        return None
    return {"a": found.get("a"), "b": found.get("b")}


good = st.builds(
    lambda a, b, indent: json.dumps({"a": a, "b": b, "more": [1]}, indent=indent).encode(),
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=5),
    st.sampled_from([None, 2]),
)


@given(st.lists(good | st.sampled_from(DAMAGED), max_size=12))
def test_json_is_decoded_as_if_each_message_was_alone(payloads: list[bytes | None]) -> None:
    rows = [one_by_one(payload) for payload in payloads]
    decoded = decoder("json", SCHEMA)(payloads)
    batch = decoded.batch()
    assert [index for index, _ in decoded.bad] == [i for i, row in enumerate(rows) if row is None]
    assert ([] if batch is None else batch.to_pylist()) == [row for row in rows if row is not None]


def test_csv_is_one_line_each() -> None:
    payloads = [b"1,x", b'2,"y,z"', b"3", b"", None, b"4,a\r\n", b"5,a,b", b"6,b\n7,c", b"8,q"]
    decoded = decoder("csv", SCHEMA)(payloads)
    batch = decoded.batch()
    assert batch is not None
    assert batch.column("a").to_pylist() == [1, 2, 4, 8]
    assert [index for index, _ in decoded.bad] == [2, 3, 4, 6, 7]


@pytest.mark.parametrize(
    ("kind", "expected", "bad"),
    [
        (pa.binary(), [b"a", b"\xff", None, b""], []),
        (pa.large_string(), ["a", None, ""], [1]),
    ],
)
def test_raw_values_stay_as_they_are(
    kind: pa.DataType, expected: list[Any], bad: list[int]
) -> None:
    decoded = decoder("raw", pa.schema([("v", kind)]))([b"a", b"\xff", None, b""])
    batch = decoded.batch()
    assert batch is not None
    assert batch.column(0).to_pylist() == expected
    assert [index for index, _ in decoded.bad] == bad


def test_a_tombstone_has_no_place_in_a_column_without_nulls() -> None:
    schema = pa.schema([pa.field("v", pa.binary(), nullable=False)])
    assert decoder("raw", schema)([None]).bad == [(0, NO_VALUE)]


@pytest.mark.parametrize(
    ("format", "schema", "text"),
    [
        ("xml", SCHEMA, "no such format"),
        ("raw", SCHEMA, "one column of type binary or string"),
        ("raw", pa.schema([("v", pa.int64())]), "one column of type binary or string"),
    ],
)
def test_a_format_that_cannot_hold_the_columns(format: Any, schema: pa.Schema, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        to_format(format).check_columns(schema)
