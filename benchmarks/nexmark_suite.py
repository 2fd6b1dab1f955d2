"""Nexmark's queries as headgate jobs, each beside the SQL that a batch engine answers over the same rows.

The queries are those of Nexmark's SQL suite, numbered as there. Left out: q6 (a window over retractions),
q10 (files), q19 (no top-n aggregate yet) and q21 (as q22: text functions). Where SQL updates a result, the
stream sends every version: then the last row of each key is the result (`last_of`). q12 has windows of the
machine's clock, so a batch engine answers only what their results add up to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.connectors.nexmark import nexmark

AT = pl.col("date_time").dt.timestamp("ms").alias("at")
SHARES = {"person": 1, "auction": 3, "bid": 46}
"""Events of each kind, of 50."""
DAY = pl.col("date_time").dt.date().alias("day")
DAY_TEXT = pl.col("day").dt.strftime("%Y-%m-%d")
"""Days are keys as dates, and texts in results only."""
PRICES = ((0, 10_000), (10_000, 1_000_000), (1_000_000, None))


@dataclass(frozen=True, slots=True)
class NexmarkQuery:
    """One query. Columns of `sql` are those of the job's result, in the same order."""

    title: str
    build: Callable[[Streams], Any]
    sql: str
    last_of: tuple[str, ...] = ()
    """For results with updates: the key whose last row counts."""


class Streams:
    """The three streams of one job, read when they are first used.

    Args:
        job: that reads them.
        events: of all three kinds; of 50, one is a person, three are auctions, 46 are bids.
    """

    def __init__(self, job: hg.Job, events: int, batch_rows: int = 65_536) -> None:
        self._job, self._events, self._batch_rows = job, events, batch_rows

    def _read(self, kind: str) -> Any:
        events = self._events * SHARES[kind] // 50
        source = nexmark(kind, events=events, batch_rows=self._batch_rows)
        return self._job.read(source, name=kind)

    def bids(self) -> Any:
        """Bids, in the order of time but for a second."""
        return self._read("bid")

    def auctions(self) -> Any:
        """Auctions."""
        return self._read("auction")

    def persons(self) -> Any:
        """Persons."""
        return self._read("person")


EVER = ("-1d", "1d")
"""Joins without a window hold either side for a day: longer than the data lasts, so they miss nothing."""

OPEN = "1s"
"""No auction of the generator is open for longer: bids for it lie closer together."""


def timed(stream: Any) -> Any:
    """With event time."""
    return stream.event_time("date_time", max_out_of_order="1s", wait_for_queued=False)


# -- joins without a window -------------------------------------------------------------------------


_WINNERS = """
    SELECT a.id, a.category, b.price, b.date_time FROM auction a JOIN bid b ON a.id = b.auction
    WHERE b.date_time BETWEEN a.date_time AND a.expires
    QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time) = 1
"""


def winners(streams: Streams) -> Any:
    """The winning bid of each auction that had one, when the auction is over."""
    ends = pl.col("expires").dt.timestamp("ms").alias("ends")
    opened = AT.alias("opened")
    auctions = timed(streams.auctions()).select("id", "category", opened, ends)
    bids = timed(streams.bids()).select("auction", "price", AT).key_by("auction")
    placed = bids.join(auctions.key_by("id"), within=(f"-{OPEN}", "0s"), name="placed")
    rank = "price * 1000 - (at - opened) AS rank"  # of equal bids the earliest
    valid = placed.filter("at <= ends").select("id", "category", "price", "at", rank)
    last = valid.key_by("id", "category").window(hg.session(OPEN))
    best = last.agg(price=hg.max("price"), at=hg.max_by("at", by="rank"), name="winners")
    return best.select("id", "category", "price", "at")


# -- the queries ------------------------------------------------------------------------------------


def _q3(streams: Streams) -> Any:
    auctions = timed(streams.auctions().filter("category = 10")).select("id", "seller")
    persons = timed(streams.persons().filter("state IN ('OR', 'ID', 'CA')"))
    persons = persons.select("id", "name", "city", "state").key_by("id")
    joined = auctions.key_by("seller").join(persons, within=EVER, suffix="_seller", name="sellers")
    return joined.select("name", "city", "state", "id")


def _q4(streams: Streams) -> Any:
    return winners(streams).key_by("category").agg(price=hg.avg("price"), name="categories")


