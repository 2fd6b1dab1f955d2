"""Counts the records of a batch that meet a user's condition: SQL text, a `pl.Expr`, or a function."""

from __future__ import annotations

from typing import Any

import polars as pl

from ...operators.elements import Batch, ColumnBatch
from ...operators.expressions.expression_steps import ExpressionSteps, FilterStep
from ...operators.expressions.expressions import check_filter, show
from ...operators.functions.checks import check_plain, check_returns
from ...operators.graph import Origin
from ...operators.loops.settings import Matching
from ...operators.per_record.base import UserFunction
from ...operators.per_record.filter import kept_rows
from ..stream_base import StreamBase


class MatchingRows:
    """Counts by an expression on columns."""

    def __init__(self, steps: ExpressionSteps) -> None:
        self._steps = steps

    def __call__(self, batch: Batch) -> int:
        assert isinstance(batch, ColumnBatch)  # the plan has checked that the stream has columns
        kept = self._steps.apply(batch)
        return 0 if kept is None else len(kept)


class MatchingRecords:
    """Counts by a function of a record."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def __call__(self, batch: Batch) -> int:
        return len(kept_rows(self._user.apply(self._user.reader(batch))))


def matching(stream: StreamBase[Any], condition: Any, name: str, origin: Origin) -> Matching:
    """Return the condition over the records of a stream.

    Raises:
        PlanError: it is no condition, or it reads what the stream does not have.
    """
    if not isinstance(condition, str | pl.Expr):
        check_plain(condition, "while_any", origin)
        check_returns(condition, "while_any", origin)
        return MatchingRecords(
            stream._user_function("while_any", name, origin, condition, None, max_in_flight=1)
        )
    schema = stream._columns("while_any by expression", origin)
    column = check_filter(condition, schema, "while_any", str(origin))
    return MatchingRows(ExpressionSteps([FilterStep(column, show(condition))], schema))
