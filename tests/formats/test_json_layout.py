"""Lines of one layout are decoded without Arrow's parser, and give exactly what the parser gives.

A few are decoded by a class for their fields, and many by columns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.connectors.files import json_objects
from headgate.connectors.files.decode import Decoded
from headgate.connectors.files.json_layout import LINES_MIN, LayoutReader
from headgate.connectors.files.json_objects import ObjectReader
from headgate.connectors.formats.text import to_format

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int8()),
        ("user", pa.string()),
        ("price", pa.float64()),
        ("page", pa.large_string()),
        ("none", pa.int32()),
    ]
)
ROWS = 64
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
ROW = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1) | st.integers(-12345678901, 1234567890123),
        "user": TEXTS,
        "skipped": st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
        "small": st.integers(-128, 127),
        "price": st.decimals(-(10**6), 10**9, places=3).map(float)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.integers(-(2**53), 2**53),
        "page": TEXTS,
    }
)
ODD_NUMBERS = [
    "-",
    "+1",
    "01",
    "-01",
    "00",
    "0.",
    ".5",
    "-.5",
    "1.2.3",
    "0x1",
    "1e5",
    "1E-2",
    "NaN",
    "/",
    ":",
]
ODD_NUMBERS += [
    "-0",
    "0",
    "0.0",
    "-0.0",
    "00.1",
    "9223372036854775807",
    "9223372036854775808",
    "1/2",
]
ODD_NUMBERS += [
    "-9223372036854775808",
    "128",
    "null",
    "true",
    '"1"',
    "1 ",
    " 1",
    "1}",
    "{}",
    "12345678",
    "1.",
]


def row(number: int, **other: Any) -> bytes:
    made = {"id": number, "user": f"u{number}", "skipped": 1.5, "small": 7, "price": number / 4}
    return json.dumps({**made, "page": "/a/b", **other}, separators=(",", ":")).encode()


@cache
def alone(payload: bytes | None) -> Decoded:
    """Return what the parser makes of a payload."""
    return decode([payload])


def decode(payloads: list[bytes | None], schema: pa.Schema = SCHEMA) -> Decoded:
    return to_format("json").decoder(schema)(payloads)


def check(payloads: list[bytes | None]) -> None:
    """Check that payloads together are decoded as each is alone, which only the parser does."""
    together = decode(payloads)
    assert [at for at, _ in together.bad] == [
        at for at, payload in enumerate(payloads) if alone(payload).bad
    ]
    expected = [batch for payload in payloads for batch in alone(payload).batches]
    # As texts, NaN is equal to NaN, and -0.0 is another value than 0.0.
    assert [batch.schema for batch in together.batches] == [SCHEMA] * len(together.batches)
    assert repr(pa.Table.from_batches(together.batches, SCHEMA).to_pylist()) == repr(
        pa.Table.from_batches(expected, SCHEMA).to_pylist()
    )


def by_class(schema: pa.Schema) -> Callable[[list[bytes]], pa.RecordBatch | None]:
    """Return a function that reads payloads without the parser, by a class; None: it is needed."""
    reader = ObjectReader(schema)
    return lambda payloads: (
        reader.read(memoryview(b"\n".join(payloads)), payloads)
        if reader.may_read(len(payloads))
        else None
    )


def by_columns(schema: pa.Schema) -> Callable[[list[bytes]], pa.RecordBatch | None]:
    """Return a function that reads payloads without the parser, by columns; None: it is needed."""
    reader = LayoutReader(schema)

    def read(payloads: list[bytes]) -> pa.RecordBatch | None:
        lines = [payload + b"\n" for payload in payloads]
        ends = np.cumsum([len(line) for line in lines])
        return reader.read(b"".join(lines), ends - [len(line) for line in lines], ends)

    return read


@pytest.fixture(scope="module", params=[by_class, by_columns], autouse=True)
def reader_of(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Both ways to read without the parser; for the second one no number of lines is small."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is by_columns:
            patch.setattr(json_objects, "LINES_MAX", 0)
        yield request.param


@settings(max_examples=25)
@given(st.lists(ROW, min_size=1, max_size=5), st.booleans(), st.randoms())
def test_rows_of_one_layout(rows: list[dict[str, Any]], ascii: bool, rng: random.Random) -> None:
    texts = [json.dumps(each, separators=(",", ":"), ensure_ascii=ascii).encode() for each in rows]
    check([*rng.choices(texts, k=ROWS // 2)])


@pytest.mark.parametrize("field", ["id", "skipped", "small", "price", "user"])
def test_odd_values_among_plain_ones(field: str) -> None:
    place = 5
    for odd in ODD_NUMBERS:
        payloads: list[bytes | None] = [row(number) for number in range(ROWS)]
        before = json.dumps(json.loads(row(place))[field]).encode()
        key = f'"{field}":'.encode()
        payloads[place] = row(place).replace(key + before, key + odd.encode())
        check(payloads)


@settings(max_examples=60)
@given(st.data())
def test_damaged_bytes_among_plain_ones(data: st.DataObject) -> None:
    payloads: list[bytes | None] = [row(number) for number in range(ROWS)]
    place = data.draw(st.integers(0, ROWS - 1))
    damaged = bytearray(row(place))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        change = data.draw(st.sampled_from(["change", "delete", "insert"]))
        byte = data.draw(st.sampled_from(list(b'"{},:\\/ \n\r\t\x00\x7f\x80\xc3\xff0-+.e1a')))
        if change == "change":
            damaged[at] = byte
        elif change == "insert":
            damaged.insert(at, byte)
        elif len(damaged) > 1:
            del damaged[at]
    payloads[place] = bytes(damaged)
    check(payloads)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kolkata"])
def test_timestamps(unit: str, zone: str | None, reader_of: Any) -> None:
    schema = pa.schema([("at", pa.timestamp(unit, zone))])
    days = [
        "2026-01-02",
        "1969-12-31",
        "2300-01-01",
        "2024-02-30",
        "",
        "x",
        "0001-01-01",
        " 2026-01-02",
    ]
    times = [
        "",
        "T03:04",
        "T03:04:05",
        " 03:04:05",
        "T03:04:05.678",
        "T03:04:05.678901",
        " 24:00:00",
    ]
    zones = ["", "Z", "+00:00", "+0530", "-01:00", "+05", "z", " UTC"]
    read = 0
    for text in [day + time + zone for day in days for time in times for zone in zones]:
        payload = json.dumps({"at": text}, separators=(",", ":")).encode()
        batch = reader_of(schema)([payload] * LINES_MIN)
        if batch is not None:
            read += 1
            parsed = decode([payload], schema)
            assert not parsed.bad
            expected = parsed.batches[0].column(0).cast(pa.int64()).to_pylist()
            assert batch.column(0).cast(pa.int64()).to_pylist() == expected * LINES_MIN, text
    assert read > 10


def test_which_lines_need_no_parser(reader_of: Any) -> None:
    def reads(payloads: list[bytes], schema: pa.Schema = SCHEMA) -> bool:
        return reader_of(schema)(payloads) is not None

    plain = [row(number) for number in range(ROWS)]
    assert reads(plain)
    assert reads([row(number, user="USER").replace(b"USER", b"\xc3\xbc") for number in range(ROWS)])
    assert reads([row(number, id=-(2**63) + 1 + number) for number in range(ROWS)])
    assert not reads([*plain, row(1, user='"')])
    assert not reads([*plain, row(1, id=None)])
    assert not reads([*plain, row(1, more=1)])
    assert not reads([*plain, row(1, price=True)])
    assert not reads([*plain, row(1, price="1")])
    assert not reads([*plain, row(1)[:-1] + b',"id":2}'])
    assert not reads([row(1)[:-1] + b',"id":2}', *plain])
    assert reads([*plain, row(1, price=0, user="item-0")])
    assert not reads([*plain, b'{"id": 1}'])
    assert not reads(plain, pa.schema([pa.field("none", pa.string(), nullable=False)]))
    assert not reads(plain, pa.schema([("id", pa.string())]))
    assert not reads(plain, pa.schema([("user", pa.timestamp("ms"))]))
    assert not reads(plain, pa.schema([("id", pa.timestamp("ms"))]))
    assert not reads(plain, pa.schema([("user", pa.date32())]))


def test_after_other_forms_it_looks_less_often_and_learns_a_new_layout(reader_of: Any) -> None:
    reader = reader_of(SCHEMA)

    def read(payload: bytes) -> bool:
        return reader([payload] * ROWS) is not None

    assert read(row(1))
    other = b'{"user":"x","id":5}'
    assert [read(other) for _ in range(4)] == [False, False, True, True]
    assert [read(b'{"id":[1]}') for _ in range(12)] == [False] * 12
    assert [read(other) for _ in range(8)][-1]
