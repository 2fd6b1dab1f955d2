"""The benchmark's queries as headgate jobs and as SQL, over the bids of Nexmark.

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
from metering import MeteredSource, TallySink

import headgate as hg
from headgate.connectors.files.source import parquet_source
from headgate.connectors.nexmark import nexmark
from headgate.operators.source import Source

BATCH_ROWS = 65_536
COLUMNS = ("auction", "bidder", "price", "date_time", "extra")
DISORDER = {"generator": "1s", "parquet": "1h"}
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
    goal: float
    """The rate at parallelism 1 that headgate wants to reach, in million records a second."""
    event_time: bool = False


def _q0(bids: Any, disorder: str) -> Any:
    return bids.select(*COLUMNS)


def _q1(bids: Any, disorder: str) -> Any:
    return bids.select("auction", "bidder", "price * 0.908 AS price", "date_time")


def _q2(bids: Any, disorder: str) -> Any:
    return bids.filter("auction % 123 = 0").select("auction", "price")


def _q5(bids: Any, disorder: str) -> Any:
    timed = bids.event_time("date_time", max_out_of_order=disorder)
    return timed.key_by("auction").window(hg.tumbling("10s")).agg(n=hg.count(), name="count")


def _q7(bids: Any, disorder: str) -> Any:
    timed = bids.event_time("date_time", max_out_of_order=disorder)
    return timed.window(hg.tumbling("10s")).agg(price=hg.max("price"), name="highest")


def _w(bids: Any, disorder: str) -> Any:
    pairs = bids.map(lambda bid: (bid.bidder, 1)).key_with(lambda pair: pair[0])
    return pairs.reduce(lambda a, b: (a[0], a[1] + b[1]), name="count")


_TUMBLE = "TABLE(TUMBLE(TABLE bids, DESCRIPTOR(date_time), INTERVAL '10' SECOND))"

QUERIES: dict[str, Query] = {
    "q0": Query(
        "pass-through", _q0,
        "SELECT auction, bidder, price, date_time, extra FROM bids",
        "SELECT COUNT(*), CAST(SUM(price) AS DOUBLE) FROM ({sql})",
        "price", 160_000_000, 5_000_000, 11.0,
    ),
    "q1": Query(
        "price * 0.908", _q1,
        "SELECT auction, bidder, price * 0.908 AS price, date_time FROM bids",
        "SELECT COUNT(*), CAST(SUM(price) AS DOUBLE) FROM ({sql})",
        "price", 90_000_000, 8_000_000, 23.0,
    ),
    "q2": Query(
        "auction % 123 = 0", _q2,
        "SELECT auction, price FROM bids WHERE MOD(auction, 123) = 0",
        "SELECT COUNT(*), CAST(SUM(price) AS DOUBLE) FROM ({sql})",
        "price", 120_000_000, 12_000_000, 36.0,
    ),
    "q5": Query(
        "count per auction, 10 s", _q5,
        f"SELECT auction, window_start, COUNT(*) AS n FROM {_TUMBLE} "
        "GROUP BY auction, window_start, window_end",
        "SELECT COUNT(*), CAST(SUM(n * n) AS DOUBLE) FROM ({sql})",
        "n^2", 50_000_000, 4_000_000, 12.7, event_time=True,
    ),
    "q7": Query(
        "highest price, 10 s", _q7,
        f"SELECT window_start, MAX(price) AS price FROM {_TUMBLE} "
        "GROUP BY window_start, window_end",
        "SELECT COUNT(*), CAST(SUM(price) AS DOUBLE) FROM ({sql})",
        "price", 150_000_000, 6_000_000, 19.0, event_time=True,
    ),
    "w": Query(
        "running count per bidder, Python lambdas", _w,
        "SELECT bidder, COUNT(*) AS n FROM bids GROUP BY bidder",
        # The running counts of a key are 1 to n.
        "SELECT SUM(n), CAST(SUM(n * (n + 1) / 2) AS DOUBLE) FROM ({sql})",
        "n", 3_000_000, 3_000_000, 2.0,
    ),
}  # fmt: skip


def bids(source: str, events: int, data: str) -> Source:
    """The bids, from the generator or from the Parquet file `data`."""
    if source == "generator":
        return nexmark("bid", events=events, batch_rows=BATCH_ROWS)
    return parquet_source(data, batch_rows=BATCH_ROWS)


def make_job(
    name: str,
    source: str,
    parallelism: int,
    checkpoint: bool,
    events: int,
    data: str,
    directory: str,
    sums: bool = False,
) -> hg.Job:
    """Query `name` as a job; `directory` takes its marks and its checkpoints."""
    query = QUERIES[name]
    job = hg.Job(f"bench-{name}-{Path(directory).name}", parallelism=parallelism)
    if checkpoint:
        job.checkpoint(every="1s", storage=str(Path(directory, "checkpoints")))
    stream = job.read(MeteredSource(bids(source, events, data), directory), name="bids")
    query.build(stream, DISORDER[source]).write(TallySink(directory, sums), name="out")
    return job


def bare_loop(events: int) -> float:
    """Records per CPU second of W's lambdas in a plain Python loop without an engine: the yardstick."""
    source = nexmark("bid", events=events, batch_rows=BATCH_ROWS).with_columns(["bidder"])
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
    source = nexmark("bid", events=events, batch_rows=BATCH_ROWS).with_columns(COLUMNS)
    draft = f"{path}.draft"
    with pq.ParquetWriter(draft, source.schema, use_dictionary=False) as writer:
        for first in range(0, events, BATCH_ROWS):
            rows = min(BATCH_ROWS, events - first)
            writer.write_batch(source.make(first, rows).data, row_group_size=BATCH_ROWS)
    Path(draft).rename(path)
