"""Every function of SQL expressions on a grid of edge values, in headgate and in DuckDB."""

from __future__ import annotations

import math
import re
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from headgate.errors import PlanError
from headgate.operators.expressions.expressions import check_select

BIG, INF, NAN = 2**63 - 1, float("inf"), float("nan")
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "n": (pa.int64(), [0, 1, -1, 7, -7, BIG, -BIG, None]),
    "m": (pa.int64(), [0, 2, -3, None]),
    "f": (
        pa.float64(),
        [0.0, 0.25, 0.5, 1.5, 15.0, 2.5, -0.5, -2.5, 2.675, 1e308, INF, -INF, NAN, None],
    ),
    "g": (pa.float64(), [0.0, 1.0, -2.0, NAN, None]),
    "s": (pa.string(), ["", "a", "aBc", " ab ", "ÄÖß", "日本語", "a,b,a", "%_", None]),
    "t": (pa.string(), ["", "a", "b", ",", "本", None]),
    "b": (pa.bool_(), [True, False, None]),
    "d": (pa.date32(), [date(2024, 2, 29), date(1969, 12, 31), None]),
    "ts": (
        pa.timestamp("us"),
        [datetime(2024, 12, 30, 23, 59, 59, 999999), datetime(1969, 12, 31, 1), None],
    ),
    "l": (pa.list_(pa.int64()), [[3, 1], [], [None], None]),
}
CALLS = {
    "ABS": ["ABS(f)", "ABS(m)"], "CBRT": ["CBRT(f)"], "CEIL": ["CEIL(f)"], "CEILING": ["CEILING(f)"],
    "DIV": ["DIV(n, m)"], "EXP": ["EXP(g)"], "FLOOR": ["FLOOR(f)"], "LN": ["LN(f)"],
    "LOG": ["LOG(f)", "LOG(2, f)"], "LOG10": ["LOG10(f)"], "LOG2": ["LOG2(f)"], "MOD": ["MOD(n, m)"],
    "PI": ["PI()"], "POW": ["POW(f, g)", "POW(m, 2)"], "POWER": ["POWER(f, g)"],
    "ROUND": ["ROUND(f)", "ROUND(f, 1)", "ROUND(f, -1)", "ROUND(f, 2)",
        "ROUND(n)"], "SIGN": ["SIGN(f)", "SIGN(n)"], "SQRT": ["SQRT(f)"],
    "TRUNC": ["TRUNC(f)"],
    "ACOS": ["ACOS(g)"], "ASIN": ["ASIN(g)"], "ATAN": ["ATAN(f)"], "ATAN2": ["ATAN2(f, g)"],
    "COS": ["COS(g)"], "COT": ["COT(g)"], "DEGREES": ["DEGREES(f)"], "RADIANS": ["RADIANS(f)"],
    "SIN": ["SIN(g)"], "TAN": ["TAN(g)"],
    "BIT_COUNT": ["BIT_COUNT(n)"],
    "COALESCE": ["COALESCE(n, m)", "COALESCE(f, g)"], "GREATEST": ["GREATEST(f, g)", "GREATEST(n, m)"],
    "LEAST": ["LEAST(f, g)", "LEAST(n, m)"], "IF": ["IF(b, n, m)"], "IFNULL": ["IFNULL(f, g)"],
    "NULLIF": ["NULLIF(n, m)", "NULLIF(f, g)"],
    "BIT_LENGTH": ["BIT_LENGTH(s)"], "CHAR_LENGTH": ["CHAR_LENGTH(s)"],
    "CHARACTER_LENGTH": ["CHARACTER_LENGTH(s)"], "CONCAT": ["CONCAT(s, t)", "CONCAT(s, n)"],
    "CONCAT_WS": ["CONCAT_WS('-', s, t)"], "ENDS_WITH": ["ENDS_WITH(s, t)"],
    "LEFT": ["LEFT(s, m)"], "LENGTH": ["LENGTH(s)"],
    "LOWER": ["LOWER(s)"], "LPAD": ["LPAD(s, 2, 'x')"], "LTRIM": ["LTRIM(s)", "LTRIM(s, 'a')"],
    "OCTET_LENGTH": ["OCTET_LENGTH(s)"], "REGEXP_REPLACE": ["REGEXP_REPLACE(s, 'a', 'x')"],
    "REPLACE": ["REPLACE(s, t, 'x')"], "REVERSE": ["REVERSE(s)"],
    "RIGHT": ["RIGHT(s, m)"], "RPAD": ["RPAD(s, 2, 'x')"], "RTRIM": ["RTRIM(s)", "RTRIM(s, 'a')"],
    "SPLIT_PART": ["SPLIT_PART(s, ',', 1)", "SPLIT_PART(s, ',', 9)", "SPLIT_PART(s, ',', -1)"],
    "STARTS_WITH": ["STARTS_WITH(s, t)"], "STRING_TO_ARRAY": ["STRING_TO_ARRAY(s, ',')"],
    "STRPOS": ["STRPOS(s, t)"], "SUBSTR": ["SUBSTR(s, 2)", "SUBSTR(s, m)", "SUBSTR(s, -1, 2)"],
    "TRIM": ["TRIM(s)", "TRIM(s, 'a')"], "UPPER": ["UPPER(s)"],
    "DATE_PART": ["DATE_PART('year', ts)"], "DAY": ["DAY(d)"], "DAYOFMONTH": ["DAYOFMONTH(d)"],
    "DAYOFWEEK": ["DAYOFWEEK(d)"], "DAYOFYEAR": ["DAYOFYEAR(d)"], "HOUR": ["HOUR(ts)"],
    "MINUTE": ["MINUTE(ts)"], "MONTH": ["MONTH(d)"], "QUARTER": ["QUARTER(d)"], "SECOND": ["SECOND(ts)"],
    "STRFTIME": ["STRFTIME(ts, '%Y-%m-%d %H:%M:%S')"],
    "STRPTIME": ["STRPTIME('2024-05-01', '%Y-%m-%d')"],
    "WEEK": ["WEEK(ts)"], "YEAR": ["YEAR(ts)"],
    "ARRAY_CONTAINS": ["ARRAY_CONTAINS(l, 3)"], "ARRAY_LENGTH": ["ARRAY_LENGTH(l)"],
    "ARRAY_REVERSE": ["ARRAY_REVERSE(l)"],
    "ARRAY_TO_STRING": ["ARRAY_TO_STRING(STRING_TO_ARRAY(s, ','), '-')"],
    "operator /": ["f / g", "n / m"], "operator %": ["m % 2", "f % g"], "operator //": ["n // m"],
    "operator ||": ["s || t", "s || n"], "operator + - *": ["n + m", "f * g", "m - 1"],
    "operator =": ["n = m", "f = g", "s = t", "f <> g"], "operator <": ["f < g", "n >= m", "s < t"],
    "AND OR NOT": ["b AND n > 0", "b OR n > 0", "NOT b"], "IN": ["n IN (1, NULL)",
        "s NOT IN ('a')", "n IN (m)"],
    "BETWEEN": ["f BETWEEN 0 AND g"], "LIKE": ["s LIKE 'a%'", "s LIKE '%\\_'", "s ILIKE 'A_C'"],
    "IS": ["b IS NOT TRUE", "f IS NULL", "n IS DISTINCT FROM m"],
    "CASE": ["CASE WHEN b THEN n END", "CASE m WHEN 2 THEN 'x' ELSE s END"],
    "CAST": ["TRY_CAST(f AS BIGINT)", "TRY_CAST(s AS BIGINT)", "CAST(n AS TEXT)",
        "CAST(b AS TEXT)", "CAST(n AS DOUBLE)"],
    "EXTRACT": ["EXTRACT(dow FROM ts)", "EXTRACT(isodow FROM ts)", "EXTRACT(epoch FROM ts)",
                "EXTRACT(week FROM ts)", "EXTRACT(millisecond FROM ts)"],
}  # fmt: skip
"""By function or operator, expressions whose columns are those of `VALUES`."""


