"""The benchmark's queries as headgate jobs and as SQL, over bids that are computed one by one.

Q1 computes in decimals in both engines. Every engine gets the same rows, so the number of results and
the sum of one of their columns must agree: `check_column` here, `check_sql` over Flink's result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
from computed import BATCH_ROWS, SCHEMA, ComputedBids
from metering import MeteredSource, TallySink

import headgate as hg
from headgate.connectors.files.source import parquet_source
from headgate.operators.source import Source

GROUP_ROWS = 131_072
DISORDER = {"computed": "1s", "parquet": "1h"}
"""Flink deals the blocks of a file out in any order, so windows over files have to wait."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query. `sql` is Flink's; `check_sql` gives (rows, sum of one column) of its result."""

    title: str
    build: Callable[[Any, str], Any]
    sql: str
    check_sql: str
    check_column: str
    events: int
    """Records of a run, of which the first quarter is warm-up: two or three seconds on one core."""
    flink_events: int
    columns: tuple[str, ...]
    """The columns of the bids that it reads."""
    event_time: bool = False


def _q0(bids: Any, disorder: str) -> Any:
    return bids.select(*SCHEMA.names)


def _q1(bids: Any, disorder: str) -> Any:
    return bids.select("auction", "bidder", "price * 0.908 AS price", "date_time")


def _q2(bids: Any, disorder: str) -> Any:
    return bids.filter("auction % 123 = 0").select("auction", "price")


def _q5(bids: Any, disorder: str) -> Any:
    timed = bids.event_time("date_time", max_out_of_order=disorder)
    return timed.key_by("auction").window(hg.tumbling("10s")).agg(n=hg.count(), name="count")


def _q5h(bids: Any, disorder: str) -> Any:
    timed = bids.event_time("date_time", max_out_of_order=disorder)
    windows = timed.key_by("auction").window(hg.sliding("10s", "2s"))
    return windows.agg(n=hg.count(), name="count")


def _q7(bids: Any, disorder: str) -> Any:
    timed = bids.event_time("date_time", max_out_of_order=disorder)
    return timed.window(hg.tumbling("10s")).agg(price=hg.max("price"), name="highest")


def _w(bids: Any, disorder: str) -> Any:
    pairs = bids.map(lambda bid: (bid.bidder, 1)).key_with(lambda pair: pair[0])
    return pairs.reduce(lambda a, b: (a[0], a[1] + b[1]), name="count")


_TUMBLE = "TABLE(TUMBLE(TABLE bids, DESCRIPTOR(date_time), INTERVAL '10' SECOND))"
_HOP = "TABLE(HOP(TABLE bids, DESCRIPTOR(date_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND))"

QUERIES: dict[str, Query] = {
    "q0": Query(
        "pass-through", _q0,
        "SELECT auction, bidder, price, date_time, extra FROM bids",
        "SELECT COUNT(*), CAST(SUM(price) AS DOUBLE) FROM ({sql})",
        "price", 30_000_000, 10_000_000, tuple(SCHEMA.names),
    ),
    "q1": Query(
        "price * 0.908", _q1,
        "SELECT auction, bidder, price * 0.908 AS price, date_time FROM bids",
        "SELECT COUNT(*), CAST(SUM(price) AS DOUBLE) FROM ({sql})",
        "price", 60_000_000, 20_000_000, ("auction", "bidder", "price", "date_time"),
    ),
    "q2": Query(
        "auction % 123 = 0", _q2,
        "SELECT auction, price FROM bids WHERE MOD(auction, 123) = 0",
        "SELECT COUNT(*), CAST(SUM(price) AS DOUBLE) FROM ({sql})",
        "price", 90_000_000, 40_000_000, ("auction", "price"),
    ),
    "q5": Query(
        "count per auction, 10 s", _q5,
        f"SELECT auction, window_start, COUNT(*) AS n FROM {_TUMBLE} "
        "GROUP BY auction, window_start, window_end",
        "SELECT COUNT(*), CAST(SUM(n * n) AS DOUBLE) FROM ({sql})",
        "n^2", 60_000_000, 5_000_000, ("auction", "date_time"), event_time=True,
    ),
    "q5h": Query(
        "the same, each 2 s", _q5h,
        f"SELECT auction, window_start, COUNT(*) AS n FROM {_HOP} "
        "GROUP BY auction, window_start, window_end",
        "SELECT COUNT(*), CAST(SUM(n * n) AS DOUBLE) FROM ({sql})",
        "n^2", 40_000_000, 4_000_000, ("auction", "date_time"), event_time=True,
    ),
    "q7": Query(
        "highest price, 10 s", _q7,
        f"SELECT window_start, MAX(price) AS price FROM {_TUMBLE} "
        "GROUP BY window_start, window_end",
        "SELECT COUNT(*), CAST(SUM(price) AS DOUBLE) FROM ({sql})",
        "price", 150_000_000, 16_000_000, ("price", "date_time"), event_time=True,
    ),
    "w": Query(
        "running count per bidder, Python lambdas", _w,
        "SELECT bidder, COUNT(*) AS n FROM bids GROUP BY bidder",
        # The running counts of a key are 1 to n.
        "SELECT SUM(n), CAST(SUM(n * (n + 1) / 2) AS DOUBLE) FROM ({sql})",
        "n", 4_000_000, 4_000_000, ("bidder",),
    ),
}  # fmt: skip


