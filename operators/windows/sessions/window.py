"""The session window: records of a key that are no further apart than a gap. The gap of each record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ....errors import DataError, PlanError, UsageError
from ...durations import Duration, format_duration, parse_duration
from ...expressions.expressions import Column, check_select, result_type, show
from ...lazy_modules import is_expression, pc, pl
from ...time_range import DURATION_MAX_MS
from ..records.window import WindowTime, is_processing

GAP_MS_MAX: Final = DURATION_MAX_MS
"""The longest gap; a longer one is taken for a mistake. The bounds of sessions must fit a datetime.
"""
Gap: TypeAlias = "Duration | pl.Expr | Callable[[Any], Any]"
"""A duration, an expression over the columns, or a function of a record."""
Milliseconds: TypeAlias = npt.NDArray[np.int64]
_COLUMN = "headgate_gap"


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
        elif isinstance(self.gap, str) or is_expression(self.gap):
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
    if callable(gap) or is_expression(gap):
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


@dataclass(frozen=True)
class FixedGap:
    """The same gap for all records."""

    ms: int
    reads: frozenset[str] = frozenset()

    def of(self, data: pa.RecordBatch) -> int | Milliseconds:
        """Return the gap in ms: one for all rows, or one for each."""
        return self.ms


@dataclass(frozen=True)
class ColumnGap:
    """A gap from an expression over the columns, checked at plan time."""

    column: Column
    text: str
    step: str

    @property
    def reads(self) -> frozenset[str]:
        """The columns that it reads."""
        return self.column.reads

    def of(self, data: pa.RecordBatch) -> int | Milliseconds:
        """Return the gap of each row in ms.

        Raises:
            DataError: null, not above 0, or too long.
        """
        array = self._evaluate(data)
        if pa.types.is_duration(array.type):
            array = array.cast(pa.duration("ms"), safe=False).cast(pa.int64())
        array = array.cast(pa.int64())
        if array.null_count:
            self._refuse(data, int(np.argmax(array.is_null().to_numpy(zero_copy_only=False))), None)
        gaps: Milliseconds = array.to_numpy()
        wrong = (gaps <= 0) | (gaps > GAP_MS_MAX)
        if wrong.any():
            at = int(np.argmax(wrong))
            self._refuse(data, at, int(gaps[at]))
        return gaps

    def _evaluate(self, data: pa.RecordBatch) -> pa.Array:
        if self.column.source is not None:
            return data.column(self.column.source)
        frame = cast(pl.DataFrame, pl.from_arrow(data.select(sorted(self.column.reads))))
        series = frame.select(self.column.expression).to_series()
        array = series.to_arrow()
        return pc.cast(array, array.type)

    def _refuse(self, data: pa.RecordBatch, row: int, gap: int | None) -> None:
        record = data.slice(row, 1).to_pylist()[0]
        raise DataError(
            f"the gap of a session must be above 0 ms gap_ms=`{gap}` expression=`{self.text}` "
            f"step=`{self.step}` record=`{record!r}`",
            fix="filter such records out before, or give them a gap: coalesce(gap, 1000)",
        )


def bound_gap(
    window: SessionWindow, schema: pa.Schema, step: str, where: str
) -> FixedGap | ColumnGap:
    """Return the gap of a session over records of `schema`.

    Raises:
        PlanError: a function, an expression that does not fit the columns, or one that is not of
            whole milliseconds or durations.
    """
    if window.gap_ms is not None:
        return FixedGap(window.gap_ms)
    gap = window.gap
    if not (isinstance(gap, str) or is_expression(gap)):
        raise PlanError(
            "the gap of a session is a function, and columns have no records to call it with",
            where=where,
            fix='write it as an expression, such as hg.session("gap_ms"), or use .reduce, .aggregate or '
            ".process",
        )
    text = show(gap)
    named: str | pl.Expr = gap
    if isinstance(gap, str) and gap not in schema.names:
        named = f"{gap} AS {_COLUMN}"
    columns = check_select([named], schema, "the gap of session", where)
    kind = result_type(columns[0], schema) if len(columns) == 1 else pa.null()
    if not (pa.types.is_integer(kind) or pa.types.is_duration(kind)):
        raise PlanError(
            f"the gap of a session is `{text}`, of type {kind}",
            where=where,
            fix="give whole milliseconds, such as CAST(seconds * 1000 AS BIGINT), or a duration",
        )
    return ColumnGap(columns[0], text, step)