def _q5(streams: Streams) -> Any:
    counts = timed(streams.bids()).key_by("auction").window(hg.sliding("10s", "2s"))
    found = counts.agg(n=hg.count(), name="counts").select("auction", "n", "window_end")
    most = found.window(hg.tumbling("2s")).agg(n=hg.max("n"), name="most")
    hot = found.key_by("n").window(hg.tumbling("2s"))
    joined = hot.join(most.key_by("n"), name="hot", suffix="_most")
    return joined.select("auction", "n", pl.col("window_end").dt.timestamp("ms").alias("ends"))


def _q7(streams: Streams) -> Any:
    bids = timed(streams.bids()).select("auction", "bidder", "price", "date_time")
    highest = bids.window(hg.tumbling("10s")).agg(price=hg.max("price"), name="highest")
    window = bids.key_by("price").window(hg.tumbling("10s"))
    joined = window.join(highest.key_by("price"), name="highest-bids")
    return joined.select("auction", "price", "bidder", AT)


def _q8(streams: Streams) -> Any:
    persons = timed(streams.persons()).select("id", "name", "date_time")
    sellers = timed(streams.auctions()).select("seller", "date_time").key_by("seller")
    sellers = sellers.window(hg.tumbling("10s")).agg(auctions=hg.count(), name="sellers")
    starts = pl.col("window_start").dt.timestamp("ms").alias("starts")
    window = persons.key_by("id").window(hg.tumbling("10s"))
    joined = window.join(sellers.key_by("seller"), name="new-sellers")
    return joined.select("id", "name", starts)


def _q11(streams: Streams) -> Any:
    bids = timed(streams.bids()).key_by("bidder").window(hg.session("1s"))
    start = pl.col("window_start").dt.timestamp("ms").alias("starts")
    end = pl.col("window_end").dt.timestamp("ms").alias("ends")
    return bids.agg(n=hg.count(), name="sessions").select("bidder", "n", start, end)


def _q12(streams: Streams) -> Any:
    windows = streams.bids().key_by("bidder").window(hg.tumbling("10s", time="processing"))
    start = pl.col("window_start").dt.timestamp("ms").alias("starts")
    end = pl.col("window_end").dt.timestamp("ms").alias("ends")
    counted = windows.agg(n=hg.count(), name="bids-by-the-clock")
    return counted.select("bidder", "n", start, end)


SIDE = pa.array([f"side {number}" for number in range(100)])


def _with_side(batch: pa.RecordBatch) -> pa.RecordBatch:
    places = batch.column("auction").to_numpy() % len(SIDE)
    return batch.append_column("side", SIDE.take(pa.array(places)))


def _q13(streams: Streams) -> Any:
    bids = streams.bids().select("auction", "bidder", "price")
    into = {"auction": "int64", "bidder": "int64", "price": "int64", "side": "string"}
    return bids.map_batches(_with_side, into=into)


def _q14(streams: Streams) -> Any:
    hour = pl.col("date_time").dt.hour()
    kind = (
        pl.when(hour.is_between(8, 18)).then(pl.lit("day"))
        .when((hour <= 6) | (hour >= 20)).then(pl.lit("night"))
        .otherwise(pl.lit("other")).alias("kind")
    )  # fmt: skip
    bids = streams.bids().filter("price * 0.908 > 1000000 AND price * 0.908 < 50000000")
    letters = pl.col("extra").str.count_matches("c").cast(pl.Int64).alias("c")
    return bids.select("auction", "bidder", "price", kind, letters)


def _ranks(column: str, prefix: str) -> list[Any]:
    """A column once for each range of prices, null outside of it."""
    found = []
    for rank, (low, high) in enumerate(PRICES, 1):
        inside = pl.col("price") >= low if high is None else pl.col("price").is_between(
            low, high, closed="left"
        )  # fmt: skip
        found.append(pl.when(inside).then(pl.col(column)).alias(f"{prefix}{rank}"))
    return found


_RANKS = ("price < 10000", "price BETWEEN 10000 AND 999999", "price >= 1000000")


def _per_rank(function: str, column: str, prefix: str) -> str:
    return ", ".join(
        f"{function} FILTER ({rank}) AS {prefix}{number}".replace("?", column)
        for number, rank in enumerate(_RANKS, 1)
    )


