"""Which operator makes the step of `keyed.window(...).agg(...)`."""

from __future__ import annotations

from functools import partial

from ..aggregates import AggregatePlan
from ..base import OperatorFactory
from ..window_aggregate import WindowAggregate
from ..windows import TimeWindow, TumblingWindow
from .operator import PaneAggregate


def window_aggregate(window: TimeWindow, plan: AggregatePlan, step: str) -> OperatorFactory:
    """The factory of the operator for these windows."""
    if isinstance(window, TumblingWindow) and window.plain:
        return partial(WindowAggregate, window, plan, step)
    return partial(PaneAggregate, window, plan, step)
