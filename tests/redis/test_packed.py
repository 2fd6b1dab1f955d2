"""Entries as the scripts of the sink of Redis read them, and the chunks of them."""

from __future__ import annotations

import random
import struct
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors import redis_sink
from headgate.connectors.formats.text import RawFormat
from headgate.connectors.redis.fields import FieldsFormat, entry_encoder
from headgate.connectors.redis.packed import offsets_of
from headgate.errors import DataError
from headgate.operators.elements import ColumnBatch
from headgate.testing.connectors import make_context


def unpacked(entry: bytes) -> list[bytes]:
    """Return the texts of an entry, as a script reads them: one after the other."""
    (count,), at = struct.unpack_from(">I", entry), 4
    texts = []
    for _ in range(count):
        (length,) = struct.unpack_from(">I", entry, at)
        texts.append(entry[at + 4 : at + 4 + length])
        at += 4 + length
    assert at == len(entry)
    return texts


@pytest.mark.parametrize("seed", range(10))
def test_each_row_is_the_entry_of_its_fields_that_are_not_null(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"column-{number}" * rng.randrange(1, 40) for number in range(rng.randrange(1, 5))]

    def text() -> str | None:
        return rng.choice([None, "", "\0", "ä" * rng.randrange(300), f"{rng.random()}"])

    rows: list[dict[str, Any]] = [{name: text() for name in names} for _ in range(40)]
    rows = [row for row in rows if any(value is not None for value in row.values())]
    schema = pa.schema([(name, pa.string()) for name in names])
    start = rng.randrange(5)
    batch = pa.RecordBatch.from_pylist(rows, schema=schema).slice(start)
    packed = entry_encoder(FieldsFormat(), "value", schema, "orders")(batch)
    expected = [
        [text.encode() for name in names if row[name] is not None for text in (name, row[name])]
        for row in rows[start:]
    ]
    assert [unpacked(entry.as_py()) for entry in packed] == expected
    offsets, texts = offsets_of(packed.slice(3)), packed.buffers()[2].to_pybytes()
    assert unpacked(texts[offsets[0] : offsets[1]]) == expected[3]


def test_a_payload_is_a_field_and_must_be_there() -> None:
    schema = pa.schema([("data", pa.string())])
    encode = entry_encoder(RawFormat(), "body", schema, "orders")
    packed = encode(pa.RecordBatch.from_pylist([{"data": "a"}, {"data": ""}], schema=schema))
    assert [unpacked(entry.as_py()) for entry in packed] == [[b"body", b"a"], [b"body", b""]]
    with pytest.raises(DataError, match="has no value"):
        encode(pa.RecordBatch.from_pylist([{"data": "a"}, {"data": None}], schema=schema))


def test_a_chunk_ends_with_its_number_of_entries_or_bytes() -> None:
    sizes = [10] * 1_200 + [100_000] * 7 + [300_000] * 2 + [10]
    writer: Any = redis_sink("orders", url="redis://nowhere").writer()
    writer.open(make_context())
    writer.send_in_background = lambda: None
    for start in range(0, len(sizes), 97):
        texts = ["x" * size for size in sizes[start : start + 97]]
        writer.write(ColumnBatch(pa.RecordBatch.from_pydict({"text": texts})))
    writer.close_chunk()
    chunks = list(writer._queue)
    # 200 small entries with the first large ones, until 256 KiB are reached, and so on.
    assert [chunk.entries for chunk in chunks] == [500, 500, 203, 3, 2, 1, 1]
    assert [chunk.number for chunk in chunks] == list(range(7))
    assert [chunk.size_bytes for chunk in chunks] == [sum(map(len, each.parts)) for each in chunks]
    assert chunks[0].epoch.records == len(sizes)
    assert writer._waiting_bytes == sum(chunk.size_bytes for chunk in chunks)
