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

BENCHMARKS = Path(hg.__file__).parent / "benchmarks"
EVENTS = 30_000
SHARES = {"person": 1, "auction": 3, "bid": 46}
NAMES = [f"q{n}" for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 14, 15, 16, 17, 18, 20, 22)]


@pytest.fixture(scope="module")
def suite() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import nexmark_suite

        yield nexmark_suite


@pytest.fixture(scope="module")
def tables() -> Any:
    """The three streams as tables of a database."""
    connection = duckdb.connect()
    for kind, share in SHARES.items():
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
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_that_of_batch(suite: Any, tables: Any, name: str, parallelism: int) -> None:
    expected = tables.sql(suite.QUERIES[name].sql).pl()
    found = streamed(suite, name, parallelism)
    assert len(expected)
    assert found.columns == expected.columns
    types = {column: found[column].dtype for column in found.columns}
    assert_frame_equal(
        found, expected.cast(types), check_row_order=False, rel_tol=1e-9, abs_tol=0.0
    )
