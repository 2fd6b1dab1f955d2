"""Conditions that Arrow computes have the results of Polars; the others are left to it."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate.operators.elements import ColumnBatch
from headgate.operators.expressions.arrow_filter import arrow_condition
from headgate.operators.expressions.expression_steps import ExpressionSteps, FilterStep
from headgate.operators.expressions.expressions import check_filter, show

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
comparisons = st.one_of(
    st.tuples(numbers | remainders, operators, literals),
    st.tuples(literals, operators, numbers),
    st.tuples(numbers, operators, numbers | remainders),
    st.tuples(st.just("s"), st.sampled_from(["=", "<>"]), st.sampled_from(["''", "'a'", "'a  b'"])),
    st.tuples(
        numbers | st.sampled_from(["s", "flag"]), st.sampled_from(["IS NULL", "IS NOT NULL"])
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
records = st.fixed_dictionaries(
    {name: integers(type_) for name, type_ in INTEGERS.items()}
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


@pytest.mark.parametrize(
    "text",
    [
        "f > 1",
        "giant > 1",
        "large > 1.5",
        "large + 1 > 2",
        "small % 3 = 0",
        "large % -3 = 0",
        "large % 0 = 0",
        "large > 1 AND f > 1",
        "NOT f > 1",
        "f IS NULL",
        "(large > 1) IS NULL",
        "flag IS NOT TRUE",
        "s < 'a'",
        "s = 'it''s'",
        "large BETWEEN 1 AND 2",
        "large = 12345678901234567890",
    ],
)
def test_what_might_differ_is_left_to_polars(text):
    assert arrow_condition(check_filter(text, SCHEMA).tree, SCHEMA) is None


def test_polars_expressions_are_left_to_polars():
    assert check_filter(pl.col("large") > 1, SCHEMA).tree is None
