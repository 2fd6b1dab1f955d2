"""Aggregates over expressions: the same results as with a column that a select has made before."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import headgate as hg
from headgate.api.stream import output_of
from headgate.connectors import collect, from_list
from headgate.errors import DataError, ManifestErrors, PlanError
from headgate.operators.aggregation.aggregates import parse_aggregate
from headgate.runtime.manifest import load_job
from headgate.testing import harness

T0 = datetime(2026, 3, 1, tzinfo=UTC)
SCHEMA = {
    "k": "string",
    "amount": "int64",
    "price": "double",
    "text": "string",
    "at": "timestamp",
    "my column": "int64",
}
ROWS = [
    {
        "k": "ab"[n % 2],
        "amount": None if n % 7 == 0 else n,
        "price": n / 4,
        "text": str(n),
        "at": T0 + timedelta(seconds=n),
        "my column": n * 3,
    }
    for n in range(100)
]
MADE = (
    "*",
    "amount * 2 AS twice",
    "price * amount AS paid",
    "CASE WHEN amount > 3 THEN k END AS c",
)
OVER = {
    "total": (hg.sum("amount * 2"), hg.sum("twice")),
    "again": (hg.max("amount * 2"), hg.max("twice")),
    "values": (hg.count("amount * 2"), hg.count("twice")),
    "mean": (hg.avg("price * amount"), hg.avg("paid")),
    "some": (hg.count_distinct("CASE WHEN amount > 3 THEN k END"), hg.count_distinct("c")),
    "first": (hg.first("amount * 2"), hg.first("twice")),
    "dearest": (hg.max_by("text", "price * amount"), hg.max_by("text", "paid")),
    "best": (
        hg.top_n("amount * 2", 2, by="price * amount"),
        hg.top_n("twice", 2, by="paid"),
    ),
}
WINDOWS = {
    "running": None,
    "tumbling": hg.tumbling("20s"),
    "sliding": hg.sliding("20s", "5s"),
    "cumulative": hg.cumulative("20s", "5s"),
    "session": hg.session("30s"),
    "count": hg.count_window(10, 5),
    "global": hg.global_window(),
    "processing time": hg.tumbling("20s", time="processing"),
    "early": hg.tumbling("20s", emit_rows=7),
}


def read(job, name="rows"):
    return job.read(from_list([], schema=SCHEMA), name=name).event_time("at")


def results(kind, which, keyed=True):
    """The results of the window, with expressions (0) or columns that a select has made (1)."""
    job = hg.Job("expressions")
    rows = read(job)
    rows = rows.select(*MADE) if which else rows
    rows = rows.key_by("k") if keyed else rows
    window = WINDOWS[kind]
    grouped = rows if window is None else rows.window(window)
    made = grouped.agg(**{name: pair[which] for name, pair in OVER.items()}, name="totals")
    made.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        for start in range(0, len(ROWS), 30):
            h.push("rows", *ROWS[start : start + 30])
        if kind == "processing time":
            h.advance_time("60s")
        h.end()
        return made.schema, h.drain("out")


@pytest.mark.parametrize("kind", WINDOWS)
def test_results_are_those_of_a_column_made_before(kind):
    schema, found = results(kind, 0)
    assert (schema, found) == results(kind, 1)
    assert found
    assert set(schema.names) <= {"k", "window_start", "window_end", *OVER}


def test_results_of_windows_without_keys_too():
    assert results("sliding", 0, keyed=False) == results("sliding", 1, keyed=False)


def test_late_records_are_as_they_came():
    job = hg.Job("late")
    rows = read(job)
    hours = rows.key_by("k").window(hg.tumbling("1h"))
    made = hours.agg(total=hg.sum("amount * 2"), name="totals")
    made.write(collect(guarantee="none"), name="out")
    assert made.late.schema == rows.schema
    made.late.write(collect(guarantee="none"), name="late")
    with harness(job) as h:
        h.advance_watermark("rows", T0 + timedelta(hours=3))
        h.push("rows", ROWS[1])
        h.end()
        assert h.drain("late") == [ROWS[1]]


def test_only_the_columns_that_are_read_are_sent():
    job = hg.Job("pruned")
    made = read(job).key_by("k").agg(total=hg.sum("price * amount"), name="totals")
    assert output_of(made).node.columns_read == {"k", "price", "amount"}


def test_a_name_of_a_column_is_that_column():
    job = hg.Job("names")
    keyed = read(job).key_by("k")
    made = keyed.agg(
        a=hg.sum("my column"), b=hg.sum('"my column"'), c=hg.sum('"my column" * 2'), name="totals"
    )
    made.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("rows", ROWS[4])
        h.end()
        assert h.drain("out") == [{"k": "a", "a": 12, "b": 12, "c": 24}]


@pytest.mark.parametrize(
    ("aggregate", "said"),
    [
        (hg.sum("amuont * 2"), r"unknown column `amuont` in sum(.|\n)*did you mean `amount`"),
        (hg.sum("amuont"), r"unknown column `amuont` in sum(.|\n)*did you mean `amount`"),
        (hg.sum("my colunm"), r"unknown column `my colunm` in sum(.|\n)*did you mean `my column`"),
        (hg.max_by("k", "prise * 2"), r"unknown column `prise` in max_by(.|\n)*`price`"),
        (hg.sum("amount * "), r"cannot read the expression `amount \*` in sum: it ends too early"),
        (
            hg.sum("amount * 2 AS x"),
            r"in sum has a name(.|\n)*as in total=hg\.sum\(\"amount \* 2\"\)",
        ),
        (hg.sum("sum(amount)"), r"in sum looks at more than one record"),
        (hg.sum("now()"), r"`now` in sum would be fixed when the job is planned"),
        (hg.sum("text || 'x'"), "cannot take the sum"),
        (hg.sum("text > 3"), r"`text > 3` in sum does not fit the stream"),
        (hg.sum("(" * 41 + "amount" + ")" * 41), "in sum: it is nested deeper than 40 levels"),
        (hg.count("amount > 3"), r"`amount > 3` in count is a condition(.|\n)*CASE WHEN"),
        (hg.sum(pl.col("amount") * 2), r"sum takes the name of a column or SQL text, got `Expr`"),
        (hg.sum(3), "sum takes the name of a column or SQL text, got `int`"),
    ],
)
def test_mistakes_are_found_when_the_line_is_executed(aggregate, said):
    keyed = read(hg.Job("mistakes")).key_by("k")
    for grouped in (keyed, keyed.window(hg.sliding("1m", "1s")), keyed.window(hg.session("1m"))):
        with pytest.raises(PlanError, match=said) as error:
            grouped.agg(total=aggregate, name="totals")
        assert "test_expressions.py" in error.value.where


def test_a_value_without_a_result_fails_the_job_and_names_the_expression():
    job = hg.Job("cast")
    keyed = read(job).key_by("k")
    keyed.agg(total=hg.sum("CAST(text AS BIGINT)"), name="totals").write(
        collect(guarantee="none"), name="out"
    )
    said = r"`CAST\(text AS BIGINT\)` in an aggregate fails for a record"
    with pytest.raises(DataError, match=said) as error:
        push_one(job, {**ROWS[1], "text": "x"})
    assert "test_expressions.py" in error.value.where


def push_one(job, record):
    with harness(job) as h:
        h.push("rows", record)
        h.end()


def test_explain_shows_the_expression():
    job = hg.Job("explained")
    made = read(job).key_by("k").agg(total=hg.sum("amount*2"), name="totals")
    made.write(collect(guarantee="none"), name="out")
    assert 'total=sum("amount*2")' in str(job.explain())


@pytest.mark.parametrize(
    ("text", "aggregate"),
    [
        ("sum(amount * 2)", hg.sum("amount * 2")),
        ("sum( (a + b) * round(c, 2) )", hg.sum("(a + b) * round(c, 2)")),
        ("quantile(a / b, 0.9)", hg.quantile("a / b", 0.9)),
        ("quantile(greatest(a, 2), 0.9)", hg.quantile("greatest(a, 2)", 0.9)),
        ("max_by(item, by=price * n)", hg.max_by("item", "price * n")),
        ("top_n(a + 1, 3, by=concat(b, ', by='))", hg.top_n("a + 1", 3, by="concat(b, ', by=')")),
        ('sum("my column" * 2)', hg.sum('"my column" * 2')),
        ("count_distinct(name = 'a) b, (')", hg.count_distinct("name = 'a) b, ('")),
        ("sum(tags[1])", hg.sum("tags[1]")),
    ],
)
def test_texts_of_manifests(text, aggregate):
    assert parse_aggregate(text) == aggregate


@pytest.mark.parametrize(
    "text",
    ["sum(a, b)", "sum(a * 2", "sum(a) * 2", "sum(a, 2, 3)", "sum(a)) + (b)", "sum(a,)", "sum(,a)"],
)
def test_texts_that_are_no_aggregates(text):
    with pytest.raises(PlanError):
        parse_aggregate(text)


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: expressions}
spec:
  sources:
    rows:
      json: {path: in/*.json}
      schema: {k: string, amount: long, price: double}
  operators:
    totals:
      from: rows
      keyBy: k
      aggregate:
        total: AGGREGATE
        best: "top_n(amount * 2, 3, by=price * amount)"
  sinks:
    out: {from: totals, json: {path: out}, guarantee: none}
"""


def test_a_manifest_has_them(tmp_path):
    (tmp_path / "job.yaml").write_text(MANIFEST.replace("AGGREGATE", "sum(amount * 2)"))
    explained = str(load_job(tmp_path / "job.yaml").explain())
    assert 'total=sum("amount * 2")' in explained


def test_a_mistake_in_a_manifest_names_the_line(tmp_path):
    (tmp_path / "job.yaml").write_text(MANIFEST.replace("AGGREGATE", "sum(amuont * 2)"))
    with pytest.raises(ManifestErrors, match=r"(?s)unknown column `amuont`.*yaml:15.*`amount`"):
        load_job(tmp_path / "job.yaml")
