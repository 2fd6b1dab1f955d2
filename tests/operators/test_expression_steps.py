"""Filters and selects as one pass: the same answers as record by record, event times included."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from headgate.errors import InternalError
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.expressions.expression_steps import (
    ExpressionOperator,
    ExpressionSteps,
    FilterStep,
    SelectStep,
    columns_read,
)
from headgate.operators.expressions.expressions import check_filter, check_select, show

SCHEMA = pa.schema(
    {
        "s": pa.string(),
        "f": pa.float64(),
        "n": pa.int64(),
        "u": pa.uint8(),
        "ts": pa.timestamp("s", tz="UTC"),
    }
)


def batch(count=40):
    texts = ["a", "b", None, "", "A"]
    floats = [1.5, float("nan"), None, -2.0, 0.0, float("inf"), 7.25]
    data = pa.RecordBatch.from_arrays(
        [
            pa.array([texts[i % 5] for i in range(count)]),
            pa.array([floats[i % 7] for i in range(count)]),
            pa.array([None if i % 11 == 3 else i - 9 for i in range(count)], pa.int64()),
            pa.array([i % 250 for i in range(count)], pa.uint8()),
            pa.array([i * 60 for i in range(count)], pa.timestamp("s", tz="UTC")),
        ],
        schema=SCHEMA,
    )
    return ColumnBatch(data, np.arange(count) * 10)


def steps(*described, schema=SCHEMA):
    made = []
    for one in described:
        now = ExpressionSteps(made, schema).output_schema
        if isinstance(one, list):
            made.append(SelectStep(tuple(check_select(one, now)), ", ".join(map(show, one))))
        else:
            made.append(FilterStep(check_filter(one, now), show(one)))
    return ExpressionSteps(made, schema)


def by_polars(given, described):
    """The same, the slow and obvious way: one column more for the event time."""
    frame = pl.from_arrow(given.data).with_columns(pl.Series("time", given.timestamps))
    for one in described:
        if isinstance(one, list):
            expressions = [pl.sql_expr(each) for each in one]
            frame = frame.select(*expressions, "time")
        else:
            frame = frame.filter(pl.sql_expr(one))
    return frame


PROGRAMS = [
    ["n > 3"],
    ["s = 'a'"],
    ["s <> 'a'"],
    ["f > 1"],
    ["f > 1 AND n < 20"],
    ["u >= 7"],
    ["n > 1000"],
    ["n < 1000 OR n IS NULL"],
    ["s = 'it''s'"],
    [["n", "s"]],
    [["n * 2 AS m", "s"]],
    ["n > 3", ["n * 2 AS m", "f / 1.19 AS g", "ts"]],
    [["n + 1 AS n", "n AS old"], "n > 3", ["n * old AS p"], "p < 100"],
    ["n > 0", "n > 5", ["upper(s) AS s", "1 AS one", "'x' AS x", "n"], "s = 'A'"],
    [["1 AS one"]],
    ["1 = 1", ["n"]],
]


@pytest.mark.parametrize("described", PROGRAMS, ids=str)
def test_the_same_as_polars_step_by_step(described):
    given = batch()
    result = pickle.loads(pickle.dumps(steps(*described))).apply(given)
    expected = by_polars(given, described)
    if result is None:
        assert expected.height == 0
        return
    assert result.data.schema.names == expected.columns[:-1]
    assert pl.from_arrow(result.data).equals(expected.drop("time"))
    assert result.timestamps.tolist() == expected["time"].to_list()


@pytest.mark.parametrize("described", PROGRAMS, ids=str)
def test_the_schema_is_what_was_promised(described):
    program = steps(*described)
    result = program.apply(batch())
    if result is not None:
        assert result.data.schema.names == program.output_schema.names
        assert result.data.schema.types == program.output_schema.types


@pytest.mark.parametrize("described", [p for p in PROGRAMS if "/" not in str(p)], ids=str)
def test_how_a_batch_is_cut_does_not_matter(described):
    program, given = steps(*described), batch()
    parts = [program.apply(given.slice(at, 1)) for at in range(len(given))]
    kept = [part.data for part in parts if part is not None]
    whole = program.apply(given)
    if whole is None:
        assert kept == []
    else:
        assert pl.from_arrow(kept).equals(pl.from_arrow(whole.data))


def test_comparisons_mean_the_same_in_arrow_and_polars():
    """Simple comparisons bypass Polars; every operator, with nulls, on every type it is done for."""
    given = batch()
    sides = [
        ("n", "3"),
        ("n", "-2"),
        ("u", "7"),
        ("u", "300"),
        ("u", "-1"),
        ("s", "'a'"),
        ("s", "''"),
    ]
    for (column, literal), sign in product(sides, ["=", "<>", "!=", "<", "<=", ">", ">="]):
        text = f"{column} {sign} {literal}"
        expected = pl.from_arrow(given.data).filter(pl.sql_expr(text))
        result = steps(text).apply(given)
        assert (0 if result is None else len(result)) == expected.height, text


def test_a_filter_of_all_records_copies_nothing():
    given = batch()
    assert steps("u >= 0").apply(given).data.column("s") is given.data.column("s") or (
        steps("u >= 0").apply(given).data.column("s").buffers()[2].address
        == given.data.column("s").buffers()[2].address
    )


def test_without_event_time_there_is_none_after():
    result = steps("n > 3").apply(ColumnBatch(batch().data))
    assert result.timestamps is None


def test_columns_that_pass_through_need_not_be_there_at_plan_time():
    """Behind pruning a filter meets fewer columns than it was planned with."""
    given = ColumnBatch(batch().data.select(["n", "s"]), batch().timestamps)
    result = steps("n > 3").apply(given)
    assert result.data.schema.names == ["n", "s"]


def test_columns_read():
    assert columns_read(steps("n > 3").steps) == ({"n"}, True)
    assert columns_read(steps("n > 3", ["s", "f * 2 AS g"], "g > 1").steps) == (
        {"n", "s", "f"},
        False,
    )


def test_the_operator_is_silent_when_nothing_is_left(harness):
    run = harness(ExpressionOperator(steps("n > 1000")))
    run.push(batch()).push(batch().slice(0, 0))
    assert run.output.events == []
    run = harness(ExpressionOperator(steps("n > 3")))
    assert len(run.push(batch()).times) == len(run.records) > 0


def test_objects_in_a_stream_of_columns_are_our_mistake(harness):
    with pytest.raises(InternalError):
        harness(ExpressionOperator(steps("n > 3"))).push(ObjectBatch([1]))
