"""The benchmark's queries give the right results, and its clocks see every record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"
EVENTS = 200_000
DUCK_SQL = {
    "q0": "SELECT count(*), sum(price) FROM bids",
    "q1": "SELECT count(*), sum(price * 0.908) FROM bids",
    "q2": "SELECT count(*), sum(price) FROM bids WHERE auction % 123 = 0",
    "q5": "SELECT count(*), sum(n * n) FROM (SELECT count(*) AS n FROM bids "
    "GROUP BY auction, time_bucket(INTERVAL 10 SECOND, date_time))",
    "q5h": "SELECT count(*), sum(n * n) FROM (SELECT count(*) AS n FROM "
    "(SELECT auction, date_time, unnest(range(5)) AS back FROM bids) "
    "GROUP BY auction, time_bucket(INTERVAL 2 SECOND, date_time) - INTERVAL 2 SECOND * back)",
    "q7": "SELECT count(*), sum(price) FROM (SELECT max(price) AS price FROM bids "
    "GROUP BY time_bucket(INTERVAL 10 SECOND, date_time))",
    "w": "SELECT sum(n), sum(n * (n + 1) / 2) FROM "
    "(SELECT count(*) AS n FROM bids GROUP BY bidder)",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The benchmark's modules, and a Parquet file of bids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import metering
        import queries

        file = tmp_path_factory.mktemp("bids") / "bids.parquet"
        queries.write_parquet(str(file), EVENTS)
        yield SimpleNamespace(queries=queries, metering=metering, file=str(file))
        for name in ("metering", "queries"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("source", ["computed", "parquet"])
@pytest.mark.parametrize("query", DUCK_SQL)
def test_results_are_those_of_a_batch_engine(
    bench: Any, tmp_path: Path, query: str, source: str
) -> None:
    job = bench.queries.make_job(
        query, source, 2, False, EVENTS, bench.file, str(tmp_path), sums=True
    )
    job.run()
    found = bench.metering.read_marks(str(tmp_path))
    with duckdb.connect() as database:
        database.execute(f"CREATE VIEW bids AS SELECT * FROM '{bench.file}'")
        rows, total = database.execute(DUCK_SQL[query]).fetchone()
    assert found.rows_out == rows
    assert found.sums[bench.queries.QUERIES[query].check_column] == pytest.approx(
        float(total), rel=1e-12
    )


def test_the_clock_covers_what_comes_after_the_warm_up(bench: Any, tmp_path: Path) -> None:
    bench.queries.make_job("q2", "computed", 1, True, EVENTS, "", str(tmp_path)).run()
    steady = bench.metering.read_marks(str(tmp_path))
    # Marks are between batches: the clock starts at the first behind a quarter of the records.
    # How many records a batch has is up to the source and the speed of the chain.
    (read,) = tmp_path.glob("source-*.json")
    starts = [rows for _, rows, _ in json.loads(read.read_text())["marks"]]
    assert steady.events == EVENTS - min(rows for rows in starts if rows >= EVENTS / 4)
    assert EVENTS * 3 / 4 - bench.queries.BATCH_ROWS < steady.events <= EVENTS * 3 / 4
    assert steady.ended > steady.began


@pytest.mark.parametrize("source", [[], [{"marks": [[0.0, 0, 0.0]], "rows": 10}]])
def test_a_stopped_job_is_not_measured(bench: Any, tmp_path: Path, source: list[Any]) -> None:
    for index, body in enumerate(source):
        (tmp_path / f"source-source-{index}.json").write_text(json.dumps(body))
    with pytest.raises(RuntimeError, match=f"sources=`{len(source)}` sinks=`0`: it was stopped"):
        bench.metering.read_marks(str(tmp_path))


def test_every_query_has_its_sql(bench: Any) -> None:
    assert DUCK_SQL.keys() == bench.queries.QUERIES.keys()
