"""SQL text may hold operations on the columns of one record. Nothing else reaches Polars."""

from __future__ import annotations

import ast
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import HeadgateError, PlanError
from headgate.operators.expressions.expressions import check_filter, check_select
from headgate.runtime.manifest import load_job

SCHEMA = pa.schema(
    {"n": pa.int64(), "s": pa.string(), "user": pa.string(), "left": pa.int64(), "f": pa.float64()}
)
ROOMS = Path(hg.__file__).parent
READS_A_FILE = [
    "n IN (SELECT n FROM read_csv('{file}'))",
    "n IN ((SELECT n FROM read_csv('{file}')))",
    "n = ANY(SELECT n FROM read_csv('{file}'))",
    "n = (SELECT n FROM read_csv('{file}'))",
    "(SELECT max(n) FROM read_parquet('{file}')) > n",
    "EXISTS (SELECT 1 FROM read_json('{file}'))",
    "NOT EXISTS(SELECT 1 FROM read_ipc('{file}'))",
    "CASE WHEN n IN (SELECT n FROM read_csv('{file}')) THEN true ELSE false END",
    "COALESCE((SELECT n FROM read_csv('{file}')), 1) > 0",
    "n IN (WITH x AS (SELECT n FROM read_csv('{file}')) SELECT n FROM x)",
    "n IN (TABLE read_csv)",
    "n IN (VALUES (1))",
    "n IN (FROM read_csv('{file}'))",
    "read_csv('{file}') > n",
    "read_parquet('{file}') IS NULL",
    "read_blob('{file}') = s",
    "s = glob('{file}')",
    "scan_csv('{file}') = s",
    "pg_read_file('{file}') = s",
    "n > 1; SELECT * FROM read_csv('{file}')",
    "n > 1 UNION SELECT n FROM read_csv('{file}')",
    "n > 1 FROM read_csv('{file}')",
    "n > ALL (SELECT n FROM read_csv('{file}'))",
    "n /* '*/ IN (SELECT n FROM read_csv('{file}')) /*' */",
    "s = '\\' OR n IN (SELECT n FROM read_csv('{file}')) --'",
]


@pytest.fixture
def reached(monkeypatch, tmp_path):
    """The texts that reached Polars, and a file that is there to be read."""
    texts = []
    real = pl.sql_expr
    monkeypatch.setattr(pl, "sql_expr", lambda text: texts.append(text) or real(text))
    (tmp_path / "secret.csv").write_text("n\n1\n2\n")
    return texts, str(tmp_path / "secret.csv")


@pytest.mark.parametrize("text", READS_A_FILE)
def test_queries_and_functions_of_files_are_refused_before_polars_sees_them(text, reached):
    texts, file = reached
    for check in (lambda t: check_filter(t, SCHEMA), lambda t: check_select([f"{t} AS x"], SCHEMA)):
        with pytest.raises(PlanError, match="cannot read the expression"):
            check(text.format(file=file))
    assert texts == []


def test_a_query_is_answered_with_a_join():
    with pytest.raises(PlanError) as caught:
        check_filter("n IN (SELECT n FROM t)", SCHEMA, "filter", "job.py:3")
    assert str(caught.value) == (
        "cannot read the expression `n IN (SELECT n FROM t)` in filter: "
        "a query (`SELECT`) cannot stand in an expression\n"
        "  at job.py:3\n"
        "  an expression has the columns of one record only; to use another table join with it"
    )


def _stream():
    job = hg.Job("j")
    rows = from_list([{"n": 1, "at": 1}], schema={"n": "int64", "at": "int64"})
    return job.read(rows, name="r").event_time("at", max_out_of_order="1s")


