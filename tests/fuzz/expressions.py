"""Random SQL expressions, right and wrong ones, over random rows.

An expression is refused with a `PlanError`, or computed. Computed, it has the type that was planned, and
gives a row the same value however the rows are cut into batches, except for the last bit of floats.
"""

from __future__ import annotations

import datetime
import math
import random
from typing import Any

import pyarrow as pa

from headgate.errors import DataError, PlanError
from headgate.operators.elements import ColumnBatch
from headgate.operators.expressions.expression_steps import ExpressionSteps, FilterStep, SelectStep
from headgate.operators.expressions.expressions import check_filter, check_select

SCHEMA = pa.schema(
    {
        "n": pa.int64(),
        "i": pa.int32(),
        "f": pa.float64(),
        "s": pa.string(),
        "b": pa.bool_(),
        "at": pa.timestamp("ms", "UTC"),
        "d": pa.date32(),
    }
)
_LITERALS = [
    "0", "1", "-1", "3", "2.5", "1e9", "9223372036854775807", "9223372036854775808", "NULL", "TRUE",
    "FALSE", "''", "'a'", "'ä'", "'2025-01-01'", "DATE '2025-01-01'", "TIMESTAMP '2025-01-01 00:00:00'",
    "INTERVAL '1 hour'", "X'00'", "'%a_'",
]  # fmt: skip
_BINARY = [
    "+", "-", "*", "/", "%", "=", "<>", "<", "<=", ">", ">=", "AND", "OR", "||", "LIKE", "ILIKE",
    "IS DISTINCT FROM", "IS NOT DISTINCT FROM", "<=>", "&", "|", "^", "**", "~", "//",
]  # fmt: skip
_FUNCTIONS = [
    "ABS", "ROUND", "FLOOR", "CEIL", "SQRT", "EXP", "LN", "LOG", "LOG10", "POW", "MOD", "SIGN", "UPPER",
    "LOWER", "LENGTH", "CHAR_LENGTH", "OCTET_LENGTH", "SUBSTR", "LEFT", "RIGHT", "STRPOS", "POSITION",
    "REPLACE", "REVERSE", "TRIM", "LTRIM", "RTRIM", "CONCAT", "CONCAT_WS", "STARTS_WITH", "ENDS_WITH",
    "COALESCE", "NULLIF", "IFNULL", "GREATEST", "LEAST", "IF", "DATE_PART", "DATE", "STRFTIME", "SUM",
    "COUNT", "ROW_NUMBER", "LAG", "NOW", "RANDOM", "REGEXP_LIKE", "INITCAP", "PI", "DEGREES", "no_such",
    "READ_CSV", "UNNEST", "ARRAY_LENGTH", "BIT_AND", "DIV", "CBRT", "ATAN2", "SPLIT_PART", "TIMESTAMP",
]  # fmt: skip
_TYPES = [
    "BIGINT",
    "INTEGER",
    "DOUBLE",
    "VARCHAR",
    "BOOLEAN",
    "DATE",
    "TIMESTAMP",
    "DECIMAL(10, 2)",
]


def run(rng: random.Random) -> None:
    """One expression, as a filter or as a column."""
    text = _expression(rng, rng.randrange(1, 6))
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        text = _damaged(rng, text)
    try:
        if rng.random() < 0.4:
            step: Any = FilterStep(check_filter(text, SCHEMA), text)
        else:
            step = SelectStep(tuple(check_select([f"{text} AS x", "n"], SCHEMA)), text)
        steps = ExpressionSteps([step], SCHEMA)
    except PlanError:
        return
    batch = _rows(rng)
    whole = _apply(steps, batch)
    parts: list[list[Any]] | None = []
    start = 0
    while start < len(batch) and parts is not None:
        stop = min(len(batch), start + rng.choice([1, 2, 7]))
        part = _apply(steps, batch.slice(start, stop - start))
        parts = None if part is None else parts + part
        start = stop
    # A value may fail (a CAST of 'a'), and then one of the parts has it.
    assert (whole is None) == (parts is None), f"`{text}` fails whole or in parts, not in both"
    if whole is not None and parts is not None:
        assert len(whole) == len(parts), f"`{text}`: {len(whole)} rows, in parts {len(parts)}"
        for one, other in zip(whole, parts, strict=True):
            assert _alike(one, other), f"`{text}`: {one} whole, {other} in parts"


