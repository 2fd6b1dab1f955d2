"""Functions of SQL expressions mean what docs/expressions.md says, held against DuckDB."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import headgate
from headgate.operators.expressions.expressions import check_filter, check_select
from headgate.operators.expressions.sql.functions import FUNCTIONS
from headgate.tests.operators import sql_grid

DOCUMENT = (Path(headgate.__file__).parent / "docs" / "expressions.md").read_text()


def test_the_documented_differences_are_those_that_there_are():
    _, _, table = DOCUMENT.partition("| | here | DuckDB |")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    assert documented == set(sql_grid.compared())


def test_every_function_is_documented_and_compared_or_said_not_to_be():
    lists = {
        label: set(
            re.findall("`([A-Z0-9_]+)`", DOCUMENT.partition(f"| {label} |")[2].split("\n")[0])
        )
        for label in ("compared", "not compared")
    }
    assert lists["compared"] == set(FUNCTIONS) & set(sql_grid.CALLS)
    assert lists["not compared"] == set(FUNCTIONS) - set(sql_grid.CALLS)


@pytest.mark.parametrize("name", sql_grid.CALLS)
def test_a_value_depends_on_its_own_record_only(name):
    """Whole batches, and record by record: how batches are cut is chance."""
    for expression in sql_grid.CALLS[name]:
        used = {n: v for n, v in sql_grid.VALUES.items() if sql_grid._uses(expression, n)}
        if not used or expression == "REPLACE(s, t, 'x')":
            continue
        schema = pa.schema({name: kind for name, (kind, _) in used.items()})
        rows = [{n: v[at % len(v)] for n, (_, v) in used.items()} for at in range(24)]
        frame = pl.from_arrow(pa.Table.from_pylist(rows, schema=schema))
        (column,) = check_select([f"{expression} AS x"], schema)
        whole = frame.select(column.expression)["x"].to_list()
        single = [
            frame[at : at + 1].select(column.expression)["x"].to_list()[0] for at in range(24)
        ]
        assert all(map(sql_grid._same, whole, single)), expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("STRPOS(NULL::TEXT, 'b')", None),
        ("STRPOS('日本語', '本')", 2),
        ("GREATEST(CAST('NaN' AS DOUBLE), 1.0) = CAST('NaN' AS DOUBLE)", True),
        ("ROUND(2.5::DOUBLE)", 3.0),
        ("ROUND(-0.5::DOUBLE)", -1.0),
        ("LOG(2, 8.0)", 3.0),
        ("LOG(100.0)", 2.0),
        ("(NULL::BOOLEAN) IS NOT TRUE", True),
        ("SUBSTR('abc', -1, 3)", "a"),
        ("LEFT('abc', NULL::BIGINT)", None),
    ],
)
def test_the_meaning_is_that_of_sql(text, value):
    schema = pa.schema({"n": pa.int64()})
    (column,) = check_select([f"{text} AS x"], schema)
    found = pl.DataFrame({"n": [1]}).select(column.expression).item()
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize(
    "text",
    [
        "t > TIMESTAMP '2024-05-01 12:00:00'",
        "TIMESTAMP '2024-05-01 12:00:00' < t",
        "t BETWEEN TIMESTAMP '2024-05-01 12:00:01' AND TIMESTAMP '2024-05-02 00:00:00'",
    ],
)
def test_timestamps_compare_whatever_their_zone(zone, text):
    schema = pa.schema({"t": pa.timestamp("ms", zone)})
    instants = pa.array([1714564800000, 1714564801000, None], pa.int64()).cast(
        schema.field("t").type
    )
    frame = pl.from_arrow(pa.table({"t": instants}))
    condition = check_filter(text, schema)
    assert frame.select(condition.expression).to_series().to_list() == [False, True, None]
