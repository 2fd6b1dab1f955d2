"""Planning of `keyed.window(hg.session(...)).agg(...)`."""

from __future__ import annotations

from functools import partial

from ...operators.aggregation.aggregates import AggregatePlan
from ...operators.base import OperatorFactory
from ...operators.windows.sessions.gaps import bound_gap
from ...operators.windows.sessions.operator import SessionAggregate
from ...operators.windows.sessions.window import SessionWindow


def session_aggregate(
    window: SessionWindow, plan: AggregatePlan, step: str
) -> tuple[OperatorFactory, frozenset[str]]:
    """Return the operator's factory, and the columns that it reads.

    Raises:
        PlanError: the gap does not fit the columns.
    """
    gap = bound_gap(window, plan.schema, step, plan.where)
    factory = partial(SessionAggregate, gap, window.allowed_lateness_ms, plan, step)
    return factory, plan.columns_read | gap.reads
