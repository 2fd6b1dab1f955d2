"""The session window: records of a key that are no further apart than a gap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import polars as pl

from ....errors import PlanError, UsageError
from ...durations import Duration, format_duration, parse_duration
from ...expressions.expressions import show
from ...time_range import DURATION_MAX_MS
from ..records.window import WindowTime, is_processing

GAP_MS_MAX: Final = DURATION_MAX_MS
"""The longest gap; a longer one is taken for a mistake. The bounds of sessions must fit a datetime.
"""


Gap: TypeAlias = Duration | pl.Expr | Callable[[Any], Any]
"""A duration, an expression over the columns, or a function of a record."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionWindow:
    """Each record opens [its time, its time + gap); windows of a key that meet are merged.

    All in ms.

    A session [start, end) fires when the watermark reaches end - 1. Until the watermark reaches end
    - 1 + `allowed_lateness_ms`, its state is kept, and records that extend or join it are accepted.

    Attributes:
        gap_ms: the gap, if it is the same for all records.
        gap: otherwise an expression (whole ms, or a duration), or a function of a record.
    """

    gap_ms: int | None
    gap: str | pl.Expr | Callable[[Any], Any] | None = None
    allowed_lateness_ms: int = 0
    processing: bool = False

    def describe(self) -> str:
        """Describe the window for `explain`, such as `session 30m`."""
        if self.gap_ms is not None:
            shown = format_duration(self.gap_ms)
        elif isinstance(self.gap, str | pl.Expr):
            shown = f"by {show(self.gap)}"
        else:
            shown = f"by {getattr(self.gap, '__name__', 'a function')}"
        text = f"session {shown}"
        if self.allowed_lateness_ms:
            text += f", allowed lateness {format_duration(self.allowed_lateness_ms)}"
        return text + ", processing time" * self.processing


def session(
    gap: Gap, *, allowed_lateness: Duration = "0s", time: WindowTime = "event"
) -> SessionWindow:
    """Return windows that end when no record of the key has come for `gap`.

    Args:
        gap: a duration such as `"30m"`. Or one for each record: SQL text or a polars expression
            over the columns, of whole milliseconds or of durations; before `.reduce`, `.aggregate`
            and `.process` also a function of the record, which returns one of these or a duration.
        allowed_lateness: how long a session that has fired can still be extended, and fires again.
        time: `processing`: on the machine's clock, for functions of records.

    Raises:
        UsageError: a duration that does not parse.
        PlanError: the gap is 0.
    """
    lateness_ms = parse_duration(allowed_lateness, "allowed lateness")
    processing = is_processing(time, allowed_lateness)
    if callable(gap) or isinstance(gap, pl.Expr):
        return SessionWindow(None, gap, lateness_ms, processing)
    try:
        gap_ms = parse_duration(gap, "session gap")
    except UsageError:
        if not isinstance(gap, str) or not gap.strip() or gap.strip()[0].isdigit():
            raise
        return SessionWindow(None, gap, lateness_ms, processing)
    if gap_ms <= 0:
        raise PlanError(f"a session needs a gap value=`{gap}`", fix='such as session("30m")')
    return SessionWindow(gap_ms, None, lateness_ms, processing)
