"""Generated data: a pure function of seed and row number, whatever the cut; and paced by the clock."""

from __future__ import annotations

import asyncio
import datetime
import math
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.connectors import (
    choice,
    constant,
    event_time,
    generator,
    nexmark,
    numbers,
    pattern,
    random_float,
    random_int,
    sequence,
)
from headgate.connectors.nexmark import BASE_TIME_MS, SCHEMAS
from headgate.errors import UsageError
from headgate.operators.elements import ColumnBatch
from headgate.testing.connectors import (
    check_source,
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from headgate.tests.support.clocks import MovedClock

FIELDS: dict[str, Any] = {
    "id": sequence(start=10, step=2),
    "user": random_int(5, 8),
    "score": random_float(-1.0, 1.0),
    "word": choice(["a", "b"]),
    "at": event_time(every="10ms", jitter="30ms"),
    "one": constant(1.5),
    "name": pattern(prefix="u-", distinct=3),
    "key": pattern(suffix="!"),
}
SOURCES = {
    "columns": lambda **options: generator(FIELDS, rows=40, **options),
    "function": lambda **options: generator(function=lambda i: (i, i * i), rows=40, **options),
    "numbers": lambda **options: numbers(40, **options),
    **{kind: lambda kind=kind, **options: nexmark(kind, events=40, **options) for kind in SCHEMAS},
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("options", [{"batch_rows": 1}, {"batch_rows": 7, "splits": 3}])
def test_every_position(name: str, options: dict[str, int]) -> None:
    asyncio.run(check_source(SOURCES[name](**options)))


@pytest.mark.parametrize("name", SOURCES)
def test_one_reader_keeps_the_order_of_rows_whatever_the_cut(name: str) -> None:
    whole = asyncio.run(read_all(SOURCES[name](batch_rows=1000, splits=1)))
    assert len(whole) == 40
    for batch_rows, splits in [(1, 8), (7, 3), (40, 2), (64, 5)]:
        cut = SOURCES[name](batch_rows=batch_rows, splits=splits)
        assert asyncio.run(read_all(cut)) == whole


def make(source: Any, first: int, count: int) -> pa.RecordBatch:
    batch = source.make(first, count)
    assert isinstance(batch, ColumnBatch)
    return batch.data


ENDLESS = [generator(FIELDS), *(nexmark(kind) for kind in SCHEMAS)]  # here: pools take a while


@settings(max_examples=25, deadline=None)
@given(first=st.integers(0, 500_000), count=st.integers(2, 300), cut=st.integers(1, 300))
def test_any_row_can_be_made_alone(first: int, count: int, cut: int) -> None:
    """Cuts across the 64 Ki blocks of the Nexmark pools included."""
    first, cut = first + 65_400, min(cut, count - 1)
    for source in ENDLESS:
        whole = make(source, first, count)
        parts = [make(source, first, cut), make(source, first + cut, count - cut)]
        assert pa.Table.from_batches(parts).to_pylist() == whole.to_pylist()


def test_projection_does_not_change_the_columns_left() -> None:
    for source in ENDLESS:
        whole = make(source, 70_000, 50)
        for name in whole.schema.names:
            narrow = source.with_columns([name])
            assert narrow.schema is not None
            assert make(narrow, 70_000, 50).equals(whole.select([name]))
        assert make(source.with_columns([]), 0, 5).num_rows == 5


def test_the_kinds_of_fields() -> None:
    data = make(generator(FIELDS, seed=3), 1000, 2000)
    column = {name: data.column(name).to_pylist() for name in data.schema.names}
    assert column["id"][:2] == [2010, 2012]
    assert set(column["user"]) == {5, 6, 7}
    assert -1 <= min(column["score"]) < -0.9 < 0.9 < max(column["score"]) < 1
    assert set(column["word"]) == {"a", "b"}
    assert set(column["one"]) == {1.5}
    assert set(column["name"]) == {"u-0", "u-1", "u-2"}
    assert column["key"][0] == "1000!"
    start = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
    delays = {
        round((start - at).total_seconds() * 1000) + (1000 + i) * 10
        for i, at in enumerate(column["at"])
    }
    assert delays == set(range(31))
    assert make(generator(FIELDS, seed=4), 0, 50) != make(generator(FIELDS, seed=3), 0, 50)


def test_fields_from_a_manifest_and_from_a_schema() -> None:
    described = {"id": "sequence", "user": {"kind": "int", "low": 5, "high": 8}}
    assert make(generator(described), 0, 9).equals(
        make(generator({"id": sequence(), "user": random_int(5, 8)}), 0, 9)
    )

    class Click(msgspec.Struct):
        user: str
        clicks: int

    source = generator(Click, rows=3)
    assert source.row_type is Click
    assert [type(value) for value in asyncio.run(read_all(source))[0].values()] == [str, int]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either fields or function"),
        ({"fields": {"a": "sequense"}}, "field=`a`"),
        ({"fields": {"a": {"kind": "int", "hihg": 3}}}, "field=`a`"),
        (
            {"fields": {"a": {"kind": "int", "low": 3, "high": 3}}},
            "field=`a`: low must be a number below high",
        ),
        ({"fields": {"a": {"kind": "choice", "values": []}}}, "field=`a`: a choice needs a list"),
        ({"fields": {"a": {"kind": "choice", "values": [1, "b"]}}}, "do not make a column"),
        ({"fields": {"a": "sequence"}, "rows": 1.5}, "whole number of at least 0 rows=`1.5`"),
        ({"fields": {"a": "sequence"}, "batch_rows": "9"}, "batch_rows=`'9'`"),
        ({"fields": {"a": "sequence"}, "rate": math.inf}, "and finite rate=`inf`"),
        ({"fields": {"a": "sequence"}, "rate": math.nan}, "and finite rate=`nan`"),
        ({"fields": {}}, "at least one field"),
        ({"fields": {"a": "sequence"}, "rows": -1}, "rows=`-1`"),
        ({"fields": {"a": "sequence"}, "rate": 0}, "rate must be above 0"),
        ({"fields": {"a": "sequence"}, "splits": 0}, "splits=`0`"),
        ({"fields": pa.schema([("a", pa.list_(pa.int8()))])}, "no default values"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generator(**arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: choice([]),
        lambda: choice("abc"),
        lambda: choice(["a", object()]),
        lambda: choice([1 << 80]),
        lambda: constant(object()),
        lambda: random_int("a", 3),
        lambda: random_int(0, 1 << 70),
        lambda: random_int(-(1 << 63), 1 << 62),
        lambda: random_float(0, math.inf),
        lambda: pattern(distinct=0),
    ],
)
def test_fields_that_make_no_column_are_refused_where_they_are_written(make: Any) -> None:
    with pytest.raises(UsageError, match="=`"):
        make()


# Nexmark


def test_nexmark_streams_agree() -> None:
    """Bids name auctions and persons that exist about then; hot ones get their share."""
    rows = 46 * 2000
    bids = make(nexmark("bid"), 0, rows)
    times = bids.column("date_time").cast(pa.int64()).to_numpy()
    assert times[0] == BASE_TIME_MS
    assert (np.diff(times) >= 0).all()
    assert times[46 * 200] - times[0] == 1000  # 10,000 events of all kinds per second
    auction = bids.column("auction").to_numpy()
    bidder = bids.column("bidder").to_numpy()
    newest_auction = 1000 + np.arange(rows) // 46 * 3 + 2
    newest_person = 1000 + np.arange(rows) // 46
    assert auction.min() >= 1000
    assert ((newest_auction - auction >= -10) & (newest_auction - auction <= 100)).all()
    assert ((newest_person - bidder >= -10) & (newest_person - bidder <= 1000)).all()
    late = slice(46 * 1100, None)
    hot_auctions = (auction[late] == newest_auction[late] // 100 * 100).mean()
    hot_bidders = (bidder[late] == newest_person[late] // 100 * 100 + 1).mean()
    assert 0.49 < hot_auctions < 0.53
    assert 0.73 < hot_bidders < 0.78
    prices = bids.column("price").to_numpy()
    assert 100 <= prices.min() < 200
    assert 50_000_000 < prices.max() <= 100_000_000

    auctions = make(nexmark("auction"), 0, 300)
    assert auctions.column("id").to_pylist() == list(range(1000, 1300))
    expires = auctions.column("expires").cast(pa.int64()).to_numpy()
    assert (expires > auctions.column("date_time").cast(pa.int64()).to_numpy()).all()
    assert set(auctions.column("category").to_pylist()) == {10, 11, 12, 13, 14}
    assert make(nexmark("person"), 5, 1).column("id").to_pylist() == [1005]
    for name, value in zip(
        bids.column("channel").to_pylist(), bids.column("url").to_pylist(), strict=True
    ):
        assert name.removeprefix("channel-") in value


@pytest.mark.parametrize("speed", [1, 7, 1000, 30_000, 1_000_000])
def test_nexmark_event_time_at_any_speed(speed: int) -> None:
    times = make(nexmark("bid", events_per_second=speed), 0, 1000).column("date_time")
    numbers = [row // 46 * 50 + 4 + row % 46 for row in range(1000)]
    assert times.cast(pa.int64()).to_pylist() == [BASE_TIME_MS + n * 1000 // speed for n in numbers]


def test_nexmark_values_never_change() -> None:
    """Restored jobs make rows again: another value would be another record."""
    source = nexmark("bid", seed=7).with_columns(["auction", "bidder", "price", "channel"])
    assert [tuple(row.values()) for row in make(source, 1_000_000, 3).to_pylist()] == GOLDEN_BIDS
    assert make(generator({"a": random_int()}, seed=7), 5, 3).column(0).to_pylist() == GOLDEN_INTS


GOLDEN_BIDS = [
    (66200, 22701, 73777619, "channel-1996"),
    (66200, 22701, 69636, "channel-1784"),
    (66200, 22701, 15937300, "channel-532"),
]
GOLDEN_INTS = [632647, 854090, 367067]


def test_nexmark_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="no such nexmark stream"):
        nexmark("bids")
    with pytest.raises(UsageError, match="events_per_second"):
        nexmark("bid", events_per_second=0)


# Pace


class FakeClock(MovedClock):
    """Time that passes only in `asyncio.sleep`."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.slept: list[float] = []

    async def sleep(self, delay: float) -> None:
        self.slept.append(delay)
        self.now_s += delay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(asyncio, "sleep", clock.sleep)
    return clock


def test_a_slow_source_sleeps_exactly_until_the_next_row(clock: FakeClock) -> None:
    async def run() -> list[tuple[float, Any]]:
        source = numbers(4, rate=2)
        reader = open_reader(source, source.splits(1), make_context(clock=clock))
        seen = []
        while not reader.finished:
            batch = reader.poll()
            if batch is None:
                await reader.wait()
            else:
                seen.append((clock.now_s - 1000, *records_of(batch)))
        return seen

    assert asyncio.run(run()) == [(0, 0), (0.5, 1), (1, 2), (1.5, 3)]
    assert clock.slept == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("rate", [10, 333, 12_345, 1_000_000])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_the_rate_holds_over_all_subtasks(clock: FakeClock, rate: int, parallelism: int) -> None:
    """No subtask is ahead by more than a 50th of a second (or a row), and all are done in time."""
    rows = rate * 4

    async def run() -> None:
        source = numbers(rows, rate=rate)
        splits = source.splits(parallelism)
        context = make_context(clock=clock)
        readers = [open_reader(source, splits[i::parallelism], context) for i in range(parallelism)]
        done = 0
        while any(not reader.finished for reader in readers):
            for reader in readers:
                while (batch := reader.poll()) is not None:
                    done += len(batch)
                    ahead = done - (clock.now_s - 1000) * rate
                    assert ahead <= (rate / 50 + 1) * parallelism
            clock.now_s += 0.01
        assert done == rows

    asyncio.run(run())
    assert clock.now_s - 1000 == pytest.approx(4, abs=0.05 + parallelism / min(rate, 50))


def test_after_a_restore_the_pace_starts_anew(clock: FakeClock) -> None:
    """Time that passed while the job was down is not caught up by a burst."""

    async def run() -> None:
        source = numbers(10_000, rate=100, batch_rows=1)
        reader = open_reader(source, source.splits(1), make_context(clock=clock))
        await read_batches(reader, 500)
        clock.now_s += 3600
        restored = open_reader(source, reader.snapshot(), make_context(clock=clock))
        start = clock.now_s
        batches = await read_batches(restored, 101)
        assert records_of(batches[-1]) == [600]
        assert clock.now_s - start == pytest.approx(1.0, abs=0.03)

    asyncio.run(run())


def batch_sizes(source: Any, most: int = 1_000_000) -> list[list[int]]:
    """Return the rows of the batches of each split, of about `most` rows in all."""
    sizes = []
    for split in source.splits(1):
        reader = open_reader(source, [split])
        found: list[int] = []
        while sum(found) < most // source.split_count and (batch := reader.poll()) is not None:
            found.append(len(batch))
        sizes.append(found)
    return sizes


def test_batches_are_large_unless_there_are_few_rows_for_the_splits() -> None:
    fields = {"n": sequence()}
    assert batch_sizes(generator(fields, rows=None)) == [[32_768] * 4] * 8
    few = batch_sizes(generator(fields, rows=100_000))
    assert all(few), "a split has no rows"
    assert max(map(max, few)) == 12_500
    assert max(map(sum, batch_sizes(generator(fields, rows=20_000)))) == 8_192
    assert batch_sizes(generator(fields, rows=20, batch_rows=20, splits=2)) == [[20], []]


@pytest.mark.parametrize(
    ("rate", "rows"), [(10, 1), (50_000, 1_000), (1_000_000, 8_192), (3e6, 24_000), (1e7, 32_768)]
)
def test_a_row_of_a_paced_source_does_not_wait_long_for_its_batch(rate: float, rows: int) -> None:
    blocks = [
        msgspec.msgpack.decode(split)["block"]
        for split in generator({"n": sequence()}, rate=rate).splits(1)
    ]
    assert blocks == [rows] * 8
