"""The benchmark's bids are those that SQL computes from their numbers alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"
WRAP = "% 18446744073709551616"
MIX = f"""
CREATE MACRO times(a, b) AS ((a::UHUGEINT * b::UHUGEINT) {WRAP})::UBIGINT;
CREATE MACRO fold(a, width) AS xor(a, a >> width);
CREATE MACRO draw(n) AS
    fold(times(fold(times(n, 11400714819323198485), 32), 13787848793156543929), 29);
CREATE MACRO bits(d, shift, width) AS ((d >> shift) & ((1 << width) - 1)::UBIGINT)::BIGINT;
CREATE MACRO recent(newest, d, span) AS greatest(newest - span, 0)
    + ((d * (newest - greatest(newest - span, 0) + 11)) >> 16) + 1000;
"""
BIDS = """
SELECT
    CASE WHEN bits(d, 0, 1) = 1 THEN (epoch * 3 + 2) // 100 * 100 + 1000
         ELSE recent(epoch * 3 + 2, bits(d, 1, 16), 100) END AS auction,
    CASE WHEN bits(d, 17, 2) <> 0 THEN epoch // 100 * 100 + 1001
         ELSE recent(epoch, bits(d, 19, 16), 1000) END AS bidder,
    (bits(d, 35, 7) + 1) * 100 << ((bits(d, 42, 10) * 13) >> 10) AS price,
    epoch * 5 + (n - epoch * 46 + 4) // 10 + 1436918400000 AS at,
    list_aggregate([
        chr(97 + bits(times(d, 11400714819323198485 + 2 * (letter // 8)),
                      8 * (letter % 8) + 4, 4)::INTEGER)
        FOR letter IN range(56)
    ], 'string_agg', '') AS extra
FROM (SELECT n::BIGINT AS n, n::BIGINT // 46 AS epoch, draw(n::UBIGINT) AS d
      FROM range({first}, {first} + {count}) t(n))
ORDER BY n
"""


@pytest.fixture(scope="module")
def computed() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import computed

        yield computed
        sys.modules.pop("computed", None)


@pytest.mark.parametrize("first", [0, 1_000_003, 3_000_000_000])
def test_rows_are_those_of_sql(computed: Any, first: int) -> None:
    count = 2_000
    made = computed.ComputedBids(first + count).make(first, count).data
    with duckdb.connect() as database:
        database.execute(MIX)
        query = BIDS.format(first=first, count=count)
        expected = database.sql(query).to_arrow_table()
    for name in ("auction", "bidder", "price", "extra"):
        assert made.column(name).to_pylist() == expected.column(name).to_pylist(), name
    assert made.column("date_time").cast(pa.int64()).to_pylist() == expected["at"].to_pylist()


def test_columns_do_not_depend_on_the_others(computed: Any) -> None:
    whole = computed.ComputedBids(1_000).make(100, 500).data
    for name in computed.SCHEMA.names:
        alone = computed.ComputedBids(1_000).with_columns([name]).make(100, 500).data
        assert alone.schema.names == [name]
        assert alone.column(0).equals(whole.column(name))
