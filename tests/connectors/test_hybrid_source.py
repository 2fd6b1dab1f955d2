"""A history and then a live source: order, positions at each record, and where the live one begins."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headgate.connectors import (
    csv_source,
    from_list,
    generator,
    hybrid_source,
    parquet_source,
    sequence,
    throttle,
)
from headgate.errors import PlanError, StateError, UsageError
from headgate.operators.source import Source, SourceRun
from headgate.operators.splits import History
from headgate.runtime.protocol.redistribution import spread_splits
from headgate.testing.connectors import (
    check_source,
    make_context,
    open_reader,
    read_batches,
    records_of,
)

SCHEMA = pa.schema([("ts", pa.timestamp("us", "UTC")), ("n", pa.int64())])
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"ts": BEGIN + timedelta(seconds=n), "n": n} for n in range(first, first + count)]


def from_end(end_ms: int | None) -> Source:
    """A live source of the five seconds behind the end of the history."""
    begin = 0 if end_ms is None else round(end_ms / 1000 - BEGIN.timestamp()) + 1
    return from_list(rows(begin, 5), schema=SCHEMA, batch_rows=1, splits=2)


@pytest.mark.parametrize("splits", [1, 3])
def test_each_batch_is_a_place_to_stop_at(splits: int) -> None:
    history = from_list(rows(0, 7), schema=SCHEMA, batch_rows=1, splits=splits)
    live = from_list(rows(7, 4), schema=SCHEMA, batch_rows=1, splits=2)
    asyncio.run(check_source(hybrid_source(history, live)))


def test_a_computed_source_is_the_same_after_a_restore_at_each_batch() -> None:
    asyncio.run(_stop_at_each_batch())


async def _stop_at_each_batch() -> None:
    history = from_list(rows(0, 6), schema=SCHEMA, batch_rows=1, splits=2)
    source = hybrid_source(history, from_end, time_column="ts")
    splits = source.splits(1)
    for stop in range(12):
        first = open_reader(source, splits)
        before = await read_batches(first, stop)
        second = open_reader(source, first.snapshot())
        after = await read_batches(second)
        found = [record["n"] for batch in [*before, *after] for record in records_of(batch)]
        assert sorted(found[:6]) == [0, 1, 2, 3, 4, 5]
        assert sorted(found[6:]) == [6, 7, 8, 9, 10]


def test_another_parallelism_at_any_moment_of_the_switch() -> None:
    asyncio.run(_rescale_anywhere())


async def _rescale_anywhere() -> None:
    history = from_list(rows(0, 6), schema=SCHEMA, batch_rows=1, splits=3)
    source = hybrid_source(history, from_end, time_column="ts")
    splits = source.splits(2)
    for stops in itertools.product(range(7), repeat=2):
        found: list[int] = []
        positions: list[bytes] = []
        for index, stop in enumerate(stops):
            reader = open_reader(source, splits[index::2])
            batches = await read_batches(reader, stop)
            found += [record["n"] for batch in batches for record in records_of(batch)]
            positions += reader.snapshot()
        for share in spread_splits({"splits": positions}, 3)["splits"]:
            batches = await read_batches(open_reader(source, share))
            found += [record["n"] for batch in batches for record in records_of(batch)]
        assert sorted(found) == list(range(11)), stops


def test_nothing_is_live_before_the_history_is_over_everywhere() -> None:
    asyncio.run(_wait_for_the_others())


async def _wait_for_the_others() -> None:
    history = from_list(rows(0, 2), schema=SCHEMA, batch_rows=1)
    context = make_context()
    context.splits.may_go_live = False
    source = hybrid_source(history, from_end, time_column="ts")
    reader = open_reader(source, source.splits(1), context)
    assert context.splits.history is History.BEING_READ
    assert reader.poll() is not None
    assert context.splits.history is History.BEING_READ
    assert reader.poll() is not None
    assert context.splits.history is History.OVER
    assert reader.poll() is None
    assert not reader.finished
    waiting = asyncio.ensure_future(reader.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    restored = open_reader(source, reader.snapshot(), context)
    assert context.splits.history is History.OVER
    context.splits.may_go_live = True
    found = [record["n"] for batch in await read_batches(restored) for record in records_of(batch)]
    assert sorted(found) == [2, 3, 4, 5, 6]
    assert context.splits.history is History.NONE


@pytest.mark.parametrize("pauses", ["history", "live"])
def test_a_throttled_one_can_pause_what_is_being_read(pauses: str) -> None:
    endless = generator({"n": sequence()}, splits=1)
    short = generator({"n": sequence()}, rows=1, splits=1, batch_rows=1)
    schema = {"n": "int64"}
    if pauses == "history":
        source = hybrid_source(short, from_list([{"n": 1}], schema=schema))
    else:
        source = hybrid_source(from_list([{"n": 1}], schema=schema), endless)
    reader = open_reader(throttle(source, 1e9), source.splits(1))
    assert reader.can_pause_splits is (pauses == "history")
    assert reader.poll() is not None
    assert reader.poll() is None, "it goes live"
    assert reader.can_pause_splits is (pauses == "live")


def test_a_subtask_without_live_splits_has_finished_with_its_history() -> None:
    source = hybrid_source(from_list([1], batch_rows=1), from_list([2]))
    context = make_context()
    reader = open_reader(source, source.splits(2)[:1], context)
    assert reader.poll() is not None
    assert reader.finished
    assert context.splits.history is History.NONE


def test_the_end_of_a_parquet_history_is_in_its_footers_or_in_its_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(rows(0, 10), schema=SCHEMA)
    for number, statistics in enumerate([True, False]):
        directory = tmp_path / str(number)
        directory.mkdir()
        for part in range(2):
            pq.write_table(
                table.slice(5 * part, 5),
                directory / f"{part}.parquet",
                row_group_size=2,
                write_statistics=statistics,
            )
        source = throttle(parquet_source(str(directory)), 1.0)
        assert source.latest(source.splits(1), "ts") == BEGIN.timestamp() * 1000 + 9000
        assert source.latest([], "ts") is None


def test_the_end_of_a_text_history_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("day,n\n2026-01-03,1\n,2\n2026-01-02,3\n")
    source = csv_source(str(path), schema={"day": "date", "n": "int64"})
    day = datetime.combine(date(2026, 1, 3), datetime.min.time(), UTC)
    assert source.latest(source.splits(1), "day") == day.timestamp() * 1000


def test_positions_of_the_history_alone_are_refused() -> None:
    history = from_list([1])
    with pytest.raises(StateError, match="was another source before"):
        open_reader(hybrid_source(history, from_list([2])), history.splits(1))


def test_an_empty_history_has_no_end() -> None:
    asked = []

    def live(end_ms: int | None) -> Source:
        asked.append(end_ms)
        return from_end(end_ms)

    source = hybrid_source(from_list([], schema=SCHEMA), live, time_column="ts")
    assert len(source.splits(1)) == 3
    assert asked == [None]


def test_only_what_is_wanted_is_read_of_both() -> None:
    source = hybrid_source(from_list(rows(0, 2), schema=SCHEMA), from_end, time_column="ts")
    narrow = source.with_columns(["n"])
    assert narrow.schema is not None
    assert narrow.schema.names == ["n"]
    reader = open_reader(narrow, narrow.splits(1))
    found = [record for batch in asyncio.run(read_batches(reader)) for record in records_of(batch)]
    assert [set(record) for record in found] == [{"n"}] * 7


def test_nulls_of_one_source_are_nulls_of_the_whole() -> None:
    strict = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    loose = pa.schema([("n", pa.int64())])
    source = hybrid_source(
        from_list([{"n": 1}], schema=strict), from_list([{"n": None}], schema=loose)
    )
    assert source.schema == loose
    batches = asyncio.run(read_batches(open_reader(source, source.splits(1))))
    assert [batch.data.schema for batch in batches] == [loose, loose]  # type: ignore[union-attr]


class Prepared(Source):
    """A live source that has to be made first."""

    schema = SCHEMA

    async def prepare(self, run: SourceRun) -> Source:
        await asyncio.sleep(0)
        return self


def mistakes() -> dict[str, tuple[Any, str]]:
    history = from_list(rows(0, 2), schema=SCHEMA)
    endless = generator({"n": sequence()})
    other = from_list([], schema=pa.schema([SCHEMA.field(0), ("m", pa.int64())]))
    hybrid = hybrid_source(history, from_end, time_column="ts")
    return {
        "endless": (lambda: hybrid_source(endless, endless), "no end"),
        "no source": (lambda: hybrid_source([1], history), "not a source"),  # type: ignore[arg-type]
        "other columns": (lambda: hybrid_source(history, other), "m: int64, n: int64"),
        "objects": (lambda: hybrid_source(history, from_list([1])), "Python objects"),
        "nested": (lambda: hybrid_source(history, throttle(hybrid, 1)), "another one"),
        "useless": (lambda: hybrid_source(history, history, time_column="ts"), "is not asked for"),
        "no column": (lambda: hybrid_source(history, from_end), "has no such column"),
        "misspelt": (
            lambda: hybrid_source(history, from_end, time_column="tss"),
            "has no such column",
        ),
        "no time": (
            lambda: hybrid_source(history, from_end, time_column="m"),
            "has no such column",
        ),
        "no source made": (
            lambda: hybrid_source(history, lambda end: 1, time_column="ts").splits(1),  # type: ignore[arg-type, return-value]
            "returned no source",
        ),
        "objects without end": (
            lambda: hybrid_source(from_list([1]), from_end, time_column="ts"),
            "not known",
        ),
        "an end nobody knows": (
            lambda: hybrid_source(
                generator({"n": sequence()}, rows=5), lambda end: endless, time_column="n"
            ).splits(1),
            "cannot tell",
        ),
        "two places": (lambda: _made_with(Prepared()), "has to be prepared"),
    }


def _made_with(live: Source) -> None:
    history = from_list(rows(0, 2), schema=SCHEMA)
    source = hybrid_source(history, lambda end: live, time_column="ts")
    run = SourceRun("job", "run", "source", "here", {}, None, lambda text: None)
    asyncio.run(source.prepare(run)).splits(1)


@pytest.mark.parametrize("name", mistakes())
def test_mistakes_are_told(name: str) -> None:
    call, message = mistakes()[name]
    with pytest.raises(UsageError, match=message):
        call()


def test_a_column_without_times_has_no_end() -> None:
    history = from_list([{"name": "a"}], schema={"name": "string"})
    with pytest.raises(PlanError, match="no event times"):
        hybrid_source(history, from_end, time_column="name")
