"""Expressions that Arrow computes have the results of Polars; the others are left to it."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from polars.testing import assert_series_equal

from headgate.errors import PlanError
from headgate.operators.elements import ColumnBatch
from headgate.operators.expressions.arrow_expressions import arrow_condition, arrow_number
from headgate.operators.expressions.expression_steps import ExpressionSteps, FilterStep, SelectStep
from headgate.operators.expressions.expressions import check_filter, check_select, result_type, show

INTEGERS = {
    "tiny": pa.int8(),
    "short": pa.int16(),
    "small": pa.int32(),
    "large": pa.int64(),
    "byte": pa.uint8(),
    "word": pa.uint32(),
}
SCHEMA = pa.schema(
    [
        *INTEGERS.items(),
        ("flag", pa.bool_()),
        ("s", pa.string()),
        ("f", pa.float64()),
        ("g", pa.float64()),
        ("giant", pa.uint64()),
        ("at", pa.timestamp("ms")),
        ("a b", pa.int64()),
    ]
)


def limits(type_: pa.DataType) -> np.iinfo:
    return np.iinfo(type_.to_pandas_dtype())


def integers(type_: pa.DataType) -> st.SearchStrategy[int | None]:
    low, high = limits(type_).min, limits(type_).max
    near = st.sampled_from([n for n in (low, low + 1, -1, 0, 1, 2, high) if low <= n])
    return st.none() | near | st.integers(low, high)


numbers = st.sampled_from([*INTEGERS, '"a b"'])
literals = st.sampled_from(
    [-(10**18) + 1, -129, -128, -1, 0, 1, 2, 127, 128, 255, 256, 2**31, 2**32]
)
literals |= st.integers(-300, 300)
remainders = st.tuples(st.sampled_from(["large", '"a b"']), st.integers(1, 2**31 - 1)).map(
    lambda pair: f"{pair[0]} % {pair[1]}"
)
operators = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])
floats = st.sampled_from(["f", "g"])
decimals = st.sampled_from(["0.0", "-0.5", "1.5", "0.908", "123456789.125"])
some_literals = st.lists(literals, min_size=1, max_size=3).map(
    lambda found: f"({', '.join(map(str, found))})"
)
some_texts = st.lists(st.sampled_from(["''", "'a'", "'a  b'"]), min_size=1).map(
    lambda found: f"({', '.join(found)})"
)
computed = st.recursive(
    st.sampled_from(["large", '"a b"', "f", "g"]) | literals.map(str) | decimals,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
        lambda parts: f"({' '.join(parts)})"
    ),
    max_leaves=5,
)
comparisons = st.one_of(
    st.tuples(floats, operators, decimals),
    st.tuples(decimals, operators, floats),
    st.tuples(floats, operators, literals),
    st.tuples(st.just("(large * 3 + 1)"), operators, literals),
    st.tuples(st.just("(f * 1.5 - large)"), operators, literals | decimals),
    st.tuples(
        numbers | floats,
        st.sampled_from(["BETWEEN", "NOT BETWEEN"]),
        literals,
        st.just("AND"),
        literals,
    ),
    st.tuples(numbers, st.sampled_from(["IN", "NOT IN"]), some_literals),
    st.tuples(st.just("s"), st.sampled_from(["IN", "NOT IN"]), some_texts),
    st.tuples(numbers | remainders, operators, literals),
    st.tuples(literals, operators, numbers),
    st.tuples(numbers, operators, numbers | remainders),
    st.tuples(st.just("s"), st.sampled_from(["=", "<>"]), st.sampled_from(["''", "'a'", "'a  b'"])),
    st.tuples(
        numbers | floats | st.sampled_from(["s", "flag"]),
        st.sampled_from(["IS NULL", "IS NOT NULL"]),
    ),
    st.just(("flag",)),
).map(lambda parts: " ".join(map(str, parts)))
conditions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["AND", "OR"]), inner).map(lambda p: f"({' '.join(p)})"),
        inner.map(lambda text: f"NOT ({text})"),
    ),
    max_leaves=6,
)
some_floats = st.none() | st.floats() | st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf])
records = st.fixed_dictionaries(
    {"f": some_floats, "g": some_floats}
    | {name: integers(type_) for name, type_ in INTEGERS.items()}
    | {"a b": integers(pa.int64()), "flag": st.sampled_from([None, True, False])}
    | {"s": st.sampled_from([None, "", "a", "a b", "a  b"])}
)


@settings(max_examples=150, deadline=None)
@given(conditions, st.lists(records, max_size=12), st.integers(0, 2))
@example("large % 7 = 3", [{"large": n} for n in (-4, 3, None, -(2**63), 2**63 - 1)], 0)
@example("s = 'a  b'", [{"s": "a b"}, {"s": "a  b"}], 0)
def test_the_same_as_polars(text, rows, offset):
    data = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).slice(min(offset, len(rows)))
    checked = check_filter(text, SCHEMA)
    condition = arrow_condition(checked.tree, SCHEMA)
    found = condition(dict(zip(SCHEMA.names, data.columns, strict=True)))
    expected = pl.from_arrow(data).select(checked.expression.alias("mask")).to_series()
    assert found.to_pylist() == expected.to_list()
    kept = ExpressionSteps([FilterStep(checked, show(text))], SCHEMA).apply(ColumnBatch(data))
    assert (0 if kept is None else len(kept)) == expected.sum()


@settings(max_examples=150, deadline=None)
@given(computed, st.lists(records, max_size=12), st.integers(0, 2))
@example("large * large", [{"large": 2**62}, {"large": None}, {"large": 3}], 0)
@example("large * f", [{"large": 2**53 + 1, "f": 1.0}, {"large": None}], 0)
def test_numbers_are_the_same_as_those_of_polars(text, rows, offset):
    data = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).slice(min(offset, len(rows)))
    try:
        (column,) = check_select([f"{text} AS x"], SCHEMA)
    except PlanError:
        reject()  # decimal literals whose product is too large
    type_ = result_type(column, SCHEMA)
    number = None if column.tree is None else arrow_number(column.tree, SCHEMA, type_)
    if number is None:
        return  # literals with each other, an integer with 0.5, or nothing to compute
    expected = pl.from_arrow(data).select(column.expression).to_series()
    found = pl.Series("x", number(dict(zip(SCHEMA.names, data.columns, strict=True))))
    assert_series_equal(found, expected, check_exact=True)
    if len(data):
        step = SelectStep((column,), text)
        made = ExpressionSteps([step], SCHEMA).apply(ColumnBatch(data))
        assert_series_equal(pl.Series("x", made.data.column(0)), expected, check_exact=True)


@pytest.mark.parametrize("text", ["large + 1", "f * 0.908", "(f - g) * large", "large % 7 + 1"])
def test_plain_numbers_need_no_plan(text):
    (column,) = check_select([f"{text} AS x"], SCHEMA)
    assert arrow_number(column.tree, SCHEMA, result_type(column, SCHEMA)) is not None


@pytest.mark.parametrize(
    "text",
    [
        "small + 1",
        "giant + 1",
        "large * 0.908",
        "large / 2",
        "f / 2",
        "-large",
        "f % 2",
        "ABS(large)",
    ],
)
def test_other_numbers_are_left_to_polars(text):
    (column,) = check_select([f"{text} AS x"], SCHEMA)
    assert arrow_number(column.tree, SCHEMA, result_type(column, SCHEMA)) is None


@pytest.mark.parametrize(
    "text",
    [
        "f > g",
        "large > 1.5",
        "f = large",
        "f * 2.0 > g",
        "giant > 1",
        "small % 3 = 0",
        "large % -3 = 0",
        "large % 0 = 0",
        "large > 1 AND f > g",
        "NOT f > g",
        "(large > 1) IS NULL",
        "flag IS NOT TRUE",
        "s < 'a'",
        "s = 'it''s'",
        "large = 12345678901234567890",
        "large BETWEEN small AND 2",
        "large IN (1, small)",
        "large IN (1, NULL)",
        "f IN (1, 2)",
        "f > 1e3",
    ],
)
def test_what_might_differ_is_left_to_polars(text):
    assert arrow_condition(check_filter(text, SCHEMA).tree, SCHEMA) is None


def test_polars_expressions_are_left_to_polars():
    assert check_filter(pl.col("large") > 1, SCHEMA).tree is None
