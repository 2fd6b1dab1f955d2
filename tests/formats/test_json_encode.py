"""JSON of a few rows, which Python formats, is the same text as that of many rows, which Polars writes."""

from __future__ import annotations

import json
import random
import string

import pyarrow as pa
import pytest

from headgate.connectors.formats.json_encode import (
    FEW_VALUES,
    encode_few,
    encode_json,
    encode_many,
)
from headgate.errors import DataError
from headgate.operators.time_range import INSTANT_MAX_MS, INSTANT_MIN_MS

INTEGERS = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
)
TIMES = [pa.timestamp(unit, zone) for unit in ("s", "ms", "us") for zone in (None, "UTC")]
KINDS = [*INTEGERS, pa.bool_(), pa.string(), pa.large_string(), pa.float64(), *TIMES]
NAMES = ["plain", "100%s", 'with "quotes"', "two\nlines", "ü"]
TICKS = {"s": 1, "ms": 1_000, "us": 1_000_000}


def some_value(draws: random.Random, kind: pa.DataType) -> object:
    """Return a value of a type, for a timestamp its number."""
    if kind in INTEGERS:
        bits = kind.bit_width
        signed = kind in INTEGERS[:4]
        least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return draws.choice([least, most, draws.randint(least, most), draws.randint(0, 9)])
    if kind == pa.bool_():
        return draws.random() < 0.5
    if kind in (pa.string(), pa.large_string()):
        places = [draws.randrange(0x80), draws.randrange(0xD800), draws.randrange(0xE000, 0x110000)]
        letters = [*map(chr, places), draws.choice(string.printable)]
        return "".join(draws.choices(letters, k=draws.randrange(8)))
    if kind == pa.float64():
        wide = draws.choice([-1, 1]) * 10 ** draws.uniform(-3, 15) * 0.999
        return draws.choice([0.0, -0.0, 1.5, wide, draws.uniform(-1, 1) + 2, float(round(wide))])
    ticks = TICKS[kind.unit]
    second = draws.randint(INSTANT_MIN_MS // 1_000 + 1, INSTANT_MAX_MS // 1_000 - 1) * ticks
    return second + draws.choice(
        [0, draws.randrange(ticks), ticks // 1_000 * draws.randrange(1_000)]
    )


def some_rows(draws: random.Random) -> pa.RecordBatch:
    rows, kinds = draws.randrange(1, 20), draws.sample(KINDS, draws.randrange(1, 6))
    share = draws.choice([0.0, 0.3])
    columns = []
    for kind in kinds:
        values = [
            None if draws.random() < share else some_value(draws, kind) for _ in range(rows + 2)
        ]
        plain = pa.array(values, pa.int64() if kind in TIMES else kind)
        columns.append(plain.cast(kind).slice(1, rows))
    names = [f"{draws.choice(NAMES)}{place}" for place in range(len(kinds))]
    return pa.RecordBatch.from_arrays(columns, names=names)


def test_both_ways_make_the_same_text() -> None:
    draws = random.Random(7)
    for _ in range(150):
        rows = some_rows(draws)
        assert encode_few(rows) == encode_many(rows), rows.to_pydict()


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.0, float("nan")]),
        pa.array([1.0, float("inf")]),
        pa.array([1.0, 1e-5]),
        pa.array([1.0, 1e300]),
        pa.array([0.1], pa.float32()),
        pa.array([[1], None]),
        pa.array([{"a": 1}]),
        pa.array([0], pa.date32()),
        pa.array([0], pa.timestamp("ns")),
        pa.array([0], pa.timestamp("ms", "Europe/Berlin")),
        pa.array([None]),
    ],
)
def test_what_python_writes_in_another_way_is_left_to_polars(column: pa.Array) -> None:
    rows = pa.record_batch({"a": column, "b": pa.array(range(len(column)))})
    assert encode_few(rows) is None
    assert encode_json(rows) == encode_many(rows)
    assert [json.loads(each)["b"] for each in encode_json(rows)] == list(range(len(column)))


@pytest.mark.parametrize("rows", [0, 1, FEW_VALUES, FEW_VALUES + 1])
def test_any_number_of_rows_is_written(rows: int) -> None:
    numbers = pa.record_batch({"n": pa.array(range(rows), pa.int64())})
    assert [json.loads(each) for each in encode_json(numbers)] == numbers.to_pylist()


def test_a_time_without_a_form_in_text_is_an_error() -> None:
    late = pa.array([INSTANT_MAX_MS + 1], pa.timestamp("ms", "UTC"))
    with pytest.raises(DataError, match="no form in text"):
        encode_json(pa.record_batch({"at": late}))
