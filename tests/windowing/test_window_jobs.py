"""Windows of records in whole jobs: crashes and rescales, both clocks, columns and objects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

import headgate as hg
from headgate.connectors import json_source, parquet_sink
from headgate.testing import harness

T0 = datetime(2026, 3, 1, 12, tzinfo=UTC)
BACKENDS = ["hashmap", "rocksdb"]


class Bid(msgspec.Struct, frozen=True):
    item: str
    price: int
    at: datetime


class Summary(msgspec.Struct, frozen=True):
    item: str
    start: datetime
    prices: str
    before: int


def at(seconds):
    return T0 + timedelta(seconds=seconds)


class Summarise(hg.WindowProcess[str, Bid, Summary]):
    """The number of earlier windows of the item is state per key."""

    windows = hg.ValueState[int](default=0)

    def on_window(self, key, window, records, ctx):
        before = self.windows.get()
        self.windows.set(before + 1)
        prices = ",".join(str(bid.price) for bid in sorted(records, key=lambda bid: bid.price))
        yield Summary(key, window.start_at, prices, before)


class Highest(hg.AggregateFunction[Bid, int, int]):
    def create(self):
        return 0

    def add(self, accumulator, value):
        return max(accumulator, value.price)

    def result(self, accumulator):
        return accumulator

    def merge(self, first, second):
        return max(first, second)


def job_of(make, backend="hashmap", parallelism=1):
    job = hg.Job("bids", parallelism=parallelism, options={"state.backend.type": backend})
    job.checkpoint(every="1h", storage="s3://lake/checkpoints")
    bids = job.read(json_source("in/*.json", Bid), name="bids")
    result = make(bids.event_time("at", max_out_of_order="1h"))
    if result.schema is not None:
        result.write(parquet_sink("out", guarantee="exactly_once"), name="out")
    else:
        into = {"text": "string"}
        named = result.map(lambda value: {"text": repr(value)}, into=into)
        named.write(parquet_sink("out", guarantee="exactly_once"), name="out")
    return job


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_survive_crashes_and_rescales(backend):
    def make(bids):
        windows = bids.key_by("item").window(hg.tumbling("10s"))
        return windows.process(Summarise(), into=Summary, name="summaries")

    bids = [Bid(f"item {n % 4}", n, at(n * 7 % 100)) for n in range(60)]
    expected = {}
    for bid in bids:
        start = int((bid.at - T0).total_seconds()) // 10 * 10
        expected.setdefault((bid.item, at(start)), []).append(bid.price)
    with harness(job_of(make, backend, parallelism=2)) as h:
        for step, bid in enumerate(bids):
            h.push("bids", bid)
            if step % 20 == 5:
                h.checkpoint()
            if step % 20 == 11:
                h.crash()
            if step == 45:
                h.rescale(3)
        h.end()
        found = h.drain("out")
    assert {(s.item, s.start): s.prices for s in found} == {
        which: ",".join(map(str, sorted(prices))) for which, prices in expected.items()
    }
    assert len(found) == len(expected)
    for item in {bid.item for bid in bids}:
        mine = sorted((s for s in found if s.item == item), key=lambda s: s.start)
        assert [s.before for s in mine] == list(range(len(mine)))


def test_a_reduce_of_columns_gives_columns():
    def make(bids):
        windows = bids.key_by("item").window(hg.session("10s"))
        return windows.reduce(lambda a, b: a if a.price >= b.price else b, name="highest")

    with harness(job_of(make)) as h:
        h.push("bids", Bid("a", 5, at(0)), Bid("a", 9, at(8)), Bid("a", 7, at(18)))
        h.push("bids", Bid("a", 1, at(40)), Bid("b", 3, at(9)))
        h.end()
        assert sorted(h.drain("out"), key=lambda bid: bid.at) == [
            Bid("a", 9, at(8)),
            Bid("b", 3, at(9)),
            Bid("a", 1, at(40)),
        ]


def test_an_aggregate_of_sessions_merges_accumulators():
    def make(bids):
        windows = bids.key_with(lambda bid: bid.item).window(hg.session("10s"))
        return windows.aggregate(Highest(), name="highest")

    with harness(job_of(make)) as h:
        h.push("bids", Bid("a", 5, at(0)), Bid("a", 7, at(18)), Bid("a", 6, at(9)))
        h.end()
        assert [row["text"] for row in h.drain("out")] == ["7"]


def test_windows_of_all_records_together():
    def make(bids):
        return bids.window(hg.tumbling("10s")).aggregate(Highest(), name="highest")

    with harness(job_of(make, parallelism=2)) as h:
        h.push("bids", Bid("a", 5, at(0)), Bid("b", 7, at(8)), Bid("c", 6, at(19)))
        h.end()
        assert sorted(row["text"] for row in h.drain("out")) == ["6", "7"]


def test_windows_of_the_machines_clock_fire_when_it_says_so():
    def make(bids):
        windows = bids.key_by("item").window(hg.tumbling("10s", time="processing"))
        return windows.aggregate(Highest(), name="highest")

    with harness(job_of(make)) as h:
        h.advance_time("3s")
        h.push("bids", Bid("a", 5, at(0)), Bid("a", 7, at(5_000)))
        h.checkpoint()
        h.crash()
        assert h.drain("out") == []
        h.advance_time("30s")
        h.checkpoint()
        assert [row["text"] for row in h.drain("out")] == ["7"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_in_windows_of_the_machines_clock(backend):
    def make(bids):
        windows = bids.key_by("item").window(hg.sliding("20s", "10s", time="processing"))
        return windows.agg(n=hg.count(), highest=hg.max("price"), name="counts")

    with harness(job_of(make, backend, parallelism=2)) as h:
        h.push("bids", Bid("a", 5, at(0)), Bid("b", 7, at(5_000)))
        h.checkpoint()
        h.push("bids", Bid("a", 9, at(0)))
        h.crash()
        h.rescale(3)
        h.advance_time("10s")
        h.push("bids", Bid("a", 1, at(0)))
        h.advance_time("1m")
        h.checkpoint()
        found = h.drain("out")
    ends = sorted({row["window_end"] for row in found})
    per_end = [
        {row["item"]: (row["n"], row["highest"]) for row in found if row["window_end"] == end}
        for end in ends
    ]
    assert per_end == [{"a": (2, 9), "b": (1, 7)}, {"a": (3, 9), "b": (1, 7)}, {"a": (1, 1)}]


def test_sessions_of_the_machines_clock():
    def make(bids):
        windows = bids.key_by("item").window(hg.session("10s", time="processing"))
        return windows.aggregate(Highest(), name="highest")

    with harness(job_of(make)) as h:
        for price in (1, 2, 3):
            h.push("bids", Bid("a", price, at(0)))
            h.advance_time("8s")
        h.advance_time("20s")
        h.push("bids", Bid("a", 1, at(0)))
        h.advance_time("20s")
        h.checkpoint()
        assert [row["text"] for row in h.drain("out")] == ["3", "1"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_records_are_counted_and_a_stream(backend):
    def make(bids):
        windows = bids.key_by("item").window(hg.tumbling("10s"), trigger=hg.triggers.EventTime())
        result = windows.aggregate(Highest(), name="highest")
        result.late.write(parquet_sink("late", guarantee="exactly_once"), name="late")
        return result

    with harness(job_of(make, backend)) as h:
        h.push("bids", Bid("a", 5, at(0)))
        h.advance_watermark("bids", at(12))
        h.push("bids", Bid("a", 6, at(3)), Bid("a", 7, at(11)))
        h.end()
        assert [row["price"] for row in h.drain("late")] == [6]
        assert sorted(row["text"] for row in h.drain("out")) == ["5", "7"]
