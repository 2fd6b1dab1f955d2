"""Which operator makes the step of `keyed.window(...).agg(...)`, and what its result has of the window."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from ..aggregates import AggregatePlan
from ..base import OperatorFactory
from ..window_aggregate import WindowAggregate
from ..windows import WINDOW_FIELDS, CountWindow, GlobalWindow, TumblingWindow, Window
from .counts import CountAggregate
from .operator import PaneAggregate
from .whole import WholeAggregate


def window_fields(window: object) -> tuple[pa.Field, ...]:
    """The columns that a result has of its window: none, if the window knows no time."""
    return WINDOW_FIELDS if needs_event_time(window) else ()


def needs_event_time(window: object) -> bool:
    """False for windows that cut a stream otherwise than by time."""
    return not isinstance(window, CountWindow | GlobalWindow)


def window_aggregate(window: Window, plan: AggregatePlan, step: str) -> OperatorFactory:
    """The factory of the operator for these windows."""
    if isinstance(window, CountWindow):
        return partial(CountAggregate, window, plan, step)
    if isinstance(window, GlobalWindow):
        return partial(WholeAggregate, window, plan, step)
    if isinstance(window, TumblingWindow) and window.plain:
        return partial(WindowAggregate, window, plan, step)
    return partial(PaneAggregate, window, plan, step)
