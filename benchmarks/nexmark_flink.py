"""Nexmark's queries as Flink SQL: the results of `nexmark_suite`, asked for as Nexmark's own SQL does.

Joins without a window are regular joins, winning bids and last bids are ranks, and unbounded aggregates
update their results, as in Nexmark. q7 joins by window, as headgate's query does: so Flink, too, can
forget its bids. `count_char` and the side input of q13 are Java (`peers/java`), as Nexmark's are.
"""

from __future__ import annotations

from pathlib import Path

COLUMNS = {
    "bid": "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, "
    "date_time TIMESTAMP(3), extra STRING",
    "auction": "id BIGINT, item_name STRING, description STRING, initial_bid BIGINT, "
    "reserve BIGINT, date_time TIMESTAMP(3), expires TIMESTAMP(3), seller BIGINT, "
    "category BIGINT, extra STRING",
    "person": "id BIGINT, name STRING, email_address STRING, credit_card STRING, city STRING, "
    "state STRING, date_time TIMESTAMP(3), extra STRING",
}
TIMED = ("q5", "q7", "q8", "q11", "q18")
"""Queries that need event time; q18 keeps last rows by it."""
DAY = "DATE_FORMAT(date_time, 'yyyy-MM-dd')"
RANKS = ("price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")


def tables(query: str, directory: Path) -> list[str]:
    """The statements that come before the query: its streams from files, and what else it needs."""
    time = ", WATERMARK FOR date_time AS date_time - INTERVAL '1' SECOND" * (query in TIMED)
    clock = ", p_time AS PROCTIME()" * (query in ("q12", "q13"))
    statements = [
        f"CREATE TABLE {kind} ({columns}{clock}{time}) WITH ('connector' = 'filesystem', "
        f"'path' = 'file://{directory / kind}', 'format' = 'parquet', "
        "'parquet.utc-timezone' = 'true')"
        for kind, columns in COLUMNS.items()
    ]
    if query == "q13":
        statements.append(
            "CREATE TABLE side (id BIGINT, side STRING) WITH ('connector' = 'nexmark-side')"
        )
    if query == "q14":
        statements.append("CREATE TEMPORARY FUNCTION count_char AS 'CountChar'")
    return statements


def _windows(kind: str, size: int) -> str:
    return f"TABLE(TUMBLE(TABLE {kind}, DESCRIPTOR(date_time), INTERVAL '{size}' SECOND))"


def _per_rank(function: str, prefix: str) -> str:
    return ", ".join(
        f"{function} FILTER (WHERE {rank}) AS {prefix}{number}"
        for number, rank in enumerate(RANKS, 1)
    )


_VALID = (
    "auction a JOIN bid b ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires"
)
_COUNTS = (
    "SELECT auction, COUNT(*) AS n, window_start, window_end FROM TABLE(HOP(TABLE bid, "
    "DESCRIPTOR(date_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND)) "
    "GROUP BY auction, window_start, window_end"
)
_SESSIONS = (
    "TABLE(SESSION(TABLE bid PARTITION BY bidder, DESCRIPTOR(date_time), INTERVAL '0.999' SECOND))"
)
"""Flink joins sessions that touch: a gap of 1 s ends none of them there, and does in headgate."""