def compared() -> dict[str, str]:
    """By function, the first difference from DuckDB as `expression on values: headgate's, DuckDB's`."""
    found: dict[str, str] = {}
    for name, expressions in CALLS.items():
        for expression in expressions:
            difference = _difference(expression)
            if difference:
                found.setdefault(name, difference)
    return found


def _difference(expression: str) -> str:
    columns = [name for name in VALUES if _uses(expression, name)]
    rows: list[dict[str, Any]] = [{}]
    for name in columns:
        rows = [row | {name: value} for row in rows for value in VALUES[name][1]]
    schema = pa.schema({name: VALUES[name][0] for name in columns or ["n"]})
    table = pa.Table.from_pylist(rows if columns else [{"n": 1}], schema=schema)
    try:
        (column,) = check_select([f"{expression} AS x"], schema)
    except PlanError as error:
        return f"`{expression}` is refused: {error.message}"
    made = f"SELECT {expression} AS x FROM given"
    with duckdb.connect() as connection:
        ours, theirs = _ours(column.expression, table), _theirs(connection, made, table)
        if ours is None or theirs is None or len(ours) != len(theirs):
            ones = [table.slice(at, 1) for at in range(table.num_rows)]
            ours = [(_ours(column.expression, one) or ["an error"])[0] for one in ones]
            theirs = [(_theirs(connection, made, one) or ["an error"])[0] for one in ones]
    for row, own, other in zip(rows, ours, theirs, strict=True):
        if not _same(own, other):
            values = ", ".join(f"{name} = {value!r}" for name, value in row.items())
            return f"`{expression}` with {values}: {own!r}, DuckDB {other!r}"
    return ""


def _uses(expression: str, name: str) -> bool:
    return re.search(rf"(?<![\w'%]){name}(?![\w'(])", expression) is not None


def _ours(expression: pl.Expr, table: pa.Table) -> list[Any] | None:
    try:
        found: list[Any] = pl.from_arrow(table).select(expression.alias("x"))["x"].to_list()
    except Exception:
        return None
    return found


def _theirs(connection: Any, query: str, table: pa.Table) -> list[Any] | None:
    connection.register("given", table)
    try:
        return [row[0] for row in connection.sql(query).fetchall()]
    except duckdb.Error:
        return None


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    numbers = (int, float, Decimal)
    if isinstance(ours, numbers) and isinstance(theirs, numbers):
        if isinstance(ours, bool) != isinstance(theirs, bool):
            return False
        if math.isnan(ours) or math.isnan(theirs):
            return math.isnan(ours) and math.isnan(theirs)
        return math.isclose(ours, theirs, rel_tol=1e-12, abs_tol=1e-15)
    return bool(ours == theirs) and (ours is None) == (theirs is None)


if __name__ == "__main__":
    for name, difference in compared().items():
        print(f"{name:16} {difference}")
