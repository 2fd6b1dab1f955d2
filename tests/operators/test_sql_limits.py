"""Long and deep SQL: a clear error with the way out, never a crash or a hang; up to the limits it works.

Without limits Polars' reader of SQL ends the process at 20,000 terms, and takes minutes for 5,000.
"""

from __future__ import annotations

import random

import polars as pl
import pyarrow as pa
import pytest

from headgate.errors import PlanError
from headgate.operators.expressions.expressions import SHOWN_MAX, check_filter, check_select
from headgate.operators.expressions.sql.parser import read_sql
from headgate.operators.expressions.sql.tokens import TEXT_MAX, SqlError
from headgate.operators.expressions.sql.tree import OPERATIONS_MAX
from headgate.operators.expressions.sql.types import Types
from headgate.operators.expressions.sql.writer import write_sql

SCHEMA = pa.schema({"n": pa.int64(), "m": pa.int64(), "s": pa.string(), "b": pa.bool_()})
FRAME = pl.DataFrame(
    {"n": range(50), "m": [3] * 50, "s": ["x"] * 50, "b": [True] * 50},
    schema={"n": pl.Int64, "m": pl.Int64, "s": pl.String, "b": pl.Boolean},
)
SHAPES = {
    "and": lambda size: " AND ".join(f"n <> {i}" for i in range(size)),
    "or": lambda size: " OR ".join(f"n = {i}" for i in range(size)),
    "or of likes": lambda size: " OR ".join(f"s LIKE '%{i}'" for i in range(size)),
    "xor": lambda size: " XOR ".join(["b"] * size),
    "brackets": lambda size: "(" * size + "b" + ")" * size,
    "not": lambda size: "NOT " * size + "b",
    "not in brackets": lambda size: "NOT (" * size + "b" + ")" * size,
    "minus": lambda size: "- " * size + "n > 1",
    "plus": lambda size: " + ".join(["n"] * size) + " > 1",
    "plus and times": lambda size: "n" + " + n * m - m" * size + " > 1",
    "bits": lambda size: " & ".join(["n"] * size) + " > 1",
    "joined text": lambda size: " || ".join(["s"] * size) + " > 'a'",
    "nested CASE": lambda size: "CASE WHEN b THEN " * size + "n" + " END" * size + " > 1",
    "branches": lambda size: (
        "CASE " + " ".join(f"WHEN n = {i} THEN {i}" for i in range(size)) + " END > 1"
    ),
    "COALESCE": lambda size: f"COALESCE({', '.join(['n'] * size)}, 1) > 1",
    "nested COALESCE": lambda size: "COALESCE(" * size + "n" + ", 1)" * size + " > 1",
    "nested calls": lambda size: "ABS(" * size + "n" + ")" * size + " > 1",
    "nested STRPOS": lambda size: "STRPOS(" * size + "s" + "::TEXT, 'a')" * size + " > 1",
    "nested ROUND": lambda size: "ROUND(" * size + "n / 2" + ")" * size + " > 1",
    "nested GREATEST": lambda size: "GREATEST(" * size + "n / 2" + ", 0.5)" * size + " > 1",
    "casts": lambda size: "n" + "::BIGINT" * size + " > 1",
    "values of columns": lambda size: f"n IN ({', '.join(['m'] * size)})",
    "nested IN": lambda size: "b IN (" * size + "b" + ")" * size,
    "nested lists": lambda size: "[" * size + "1" + "]" * size + " = n",
    "IS TRUE": lambda size: "b" + " IS TRUE" * size,
    "fields": lambda size: "n" + ".a" * size + " > 1",
    "items": lambda size: "n" + "[1]" * size + " > 1",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_is_too_long_is_refused_with_the_way_out(shape):
    with pytest.raises(PlanError) as caught:
        check_filter(SHAPES[shape](20_000), SCHEMA, "filter", "job.py:3")
    assert len(caught.value.message) < SHOWN_MAX + 200
    assert caught.value.where == "job.py:3"
    assert (
        any(word in caught.value.fix for word in ("IN (", "select steps", "lookup_join"))
        or "takes 1 to 250 arguments" in caught.value.message
    )


@pytest.mark.parametrize("size", [10, 20, 39, 100, 240, 300, 3_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_taken_is_also_computed(shape, size):
    """Nothing that passes headgate's limits ends in an error of Polars' reader."""
    message, condition = "", None
    try:
        condition = check_filter(SHAPES[shape](size), SCHEMA)
    except PlanError as error:
        message = error.message
    if condition is not None:
        assert FRAME.select(condition.expression).height == FRAME.height
    assert "as Expr" not in message
    assert not message or size > 20 or any(why in message for why in ("too large", "not fit"))


def test_long_conditions_mean_what_they_say():
    either = check_filter(SHAPES["or"](4_999), SCHEMA)
    both = check_filter(" AND ".join(f"n <> {i}" for i in range(25, 4_999)), SCHEMA)
    assert FRAME.select(either.expression.sum()).item() == 50
    assert FRAME.select(both.expression.sum()).item() == 25
    assert OPERATIONS_MAX >= 2 * 4_999


def test_lists_of_a_hundred_thousand_values():
    """A list costs one operation, however long it is."""
    many = check_filter(f"n IN ({', '.join(map(str, range(25, 100_025)))})", SCHEMA)
    none = check_filter(f"s NOT IN ({', '.join(repr(str(i)) for i in range(100_000))})", SCHEMA)
    assert FRAME.select(many.expression.sum()).item() == 25
    assert FRAME.select(none.expression.sum()).item() == 50
    assert read_sql(f"n IN ({', '.join(['1'] * 100_000)})").node.depth == 1


def test_a_text_beyond_all_measure_is_refused_unread():
    with pytest.raises(PlanError, match="characters"):
        check_filter("n IN (" + "1," * (TEXT_MAX // 2) + "1)", SCHEMA)


@pytest.mark.parametrize("depth", [6, 12, 18, 24])
def test_random_expressions_up_to_the_limits_are_read_by_polars(depth):
    """What the writer makes of any tree, Polars' own reader takes."""
    rng = random.Random(depth)
    for _ in range(40):
        text = _random(rng, depth)
        try:
            written = write_sql(read_sql(text).node, Types(SCHEMA))
        except SqlError as error:
            assert depth > 12 and "nested deeper" in error.message, text  # noqa: PT017, PT018
        else:
            pl.sql_expr(written)


def _random(rng, depth):
    if depth <= 0:
        return rng.choice(["n", "1", "m", "-3", "b", "s", "'x'", "NULL"])
    deep, flat = (lambda: _random(rng, depth - 1)), (lambda: _random(rng, rng.randrange(2)))
    shape = rng.choice(
        [
            "({d} + {f})", "({f} - {d} * {f})", "(NOT ({d} AND {f}))", "({f} OR {d} OR {f})", "ABS({d})",
            "COALESCE({f}, {d})", "CASE WHEN {f} THEN {d} ELSE {f} END", "({d} IS NULL)", "-({d})",
            "({d})::TEXT", "CAST({d} AS INT)", "({d} IN (1, 2))", "({d} BETWEEN {f} AND 3)",
            "({f} || {d})", "REPLACE({d}, 'a', {f})", "({d} LIKE 'a%')", "({f} = {d})", "TRIM({d})",
        ]
    )  # fmt: skip
    while "{" in shape:
        shape = shape.replace("{d}", deep(), 1).replace("{f}", flat(), 1)
        deep = flat
    return shape


def test_messages_and_explain_show_the_beginning_of_a_long_text():
    (column,) = check_select([f"n IN ({', '.join(['1'] * 5_000)}) AS x"], SCHEMA)
    assert column.name == "x"
    with pytest.raises(PlanError) as caught:
        check_filter(f"nn IN ({', '.join(['1'] * 5_000)})", SCHEMA)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("kind", ["0, 2", "0", "39", "39, 2", "2, 3", "10, 2, 1"])
@pytest.mark.parametrize("name", ["DECIMAL", "numeric"])
def test_a_decimal_that_cannot_be_is_refused(name: str, kind: str) -> None:
    with pytest.raises(PlanError, match="1 to 38 digits"):
        check_select([f"TRY_CAST(n AS {name}({kind})) AS x"], SCHEMA)


@pytest.mark.parametrize("kind", ["1", "38", "38, 38", "10, 0"])
def test_a_decimal_may_have_up_to_38_digits(kind: str) -> None:
    check_select([f"CAST(n AS DECIMAL({kind})) AS x"], SCHEMA)
