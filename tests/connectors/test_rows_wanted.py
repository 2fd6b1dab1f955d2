"""Readers that are asked for small batches: they obey, and go on exactly where they were."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.connectors import (
    csv_source,
    from_list,
    generator,
    json_source,
    numbers,
    parquet_source,
    random_int,
    sequence,
    throttle,
    with_position,
)
from headgate.operators.source import Source
from headgate.testing.connectors import make_context, open_reader, read_all, records_of
from headgate.tests.support.clocks import MovedClock

ROWS = 100
POLLS_MAX = 1000
SCHEMA = {"id": "int64", "text": "string"}
TEXTS = [f"{'é' * (n % 7)}{n}" for n in range(ROWS)]


def csv(path: Path) -> Source:
    lines = [f"{n},{text}\n" + "\r\n" * (n % 10 == 0) for n, text in enumerate(TEXTS)]
    path.write_text("\ufeffid,text\n" + "".join(lines))
    return csv_source(str(path), SCHEMA, batch_rows=40, split_bytes=700)


def json_lines(path: Path) -> Source:
    file = path.with_suffix(".gz")
    lines = "".join(f'{{"id": {n}, "text": "{text}"}}\n' for n, text in enumerate(TEXTS))
    file.write_bytes(gzip.compress(lines.encode()))
    return json_source(str(file), SCHEMA, batch_rows=40)


def parquet(path: Path) -> Source:
    pq.write_table(pa.table({"id": range(ROWS), "text": TEXTS}), path, row_group_size=60)
    return parquet_source(str(path), batch_rows=40)


SOURCES: dict[str, Callable[[Path], Source]] = {
    "csv": csv,
    "json": json_lines,
    "parquet": parquet,
    "columns": lambda path: generator(
        {"id": sequence(), "x": random_int()}, rows=ROWS, batch_rows=16, splits=3
    ),
    "numbers": lambda path: numbers(ROWS, batch_rows=16, splits=2),
    "list": lambda path: from_list(list(range(ROWS)), batch_rows=30),
    "throttled": lambda path: throttle(numbers(ROWS, batch_rows=16, splits=2), 1e9),
    "with positions": lambda path: with_position(csv(path)),
}


async def read_as_wanted(
    source: Source, splits: list[bytes], wishes: list[int | None], stop: int
) -> list[Any]:
    """All records, with a wish for each poll, handed over to a new reader after `stop` polls."""
    records: list[Any] = []
    reader = open_reader(source, splits, make_context())
    for number in range(POLLS_MAX):
        if number == stop:
            positions = reader.snapshot()
            reader.close()
            reader = open_reader(source, positions, make_context())
        if reader.finished:
            reader.close()
            return records
        reader.rows_wanted = wishes[number % len(wishes)]
        batch = reader.poll()
        if batch is None:
            await reader.wait()
            continue
        assert reader.rows_wanted is None or len(batch) <= reader.rows_wanted
        records += records_of(batch)
    raise AssertionError("the reader does not end")


@pytest.mark.parametrize("kind", SOURCES)
def test_any_wishes_yield_the_same_records(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = SOURCES[kind](tmp_path_factory.mktemp("source") / "file")
    splits = source.splits(1)
    expected = asyncio.run(read_all(source))
    assert len(expected) == ROWS

    @settings(max_examples=25, deadline=None)
    @given(
        wishes=st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=5),
        stop=st.integers(0, 12),
    )
    def check(wishes: list[int | None], stop: int) -> None:
        assert asyncio.run(read_as_wanted(source, splits, wishes, stop)) == expected

    check()


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_around_bad_records_batches_stay_whole(format: str, tmp_path: Path) -> None:
    """Their rows are not one to one those of the file, so a position in between is not known."""
    path = tmp_path / "file"
    ids = [n if n % 9 else None for n in range(ROWS)]
    if format == "csv":
        path.write_text("id\n" + "".join(f"{'x' if n is None else n}\n" for n in ids))
    else:
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), path)
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    make = csv_source if format == "csv" else parquet_source
    source = make(str(path), schema, batch_rows=20, on_bad_record="drop")
    expected = asyncio.run(read_all(source))
    assert [row["id"] for row in expected] == [n for n in range(ROWS) if n % 9]

    async def read() -> list[int]:
        reader = open_reader(source, source.splits(1), make_context())
        reader.rows_wanted = 3
        sizes, records = [], []
        while not reader.finished:
            batch = reader.poll()
            if batch is None:
                await reader.wait()
            else:
                sizes.append(len(batch))
                records += records_of(batch)
        reader.close()
        assert records == expected
        return sizes

    assert min(asyncio.run(read())) > 3


def test_a_paced_source_waits_for_no_more_than_is_wanted() -> None:
    clock = MovedClock()
    source = numbers(ROWS, rate=500, batch_rows=10, splits=1)
    reader = open_reader(source, source.splits(1), make_context(clock=clock))
    clock.now_s = 0.0041  # three rows are due
    assert reader.poll() is None
    reader.rows_wanted = 3
    batch = reader.poll()
    assert batch is not None
    assert records_of(batch) == [0, 1, 2]
    assert reader.poll() is None
