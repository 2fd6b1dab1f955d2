"""Expressions built in Python are bounded as SQL texts are: Polars would overflow the process's stack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import polars as pl
import pytest

import headgate as hg
from headgate.connectors import from_list
from headgate.errors import PlanError
from headgate.operators.expressions.sql.tree import DEPTH_MAX, OPERATIONS_MAX
from headgate.tests.support.commands import ended_with

BUILD = """
import polars as pl
import headgate as hg
from headgate.connectors import from_list
from headgate.errors import PlanError

rows = hg.Job("deep").read(from_list([{"n": 1}], schema={"n": "long"}), name="in").event_time("n")
condition = pl.col("n") > 0
for number in range(20_000):
    condition = condition & (pl.col("n") != number)
try:
    USE
except PlanError as error:
    print(error.message, "|", error.fix, "|", error.where)
"""
USES = {
    "filter": "rows.filter(condition)",
    "select": 'rows.select(condition.alias("x"))',
    "session": (
        'rows.key_by("n").window(hg.session(condition)).agg(count=hg.count(), name="sessions")'
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_chain_of_20_000_operations_is_a_plan_error(use: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD.replace("USE", use)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    ended_with(done, 0)
    assert f"is too large: more than {DEPTH_MAX} operations depend on each other" in done.stdout
    assert "pl.all_horizontal([...])" in done.stdout
    assert "<string>:" in done.stdout


def rows() -> hg.Stream[object]:
    return hg.Job("x").read(from_list([{"n": 1}], schema={"n": "long"}), name="in")


def chain(links: int) -> pl.Expr:
    expression = pl.col("n")
    for _ in range(links):
        expression = expression + 1
    return expression


def test_the_bound_itself_is_allowed() -> None:
    rows().select(chain(DEPTH_MAX - 1).alias("n"))
    with pytest.raises(PlanError, match="operations depend on each other"):
        rows().select(chain(DEPTH_MAX).alias("n"))


@pytest.mark.parametrize(
    "call",
    [
        lambda made: made.abs(),
        lambda made: made.fill_null(0),
        lambda made: made.alias("n"),
        lambda made: made.cast(pl.Int64),
        lambda made: pl.max_horizontal(made, 1),
        lambda made: pl.when(pl.col("n") > 1).then(made).otherwise(0),
        lambda made: made.over("n"),
    ],
    ids=["function", "fill", "alias", "cast", "horizontal", "when", "over"],
)
def test_every_kind_of_call_counts(call: Callable[[pl.Expr], pl.Expr]) -> None:
    made = pl.col("n")
    for _ in range(2_000):
        made = call(made)
    with pytest.raises(PlanError, match="operations depend on each other"):
        rows().select(made.alias("n"))


def test_an_expression_that_is_wide_or_shares_its_parts_is_bounded() -> None:
    shared = pl.col("n")
    for _ in range(40):
        shared = shared + shared
    with pytest.raises(PlanError, match=f"more than {OPERATIONS_MAX:,} operations"):
        rows().filter(shared > 0)
    with pytest.raises(PlanError, match=f"more than {OPERATIONS_MAX:,} operations"):
        rows().filter(pl.any_horizontal([pl.col("n") == n for n in range(OPERATIONS_MAX)]))


def test_long_lists_are_one_operation() -> None:
    rows().filter(pl.col("n").is_in(list(range(100_000))))
    rows().filter(pl.all_horizontal([pl.col("n") != n for n in range(1_000)]))