def bids(source: str, events: int, data: str) -> Source:
    """The bids, computed or from the Parquet file `data`."""
    return ComputedBids(events) if source == "computed" else parquet_source(data)


def make_job(
    name: str,
    source: str,
    parallelism: int,
    checkpoint: bool,
    events: int,
    data: str,
    directory: str,
    sums: bool = False,
    slots: int = 1,
) -> hg.Job:
    """Query `name` as a job; `directory` takes its marks and its checkpoints."""
    query = QUERIES[name]
    job = hg.Job(
        f"bench-{name}-{Path(directory).name}",
        parallelism=parallelism,
        options={"taskmanager.numberOfTaskSlots": str(slots)},
    )
    if checkpoint:
        job.checkpoint(every="1s", storage=str(Path(directory, "checkpoints")))
    stream = job.read(MeteredSource(bids(source, events, data), directory), name="bids")
    query.build(stream, DISORDER[source]).write(TallySink(directory, sums), name="out")
    return job


def bare_source(name: str, events: int) -> float:
    """Return the CPU seconds per million bids of making the columns of a query, without an engine.

    Other threads of the process, which sample what engines use, do not count.
    """
    source = ComputedBids(events).with_columns(QUERIES[name].columns)
    began = time.thread_time()
    for first in range(0, events, BATCH_ROWS):
        source.make(first, min(BATCH_ROWS, events - first))
    return (time.thread_time() - began) / events * 1e6


def bare_file(name: str, path: str) -> float:
    """Return the CPU seconds per million bids of decoding the columns of a query by pyarrow alone."""
    began, rows = time.thread_time(), 0
    with pq.ParquetFile(path) as file:
        columns = list(QUERIES[name].columns)
        for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
            rows += batch.num_rows
    return (time.thread_time() - began) / rows * 1e6


def bare_loop(events: int) -> float:
    """Records per CPU second of W's lambdas in a plain Python loop without an engine: the yardstick."""
    source = ComputedBids(events).with_columns(["bidder"])
    row = msgspec.defstruct("Bid", [("bidder", int)], gc=False)
    began, counts = time.process_time(), {}
    pair, key = (lambda bid: (bid.bidder, 1)), (lambda pair: pair[0])
    add = lambda a, b: (a[0], a[1] + b[1])  # noqa: E731
    for first in range(0, events, BATCH_ROWS):
        batch = source.make(first, min(BATCH_ROWS, events - first)).data
        results = []
        for record in map(pair, map(row, batch.column(0).to_numpy().tolist())):
            own = key(record)
            before = counts.get(own)
            counts[own] = value = record if before is None else add(before, record)
            results.append(value)
    return events / (time.process_time() - began)


def write_parquet(path: str, events: int) -> None:
    """The first `events` bids as one Parquet file; left alone if it is there."""
    if Path(path).exists():
        return
    source = ComputedBids(events)
    draft = f"{path}.draft"
    with pq.ParquetWriter(draft, source.schema, use_dictionary=False) as writer:
        for first in range(0, events, GROUP_ROWS):
            rows = min(GROUP_ROWS, events - first)
            writer.write_batch(source.make(first, rows).data, row_group_size=GROUP_ROWS)
    Path(draft).rename(path)