def _q15(streams: Streams) -> Any:
    bids = streams.bids().select(DAY, "bidder", *_ranks("bidder", "bidder"))
    counts = {f"n{rank}": hg.count(f"bidder{rank}") for rank in (1, 2, 3)}
    different = {f"d{rank}": hg.count_distinct(f"bidder{rank}") for rank in (1, 2, 3)}
    found = bids.key_by("day").agg(
        n=hg.count(), **counts, d=hg.count_distinct("bidder"), **different, name="days"
    )
    return found.select(DAY_TEXT, "n", *counts, "d", *different)


def _q16(streams: Streams) -> Any:
    bids = streams.bids().select("channel", DAY, "auction", "bidder")
    found = bids.key_by("channel", "day").agg(
        n=hg.count(),
        bidders=hg.count_distinct("bidder"),
        auctions=hg.count_distinct("auction"),
        name="channels",
    )
    return found.select("channel", DAY_TEXT, "n", "bidders", "auctions")


def _q17(streams: Streams) -> Any:
    bids = streams.bids().select("auction", DAY, "price", *_ranks("price", "price"))
    ranks = {f"n{rank}": hg.count(f"price{rank}") for rank in (1, 2, 3)}
    found = bids.key_by("auction", "day").agg(
        n=hg.count(),
        **ranks,
        low=hg.min("price"),
        high=hg.max("price"),
        mean=hg.avg("price"),
        total=hg.sum("price"),
        name="auctions",
    )
    return found.select("auction", DAY_TEXT, "n", *ranks, "low", "high", "mean", "total")


def _q18(streams: Streams) -> Any:
    bids = streams.bids().select("bidder", "auction", AT)
    return bids.key_by("bidder", "auction").agg(at=hg.max("at"), name="last-bids")


def _q20(streams: Streams) -> Any:
    auctions = timed(streams.auctions().filter("category = 10")).select("id", "seller", "reserve")
    bids = timed(streams.bids()).select("auction", "bidder", "price").key_by("auction")
    joined = bids.join(auctions.key_by("id"), within=EVER, name="bids-of-auctions")
    return joined.select("auction", "bidder", "price", "seller", "reserve")


def _q22(streams: Streams) -> Any:
    parts = pl.col("url").str.split_exact("/", 6)
    directories = [parts.struct.field(f"field_{3 + n}").alias(f"dir{n + 1}") for n in range(3)]
    return streams.bids().select("auction", "bidder", "price", *directories)


