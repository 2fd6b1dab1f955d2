"""Expressions: read once, typed, and only those that speak of one record."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import DataError, PlanError
from headgate.operators.expressions.expressions import (
    check_filter,
    check_select,
    columns_used,
    result_type,
)
from headgate.operators.expressions.row_probe import across_rows

SCHEMA = pa.schema(
    {
        "url": pa.string(),
        "amount": pa.float64(),
        "n": pa.int64(),
        "ts": pa.timestamp("ms", tz="UTC"),
        "day": pa.date32(),
        "tags": pa.list_(pa.int64()),
        "ok": pa.bool_(),
        "price": pa.decimal128(10, 2),
    }
)
ONE_RECORD = [
    "amount > 3",
    "amount / 1.19",
    "n * 2 + 1",
    "lower(url)",
    "coalesce(amount, 0)",
    "CASE WHEN n > 3 THEN 'x' ELSE url END",
    "url LIKE 'a%' OR url IS NULL",
    "CAST(url AS BIGINT)",
    "CAST(url AS DATE)",
    "n % 3 = 0",
    "url || 'x'",
    "n IN (1, 2, 3) AND n BETWEEN 1 AND 4",
    "round(amount, 1)",
    "EXTRACT(hour FROM ts)",
    "'text'",
    "price * 2",
    pl.col("tags").list.sum(),
    pl.col("tags").list.eval(pl.element().sum()),
    pl.col("ts").dt.truncate("1h"),
    pl.max_horizontal("amount", "n"),
    pl.col("url").str.json_decode(pl.Struct({"a": pl.Int64})),
    pl.when(pl.col("ok")).then(1).otherwise(2),
    pl.struct("amount", "n"),
]
SEVERAL_RECORDS = [
    "sum(amount) > 3",
    "max(n)",
    "count(*)",
    "row_number() OVER (ORDER BY amount)",
    "amount > avg(amount) OVER (PARTITION BY url)",
    "lag(amount) OVER (ORDER BY n)",
    pl.len(),
    pl.int_range(pl.len()),
    pl.col("amount").shift(1),
    pl.col("amount").rank(),
    pl.col("amount").cum_sum(),
    pl.col("amount").diff(),
    pl.col("amount").sort(),
    pl.col("amount").reverse(),
    pl.col("amount").fill_null(strategy="forward"),
    pl.col("amount").interpolate(),
    pl.col("amount").rolling_mean(2),
    pl.col("amount").ewm_mean(alpha=0.5),
    pl.col("amount").drop_nulls(),
    pl.col("amount").head(3),
    pl.col("amount").filter(pl.col("n") > 3),
    pl.col("amount") - pl.col("amount").mean(),
    pl.col("n").is_duplicated(),
    pl.col("n").is_first_distinct(),
    pl.col("n").rle_id(),
    pl.col("tags").explode(),
    pl.col("url").str.to_integer().sum() > 3,
    pl.col("url").str.join(""),
    pl.col("n").slice(0, pl.len() // 2 * 2),  # all of twelve rows, none of one
]


def as_expression(given):
    return pl.sql_expr(given) if isinstance(given, str) else given


@pytest.mark.parametrize("given", ONE_RECORD, ids=str)
def test_expressions_of_one_record_are_taken(given):
    assert across_rows(as_expression(given), SCHEMA) == ""


@pytest.mark.parametrize("given", SEVERAL_RECORDS, ids=str)
def test_expressions_of_several_records_are_refused(given):
    assert across_rows(as_expression(given), SCHEMA)


def test_the_refusal_says_why_and_what_to_do():
    with pytest.raises(PlanError) as caught:
        check_filter("sum(n) > 3", SCHEMA, "filter", "job.py:7  s.filter(...)")
    assert str(caught.value) == (
        "`sum(n) > 3` in filter looks at more than one record: it aggregates\n"
        "  at job.py:7  s.filter(...)\n"
        "  batches are cut by chance; to combine records use key_by(...).window(...).agg(...)"
    )


@pytest.mark.parametrize("given", ["amout > 3", pl.col("amout") > 3])
def test_an_unknown_column_is_answered_with_a_near_one(given):
    with pytest.raises(PlanError) as caught:
        check_filter(given, SCHEMA, "filter", "job.py:7")
    assert str(caught.value) == (
        "unknown column `amout` in filter\n"
        "  at job.py:7\n"
        "  did you mean `amount`? columns: url, amount, n, ts, day, tags, ok, price"
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("n +", "cannot read the expression `n +` in filter"),
        ("n", "`n` in filter is not a condition: its type is Int64"),
        ("url > 3", "`url > 3` in filter does not fit the stream: cannot compare string"),
        ("ts > now()", "`now` in filter would be fixed when the job is planned"),
        ("day = CURRENT_DATE", "`CURRENT_DATE` in filter would be fixed"),
        (3, "not an expression in filter type=`int`"),
        (pl.col("n", "amount") > 3, "is not a condition"),
    ],
)
def test_conditions_that_cannot_be(given, text):
    with pytest.raises(PlanError) as caught:
        check_filter(given, SCHEMA)
    assert text in caught.value.message


WRONG_BRANCHES = [
    "CASE WHEN n > 1 THEN CASE WHEN n THEN 1 ELSE 2 END END",
    "CASE WHEN ok THEN url WHEN NOT ok THEN CAST(ok IN (3, ts) AS VARCHAR) END",
    "STRPOS(url, n) = 1",
    "NOT CASE WHEN ok THEN TRUE WHEN NOT ok THEN url > 3 ELSE FALSE END",
    pl.when(pl.col("n") > 1).then(pl.when(pl.col("n")).then(1).otherwise(2)).otherwise(3),
    pl.when("ok").then(pl.col("url").str.split(pl.col("n")).list.len()).otherwise(3),
]


@pytest.mark.parametrize("given", WRONG_BRANCHES, ids=str)
def test_a_branch_of_wrong_types_is_refused_at_plan_time_whether_or_not_a_row_takes_it(given):
    with pytest.raises(PlanError, match="does not fit the stream"):
        check_select([f"{given} AS x" if isinstance(given, str) else given.alias("x")], SCHEMA)


def test_a_type_that_streams_do_not_have_is_refused_at_plan_time():
    schema = pa.schema([("u", pa.uint64()), ("i", pa.int64())])
    with pytest.raises(PlanError, match="`u \\+ i AS x` in select has the type Int128") as caught:
        check_select(["u + i AS x"], schema)
    assert "CAST" in str(caught.value)
    (column,) = check_select(["CAST(u AS BIGINT) + i AS x"], schema)
    assert result_type(column, schema) == pa.int64()


@pytest.mark.parametrize(
    "given",
    [
        pl.col("tags").list.eval(pl.when(pl.element() > 1).then(pl.element()).otherwise(0)),
        pl.struct("n").struct.with_fields(pl.when(pl.field("n") > 1).then(pl.field("n"))),
        pl.when(pl.col("n") > 1).then(pl.lit("element()")).otherwise(pl.col("url")),
        " ".join(["CASE", *(f"WHEN n = {number} THEN {number}" for number in range(200)), "END"]),
    ],
    ids=["list", "struct", "text", "long"],
)
def test_branches_of_right_types_are_taken(given):
    check_select([f"{given} AS x" if isinstance(given, str) else given.alias("x")], SCHEMA)


def test_the_clock_inside_of_a_text_is_only_text():
    assert check_filter("url = 'now()'", SCHEMA).reads == {"url"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["n * 2"], r"`n \* 2` in select has no name"),
        (["n", "amount AS n"], "column `n` is made twice in select"),
        ([], "select needs at least one column"),
        (["nn"], "unknown column `nn` in select"),
        ([pl.all() + 1], "looks at more than one record|makes 8 columns|does not fit"),
    ],
)
def test_selects_that_cannot_be(given, text):
    with pytest.raises(PlanError, match=text):
        check_select(given, SCHEMA)


def test_columns_as_they_stand_are_known_as_such():
    columns = check_select(
        ["url", "n AS m", pl.col("ts"), "n * 2 AS k", pl.col("ok", "day")], SCHEMA
    )
    assert [(column.name, column.source) for column in columns] == [
        ("url", "url"), ("m", "n"), ("ts", "ts"), ("k", None), ("ok", "ok"), ("day", "day")
    ]  # fmt: skip
    assert [column.name for column in check_select(["*"], SCHEMA)] == SCHEMA.names


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("n * 2 AS x", pa.int64()),
        ("n / 2 AS x", pa.float64()),
        ("lower(url) AS x", pa.string()),
        ("n > 2 AS x", pa.bool_()),
        ("url AS x", pa.string()),
        ("price AS x", pa.decimal128(10, 2)),
    ],
)
def test_types_are_known_before_any_record(given, kind):
    (column,) = check_select([given], SCHEMA)
    assert result_type(column, SCHEMA) == kind


def test_columns_used():
    assert columns_used(pl.sql_expr("n + amount > 2"), SCHEMA) == {"n", "amount"}
    assert columns_used(pl.lit(1), SCHEMA) == set()
    assert columns_used(pl.all(), SCHEMA) == set(SCHEMA.names)


@pytest.mark.parametrize("chained", [True, False])
def test_a_cast_that_fails_names_its_step_and_not_the_source(chained):
    job = hg.Job("casts")
    job.options["pipeline.operator-chaining.enabled"] = str(chained).lower()
    texts = job.read(from_list([{"a": "1"}, {"a": "x"}], schema={"a": "string"}), name="texts")
    texts.filter("a <> 'y'").select("CAST(a AS BIGINT) AS n", name="numbers").write(
        collect(guarantee="none"), name="out"
    )
    with pytest.raises(DataError) as caught:
        job.run()  # and it is not tried again: the second time would be like the first
    assert "`CAST(a AS BIGINT) AS n` in select fails for a record" in str(caught.value)
    assert '["x"]' in str(caught.value)
    assert "TRY_CAST" in str(caught.value)
    assert "texts" not in caught.value.message