PLACES = {
    "filter": lambda text: _stream().filter(text),
    "select": lambda text: _stream().select("n", f"{text} AS x"),
    "session": lambda text: _stream().key_by("n").window(hg.session(text)).agg(c=hg.count(), name="w"),
    "pattern": lambda text: _stream().key_by("n").match(
        hg.cep.begin("a").where(text), name="m"
    ),
    "aggregate": lambda text: _stream().key_by("n").agg(c=hg.sum(text), name="a"),
    "iterate_rounds": lambda text: _stream().iterate_rounds(
        lambda rows: (rows, rows), max_rounds=2, while_any=text, name="i"
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_no_place_of_the_python_api_reads_a_file(place, reached):
    texts, file = reached
    with pytest.raises(HeadgateError) as caught:  # noqa: PT012
        stream = PLACES[place](f"n IN (SELECT n FROM read_csv('{file}'))")
        stream.write(collect(guarantee="none"), name="out")
    assert "SELECT" in str(caught.value)
    assert [text for text in texts if "read_csv" in text] == []


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: j}
spec:
  sources:
    r:
      generator: {fields: {n: {kind: sequence}, at: {kind: timestamp, every: 1s}}, rows: 1}
      eventTime: {column: at, maxOutOfOrder: 1s}
  operators:
    op: {from: r, STEP}
  sinks:
    out: {from: op, blackhole: {}}
"""
STEPS = {
    "filter": "filter: TEXT",
    "select": 'select: ["n", TEXT]',
    "session": "keyBy: n, window: {session: TEXT}, aggregate: {c: count()}",
    "aggregate": "keyBy: n, aggregate: {c: TEXT}",
}


@pytest.mark.parametrize("step", STEPS)
def test_no_field_of_a_manifest_reads_a_file(step, reached):
    texts, file = reached
    text = f"n IN (SELECT n FROM read_csv('{file}'))"
    text = {"select": f"{text} AS x", "aggregate": f"sum({text})"}.get(step, text)
    manifest = MANIFEST.replace("STEP", STEPS[step].replace("TEXT", f'"{text}"'))
    with pytest.raises(HeadgateError) as caught:
        load_job(manifest, env={}).validate()
    assert "SELECT" in str(caught.value)
    assert [text for text in texts if "read_csv" in text] == []


def test_only_the_writer_speaks_to_polars_sql():
    """No other file of headgate hands text to Polars' reader of SQL."""
    found = {}
    for room in ("operators", "connectors", "runtime", "state", "testing", "spark"):
        for path in (ROOMS / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in (
                    "sql_expr", "SQLContext", "sql", "read_csv", "scan_csv"
                ):  # fmt: skip
                    value = node.value
                    if isinstance(value, ast.Name) and value.id in ("pl", "polars"):
                        found.setdefault(str(path.relative_to(ROOMS)), set()).add(node.attr)
    assert found == {
        "operators/expressions/expressions.py": {"sql_expr"},
        "operators/expressions/sql/types.py": {"sql_expr"},
    }


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("uper(s) = 'A'", "unknown function `uper`", "did you mean UPPER?"),
        ("lower(s, s) = 'A'", "LOWER takes 1 arguments, not 2", ""),
        ("0 < n < 3", "comparisons cannot be chained", "a < b AND b < c"),
        ("n >", "it ends too early", ""),
        ("(n > 3", "it ends too early: `)` is missing", ""),
        ("n > 3)", "unexpected `)`", ""),
        ("n ISNULL", "unexpected `ISNULL`", "AS is followed"),
        ("n = 1_000", "`1_000` is not a number", ""),
        ("s = 'it", "the quote ' is never closed", ""),
        ("n > 3 && n < 5", "unexpected `&`", ""),
        ("case > 3", "unexpected `>`", ""),
        ("n > end", "unexpected `end`", 'write "end" in double quotes'),
        ("CAST(n AS INTT) = 1", "unknown type `INTT`", "BIGINT"),
        ("n IN ()", "an empty list", ""),
        ("s LIKE 'a' ESCAPE '!'", "ESCAPE is not supported", "REGEXP_LIKE"),
        ("EXTRACT(fortnight FROM n) = 1", "unknown unit `fortnight`", "WEEK"),
        ("DATE(s) = s", "DATE needs a format", "DATE(text, '%Y-%m-%d')"),
    ],
)
def test_what_is_wrong_is_said_in_words(text, message, fix):
    with pytest.raises(PlanError) as caught:
        check_filter(text, SCHEMA)
    assert message in caught.value.message
    assert fix in caught.value.fix
    assert "double quotes" in fix or "double quotes" not in caught.value.fix


def test_columns_named_like_functions_need_no_quotes():
    assert check_filter("user IS NOT NULL AND left > 0", SCHEMA).reads == {"user", "left"}


def test_text_in_double_quotes_is_answered_with_single_ones():
    with pytest.raises(PlanError) as caught:
        check_filter('s = "ann"', SCHEMA)
    assert caught.value.message == "unknown column `ann` in filter"
    assert caught.value.fix.startswith("text is written in single quotes: 'ann'")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),
        ("100 / 10 / 5", 2.0),
        ("-2 * -3", 6),
        ("- -n", 5),
        ("NOT NOT true", True),
        ("NOT true OR true", True),
        ("NOT 1 = 2", True),
        ("true OR false AND false", True),
        ("1 = 1 IS TRUE", True),
        ("n BETWEEN 1 AND 5 AND true", True),
        ("NOT n BETWEEN 1 AND 5", False),
        ("'a' || 1 + 2", "a3"),
        ("n::TEXT || '!'", "5!"),
        ("CASE n WHEN 5 THEN 'five' ELSE 'no' END", "five"),
        ("CASE WHEN n > 9 THEN 1 END", None),
        ("n % 3 = 2", True),
        ("-n % 3", -2),
        ("n // 2", 2),
        ("n IN (1, -5, 5)", True),
        ("n NOT IN (1, NULL)", None),
        ("s NOT LIKE 'b%'", True),
        ("s RLIKE '^a' AND s ~ 'c$'", True),
        ("substring(s FROM 2 FOR 1)", "b"),
        ("substring(s, 2)", "bc"),
        ("POSITION('c' IN s)", 3),
        ("TRIM(BOTH 'a' FROM s)", "bc"),
        ("EXTRACT(year FROM DATE '2024-05-01')", 2024),
        ("if(n > 3, 'x', 'y')", "x"),
        ("n -- the number\n + 1", 6),
        ("n /* a */ + 1", 6),
        ("5 = ANY(ARRAY[1, 5])", True),
        ("ARRAY[1, 5][2]", 5),
        ("1 IS DISTINCT FROM NULL", True),
        ("\"n\" + `n`", 10),
        ("'it''s'", "it's"),
    ],
)  # fmt: skip
def test_operators_bind_as_in_postgres(text, value):
    frame = pl.DataFrame({"n": [5], "s": ["abc"]})
    schema = pa.schema({"n": pa.int64(), "s": pa.string()})
    (column,) = check_select([f"{text} AS x"], schema)
    assert frame.select(column.expression).item() == value
