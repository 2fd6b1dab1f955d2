"""Nexmark's queries give the answer of a batch engine over the same rows, at any parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import headgate as hg
from headgate.connectors import collect
from headgate.connectors.nexmark import nexmark
from headgate.testing import harness

BENCHMARKS = Path(hg.__file__).parent / "benchmarks"
EVENTS = 30_000
NAMES = [f"q{n}" for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22)]
BY_THE_CLOCK = "q12"
TIMELESS = [name for name in NAMES if name != BY_THE_CLOCK]


@pytest.fixture(scope="module")
def suite() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import nexmark_suite

        yield nexmark_suite


@pytest.fixture(scope="module")
def tables(suite: Any) -> Any:
    """The three streams as tables of a database."""
    connection = duckdb.connect()
    for kind, share in suite.SHARES.items():
        rows = EVENTS * share // 50
        connection.register(kind, nexmark(kind).make(0, rows).data)
    return connection


def streamed(suite: Any, name: str, parallelism: int) -> pl.DataFrame:
    query = suite.QUERIES[name]
    job, sink = hg.Job(name, parallelism=parallelism), collect(guarantee="none")
    result = query.build(suite.Streams(job, EVENTS, batch_rows=997))
    result.write(sink, name="out")
    job.run()
    found = pl.DataFrame(sink.rows, infer_schema_length=None)
    if query.last_of:
        found = found.unique(query.last_of, keep="last", maintain_order=True)
    return found


def test_all_are_here(suite: Any) -> None:
    assert list(suite.QUERIES) == NAMES


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("name", TIMELESS)
def test_the_answer_is_that_of_batch(suite: Any, tables: Any, name: str, parallelism: int) -> None:
    expected = tables.sql(suite.QUERIES[name].sql).pl()
    found = streamed(suite, name, parallelism)
    assert len(expected)
    assert found.columns == expected.columns
    types = {column: found[column].dtype for column in found.columns}
    assert_frame_equal(
        found, expected.cast(types), check_row_order=False, rel_tol=1e-9, abs_tol=0.0
    )


@pytest.mark.parametrize("parallelism", [1, 2])
def test_windows_of_the_clock_count_each_bid_once(
    suite: Any, tables: Any, parallelism: int
) -> None:
    """The clock decides which window a bid is in; their sums are those of batch."""
    job = hg.Job(BY_THE_CLOCK, parallelism=parallelism)
    suite.QUERIES[BY_THE_CLOCK].build(suite.Streams(job, EVENTS)).write(
        collect(guarantee="none"), name="out"
    )
    bids = tables.sql("SELECT * FROM bid").arrow().read_all().combine_chunks()
    with harness(job) as h:
        for batch in bids.to_batches(max_chunksize=6_000):
            h.push("bid", batch)
            h.advance_time("7s")
        h.advance_time("10s")
        found = pl.DataFrame(h.drain("out"))
    assert set(found["ends"] - found["starts"]) == {10_000}
    assert found["starts"].n_unique() == 3
    assert not found.select("bidder", "starts").is_duplicated().any()
    expected = tables.sql(suite.QUERIES[BY_THE_CLOCK].sql).pl()
    sums = found.group_by("bidder").agg(pl.col("n").sum())
    assert_frame_equal(sums, expected, check_row_order=False)
