"""Chooses the operator of `keyed.window(...).agg(...)`, and the window columns of its result."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from ...operators.aggregation.aggregates import AggregatePlan
from ...operators.base import OperatorFactory
from ...operators.windows.clocked_windows import ClockedWindows
from ...operators.windows.kinds import (
    WINDOW_FIELDS,
    CountWindow,
    GlobalWindow,
    SlidingWindow,
    TimeWindow,
    TumblingWindow,
    Window,
)
from ...operators.windows.panes.counts import CountAggregate
from ...operators.windows.panes.operator import PaneAggregate
from ...operators.windows.panes.whole import WholeAggregate
from ...operators.windows.window_aggregate import WindowAggregate


def window_fields(window: object) -> tuple[pa.Field, ...]:
    """Return the window columns of a result; none if the window has no times."""
    return WINDOW_FIELDS if knows_bounds(window) else ()


def needs_event_time(window: object) -> bool:
    """Return False for windows that cut a stream by something else than event time."""
    return knows_bounds(window) and not getattr(window, "processing", False)


def knows_bounds(window: object) -> bool:
    """Return False for windows without times."""
    return not isinstance(window, CountWindow | GlobalWindow)


def window_aggregate(window: Window, plan: AggregatePlan, step: str) -> OperatorFactory:
    """Return the factory of the operator for these windows."""
    if isinstance(window, CountWindow):
        return partial(CountAggregate, window, plan, step)
    if isinstance(window, GlobalWindow):
        return partial(WholeAggregate, window, plan, step)
    if isinstance(window, TumblingWindow | SlidingWindow) and window.processing:
        return partial(_clocked, window, plan, step)
    return partial(_timed, window, plan, step)


def _timed(window: TimeWindow, plan: AggregatePlan, step: str) -> WindowAggregate | PaneAggregate:
    if isinstance(window, TumblingWindow) and window.plain:
        return WindowAggregate(window, plan, step)
    return PaneAggregate(window, plan, step)


def _clocked(
    window: TumblingWindow | SlidingWindow, plan: AggregatePlan, step: str
) -> ClockedWindows:
    return ClockedWindows(window, _timed(window, plan, step), step)