def _apply(steps: ExpressionSteps, rows: pa.RecordBatch) -> list[list[Any]] | None:
    """The rows that come out; None if a value fails."""
    try:
        result = steps.apply(ColumnBatch(rows))
    except DataError:
        return None
    if result is None:
        return []
    assert result.data.schema.types == steps.output_schema.types, (
        f"planned as {steps.output_schema.types}, computed as {result.data.schema.types}"
    )
    # Python has no dates before the year 1 or after 9999.
    columns = [_countable(column).to_pylist() for column in result.data.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _countable(column: pa.Array) -> pa.Array:
    if not pa.types.is_temporal(column.type):
        return column
    width = 32 if column.type in (pa.date32(), pa.time32("s"), pa.time32("ms")) else 64
    return column.view(pa.int32() if width == 32 else pa.int64())


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-300)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _rows(rng: random.Random) -> pa.RecordBatch:
    def column(*values: Any) -> list[Any]:
        return [None if rng.random() < 0.2 else rng.choice(values) for _ in range(count)]

    count = rng.choice([0, 1, 2, 9, 20])
    day = datetime.date(2025, 2, 28)
    moment = datetime.datetime(2025, 2, 28, 23, 59, 59, tzinfo=datetime.UTC)
    columns = [
        column(0, 1, -1, 7, 2**63 - 1, -(2**63)),
        column(0, 1, -1, 7, 2**31 - 1, -(2**31)),
        column(0.0, -0.0, 0.5, 1.5, -2.5, math.inf, -math.inf, math.nan, 1e308),
        column("", "a", "abc", "äöü", "😀", "2025-01-01", "12", " "),
        column(True, False),
        column(moment, moment.replace(year=1), moment.replace(year=9999)),
        column(day, day.replace(year=1), day.replace(year=9999)),
    ]
    arrays = [pa.array(values, kind) for values, kind in zip(columns, SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(
            [*SCHEMA.names, rng.choice(_LITERALS), "nope" if rng.random() < 0.1 else "n"]
        )

    def inner() -> str:
        return _expression(rng, depth - 1)

    match rng.randrange(11):
        case 0 | 1 | 2:
            return f"{inner()} {rng.choice(_BINARY)} {inner()}"
        case 3:
            return f"({inner()})"
        case 4:
            return f"{rng.choice(['NOT', '-', '+'])} {inner()}"
        case 5:
            arguments = ", ".join(inner() for _ in range(rng.choice([0, 1, 1, 2, 2, 3])))
            return f"{rng.choice(_FUNCTIONS)}({arguments})"
        case 6:
            return f"{rng.choice(['CAST', 'TRY_CAST'])}({inner()} AS {rng.choice(_TYPES)})"
        case 7:
            whens = " ".join(f"WHEN {inner()} THEN {inner()}" for _ in range(rng.choice([1, 2])))
            other = f" ELSE {inner()}" if rng.random() < 0.5 else ""
            return f"CASE {whens}{other} END"
        case 8:
            values = ", ".join(inner() for _ in range(rng.choice([1, 2, 30])))
            return f"{inner()} {rng.choice(['IN', 'NOT IN'])} ({values})"
        case 9:
            return f"{inner()} {rng.choice(['BETWEEN', 'NOT BETWEEN'])} {inner()} AND {inner()}"
        case _:
            part = rng.choice(["YEAR", "MONTH", "DAY", "HOUR", "EPOCH", "WEEK"])
            tail = rng.choice([f"EXTRACT({part} FROM {inner()})", f"{inner()} IS NOT NULL"])
            return rng.choice([tail, f"(SELECT {inner()})", f"{inner()} IS NULL"])


def _damaged(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    match rng.randrange(4):
        case 0:
            return text[:at] + text[at + 1 :]
        case 1:
            return (
                text[:at]
                + rng.choice(["'", '"', "(", ")", ",", ";", "--", "/*", "\x00", "ß", "*"])
                + text[at:]
            )
        case 2:
            return text[:at]
        case _:
            other = rng.randrange(len(text) + 1)
            return text[min(at, other) : max(at, other)] + text