SQL = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q3": "SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON a.seller = p.id "
    "WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')",
    "q4": "SELECT category, AVG(CAST(price AS DOUBLE)) AS price FROM (SELECT a.id, a.category, "
    f"MAX(b.price) AS price FROM {_VALID} GROUP BY a.id, a.category) GROUP BY category",
    "q5": f"WITH counts AS ({_COUNTS}) SELECT c.auction, c.n, c.window_end AS ends FROM counts c "
    "JOIN (SELECT MAX(n) AS n, window_start, window_end FROM counts "
    "GROUP BY window_start, window_end) m ON c.window_start = m.window_start "
    "AND c.window_end = m.window_end AND c.n >= m.n",
    "q7": "SELECT b.auction, b.price, b.bidder, b.date_time AS `at` "
    f"FROM (SELECT * FROM {_windows('bid', 10)}) b JOIN (SELECT MAX(price) AS price, "
    f"window_start, window_end FROM {_windows('bid', 10)} GROUP BY window_start, window_end) m "
    "ON b.window_start = m.window_start AND b.window_end = m.window_end AND b.price = m.price",
    "q8": "SELECT p.id, p.name, p.window_start AS starts FROM (SELECT id, name, window_start, "
    f"window_end FROM {_windows('person', 10)} GROUP BY id, name, window_start, window_end) p "
    f"JOIN (SELECT seller, window_start, window_end FROM {_windows('auction', 10)} "
    "GROUP BY seller, window_start, window_end) a ON p.id = a.seller "
    "AND p.window_start = a.window_start AND p.window_end = a.window_end",
    "q9": "SELECT id, category, price, `at` FROM (SELECT a.id, a.category, b.price, b.date_time "
    "AS `at`, ROW_NUMBER() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time) AS place "
    f"FROM {_VALID}) WHERE place <= 1",
    "q11": "SELECT bidder, COUNT(*) AS n, window_start AS starts, window_end AS ends "
    f"FROM {_SESSIONS} GROUP BY bidder, window_start, window_end",
    "q12": "SELECT bidder, COUNT(*) AS n, window_start AS starts, window_end AS ends FROM "
    "TABLE(TUMBLE(TABLE bid, DESCRIPTOR(p_time), INTERVAL '10' SECOND)) "
    "GROUP BY bidder, window_start, window_end",
    "q13": "SELECT b.auction, b.bidder, b.price, s.side FROM bid b "
    "JOIN side FOR SYSTEM_TIME AS OF b.p_time AS s ON MOD(b.auction, 100) = s.id",
    "q14": "SELECT auction, bidder, price, CASE WHEN HOUR(date_time) BETWEEN 8 AND 18 THEN 'day' "
    "WHEN HOUR(date_time) <= 6 OR HOUR(date_time) >= 20 THEN 'night' ELSE 'other' END AS kind, "
    "count_char(extra, 'c') AS c FROM bid "
    "WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000",
    "q15": f"SELECT {DAY} AS `day`, COUNT(*) AS n, {_per_rank('COUNT(*)', 'n')}, "
    f"COUNT(DISTINCT bidder) AS d, {_per_rank('COUNT(DISTINCT bidder)', 'd')} "
    f"FROM bid GROUP BY {DAY}",
    "q16": f"SELECT channel, {DAY} AS `day`, COUNT(*) AS n, COUNT(DISTINCT bidder) AS bidders, "
    f"COUNT(DISTINCT auction) AS auctions FROM bid GROUP BY channel, {DAY}",
    "q17": f"SELECT auction, {DAY} AS `day`, COUNT(*) AS n, {_per_rank('COUNT(*)', 'n')}, "
    "MIN(price) AS low, MAX(price) AS high, AVG(CAST(price AS DOUBLE)) AS mean, "
    f"SUM(price) AS total FROM bid GROUP BY auction, {DAY}",
    "q18": "SELECT bidder, auction, date_time AS `at` FROM (SELECT *, ROW_NUMBER() OVER "
    "(PARTITION BY bidder, auction ORDER BY date_time DESC) AS place FROM bid) WHERE place <= 1",
    "q20": "SELECT b.auction, b.bidder, b.price, a.seller, a.reserve FROM bid b "
    "JOIN auction a ON b.auction = a.id WHERE a.category = 10",
    "q22": "SELECT auction, bidder, price, SPLIT_INDEX(url, '/', 3) AS dir1, "
    "SPLIT_INDEX(url, '/', 4) AS dir2, SPLIT_INDEX(url, '/', 5) AS dir3 FROM bid",
}