QUERIES = {
    "q0": NexmarkQuery(
        "pass-through",
        lambda s: s.bids().select("auction", "bidder", "price", "date_time", "extra"),
        "SELECT auction, bidder, price, date_time, extra FROM bid",
    ),
    "q1": NexmarkQuery(
        "currency",
        lambda s: s.bids().select(
            "auction", "bidder", "price * 0.908 AS price", "date_time", "extra"
        ),
        "SELECT auction, bidder, CAST(price AS DOUBLE) * 0.908 AS price, date_time, extra FROM bid",
    ),
    "q2": NexmarkQuery(
        "selection",
        lambda s: s.bids().filter("auction % 123 = 0").select("auction", "price"),
        "SELECT auction, price FROM bid WHERE auction % 123 = 0",
    ),
    "q3": NexmarkQuery(
        "local items",
        _q3,
        "SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON a.seller = p.id "
        "WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')",
    ),
    "q4": NexmarkQuery(
        "average price per category",
        _q4,
        f"SELECT category, avg(price) AS price FROM ({_WINNERS}) GROUP BY category",
        last_of=("category",),
    ),
    "q5": NexmarkQuery(
        "hot items",
        _q5,
        "WITH hops AS (SELECT auction, date_time, unnest(range(5)) AS hop FROM bid), "
        "windows AS (SELECT auction, count(*) AS n, "
        "time_bucket(INTERVAL 2 SECOND, date_time) + hop * INTERVAL 2 SECOND "
        "+ INTERVAL 2 SECOND AS ends FROM hops GROUP BY ALL) "
        "SELECT auction, n, epoch_ms(ends) AS ends FROM windows "
        "QUALIFY n = max(n) OVER (PARTITION BY ends)",
    ),
    "q7": NexmarkQuery(
        "highest bid",
        _q7,
        "SELECT auction, price, bidder, epoch_ms(date_time) AS at FROM bid QUALIFY price = "
        "max(price) OVER (PARTITION BY time_bucket(INTERVAL 10 SECOND, date_time))",
    ),
    "q8": NexmarkQuery(
        "new users",
        _q8,
        "SELECT DISTINCT p.id, p.name, epoch_ms(time_bucket(INTERVAL 10 SECOND, p.date_time)) "
        "AS starts FROM person p JOIN auction a ON p.id = a.seller AND "
        "time_bucket(INTERVAL 10 SECOND, p.date_time) = time_bucket(INTERVAL 10 SECOND, a.date_time)",
    ),
    "q9": NexmarkQuery(
        "winning bids",
        winners,
        f"SELECT id, category, price, epoch_ms(date_time) AS at FROM ({_WINNERS})",
    ),
    "q11": NexmarkQuery(
        "user sessions",
        _q11,
        "WITH steps AS (SELECT bidder, date_time, coalesce(date_time - lag(date_time) OVER w >= "
        "INTERVAL 1 SECOND, true) AS new FROM bid WINDOW w AS (PARTITION BY bidder ORDER BY "
        "date_time)), numbered AS (SELECT bidder, date_time, sum(new::INT) OVER (PARTITION BY "
        "bidder ORDER BY date_time) AS number FROM steps) SELECT bidder, count(*) AS n, "
        "epoch_ms(min(date_time)) AS starts, epoch_ms(max(date_time)) + 1000 AS ends "
        "FROM numbered GROUP BY bidder, number",
    ),
    "q12": NexmarkQuery(
        "bids by the machine's clock",
        _q12,
        "SELECT bidder, count(*) AS n FROM bid GROUP BY bidder",
    ),
    "q13": NexmarkQuery(
        "bounded side input",
        _q13,
        "SELECT auction, bidder, price, 'side ' || auction % 100 AS side FROM bid",
    ),
    "q14": NexmarkQuery(
        "calculation",
        _q14,
        "SELECT auction, bidder, price, CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'day' "
        "WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'night' ELSE 'other' END AS kind, "
        "len(extra) - len(replace(extra, 'c', '')) AS c FROM bid WHERE "
        "price * 0.908 > 1000000 AND price * 0.908 < 50000000",
    ),
    "q15": NexmarkQuery(
        "bidding statistics",
        _q15,
        "SELECT strftime(date_time, '%Y-%m-%d') AS day, count(*) AS n, "
        f"{_per_rank('count(*)', '', 'n')}, count(DISTINCT bidder) AS d, "
        f"{_per_rank('count(DISTINCT bidder)', '', 'd')} FROM bid GROUP BY day",
        last_of=("day",),
    ),
    "q16": NexmarkQuery(
        "channel statistics",
        _q16,
        "SELECT channel, strftime(date_time, '%Y-%m-%d') AS day, count(*) AS n, "
        "count(DISTINCT bidder) AS bidders, count(DISTINCT auction) AS auctions "
        "FROM bid GROUP BY channel, day",
        last_of=("channel", "day"),
    ),
    "q17": NexmarkQuery(
        "auction statistics",
        _q17,
        "SELECT auction, strftime(date_time, '%Y-%m-%d') AS day, count(*) AS n, "
        f"{_per_rank('count(*)', '', 'n')}, min(price) AS low, max(price) AS high, "
        "avg(price) AS mean, sum(price) AS total FROM bid GROUP BY auction, day",
        last_of=("auction", "day"),
    ),
    "q18": NexmarkQuery(
        "last bids",
        _q18,
        "SELECT bidder, auction, epoch_ms(max(date_time)) AS at FROM bid GROUP BY bidder, auction",
        last_of=("bidder", "auction"),
    ),
    "q20": NexmarkQuery(
        "bids with their auction",
        _q20,
        "SELECT b.auction, b.bidder, b.price, a.seller, a.reserve FROM bid b JOIN auction a "
        "ON b.auction = a.id WHERE a.category = 10",
    ),
    "q22": NexmarkQuery(
        "directories of addresses",
        _q22,
        "SELECT auction, bidder, price, split_part(url, '/', 4) AS dir1, "
        "nullif(split_part(url, '/', 5), '') AS dir2, nullif(split_part(url, '/', 6), '') AS dir3 "
        "FROM bid",
    ),
}
