"""event_time: when did it happen, and how far has that time come (features.md TIM-01..03)."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import BadRecordError, PlanError
from .base import Operator, OperatorContext
from .durations import parse_duration
from .elements import WATERMARK_MAX, WATERMARK_MIN, Batch, ColumnBatch, ObjectBatch, Timestamps
from .graph import Origin
from .per_record import UserFunction
from .rows import to_rows
from .user_code import bad_result, describe_record

INTERVAL_OPTION: Final = "pipeline.auto-watermark-interval"
INTERVAL_DEFAULT_MS: Final = 200
ROWS_PER_WATERMARK: Final = 65_536
"""A watermark goes out at least this often, in records: replay at full speed must not pile up windows."""

_MS_PER_DAY: Final = 86_400_000
_NS_PER_UNIT: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def check_time_column(column: str, kind: pa.DataType, where: str) -> None:
    """Raise PlanError unless event times can be read from a column of this type."""
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind) or kind == pa.int64()):
        raise PlanError(
            f"column `{column}` has no event times type=`{kind}`",
            where=where,
            fix="event times are timestamps, dates, or int64 milliseconds since 1970 UTC; "
            "convert with select, or give a function of the record",
        )


class ColumnTimes:
    """Reads event times from a column. Timestamps without a zone are taken as UTC."""

    def __init__(self, column: str, origin: Origin) -> None:
        self.column = column
        self._origin = origin

    def __call__(self, batch: Batch) -> Timestamps:
        """Milliseconds of each record.

        Raises:
            BadRecordError: a record has none.
        """
        if not isinstance(batch, ColumnBatch):
            raise BadRecordError(
                "event time by column needs columns, but got Python objects",
                where=str(self._origin),
            )
        values = batch.data.column(self.column)
        if values.null_count:
            self._refuse(batch, values)
        return milliseconds(values)

    def _refuse(self, batch: ColumnBatch, values: pa.Array) -> None:
        index = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        (record,) = to_rows(batch.data.slice(index, 1))
        raise BadRecordError(
            f"event time is null column=`{self.column}` record=`{describe_record(record)}`",
            where=str(self._origin),
            fix=f'drop such records before: .filter("{self.column} IS NOT NULL")',
        )


def milliseconds(values: pa.Array) -> Timestamps:
    """A timestamp, date or int64 column as milliseconds since 1970 UTC, rounded down; without nulls."""
    kind = values.type
    if pa.types.is_date32(kind):
        days = pc.cast(values, pa.int32()).to_numpy(zero_copy_only=False)
        return np.asarray(days, np.int64) * _MS_PER_DAY
    if not pa.types.is_timestamp(kind):
        values = pc.cast(values, pa.int64())
    # a view: Arrow's cast would check and copy every value
    raw: Timestamps = values.view(pa.int64()).to_numpy(zero_copy_only=False)
    if not pa.types.is_timestamp(kind) or kind.unit == "ms":
        return raw
    if kind.unit == "s":
        return raw * 1_000
    return raw // (_NS_PER_UNIT["ms"] // _NS_PER_UNIT[kind.unit])


class FunctionTimes:
    """Asks a function of the record: milliseconds, or an aware datetime."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def __call__(self, batch: Batch) -> Timestamps:
        """Milliseconds of each record.

        Raises:
            UserCodeError: the function raised, or returned no time.
        """
        records = self._user.reader(batch)
        results = self._user.apply(records)
        try:
            if all(type(result) is int for result in results):
                return np.array(results, np.int64)
        except OverflowError:
            pass  # said below, with the record
        times = [self._one(r, record) for r, record in zip(results, records, strict=True)]
        return np.array(times, np.int64)

    def _one(self, result: Any, record: Any) -> int:
        if type(result) is int and -(2**63) <= result < 2**63:
            return result
        if isinstance(result, datetime) and result.tzinfo is not None:
            return round(result.timestamp() * 1_000_000) // 1_000
        shown = "a datetime without a time zone" if isinstance(result, datetime) else f"{result!r}"
        raise bad_result(
            self._user.step,
            self._user.origin,
            record,
            f"returned {shown}, which is not an event time",
            fix="return int milliseconds since 1970 UTC, or a datetime with tzinfo",
        )


class EventTimeOperator(Operator):
    """Sets event times and sends watermarks: the latest time seen - bound - 1 ms.

    The latest time seen is not state: after a restore it starts anew, which only makes the watermark
    late, never wrong. Watermarks from upstream are swallowed, except the last one.
    """

    def __init__(
        self, times: Callable[[Batch], Timestamps], bound_ms: int, idle_after_ms: int | None = None
    ) -> None:
        self._times = times
        self._bound_ms = bound_ms
        self._idle_after_s = None if idle_after_ms is None else idle_after_ms / 1_000
        self._latest = WATERMARK_MIN
        self._sent = WATERMARK_MIN
        self._rows = 0
        self._idle = False
        self._ended = False
        self._cancel: Callable[[], None] | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        given = context.options.get(INTERVAL_OPTION)
        self._interval_ms = (
            INTERVAL_DEFAULT_MS if given is None else parse_duration(given, INTERVAL_OPTION)
        )
        self._active_at = self._awake_s()
        self._lag_ms = math.nan
        context.metrics.gauge("currentEmitEventTimeLag", lambda: self._lag_ms)
        context.metrics.gauge("watermarkLag", self._watermark_lag)
        self._arm()

    def process(self, batch: Batch, input_index: int) -> None:
        if not len(batch):
            return
        times = self._times(batch)
        self._set_idle(False)
        newest = int(times.max())
        self._latest = max(self._latest, newest)
        self._lag_ms = self.context.clock.now_ms() - newest
        if isinstance(batch, ColumnBatch):
            self.output.emit(ColumnBatch(batch.data, times))
        else:
            self.output.emit(ObjectBatch(batch.records, times))
        self._active_at = self._awake_s()  # only now: the rest of the chain may have taken long
        self._rows += len(batch)
        if self._interval_ms == 0 or self._rows >= ROWS_PER_WATERMARK:
            self._send_watermark()

    def on_watermark(self, timestamp: int) -> None:
        """Swallow what upstream thinks of event time, except that it is over."""
        if timestamp == WATERMARK_MAX:
            self._stop()
            self.output.emit_watermark(timestamp)

    def on_idle(self, idle: bool) -> None:
        """Upstream without any active input cannot bring records: idle at once."""
        self._active_at = self._awake_s()
        self._set_idle(idle)

    def close(self) -> None:
        self._stop()

    def _arm(self) -> None:
        # Without an interval watermarks need no timer, but silence still does.
        idle_ms = 0 if self._idle_after_s is None else max(1, round(1_000 * self._idle_after_s))
        delay_ms = self._interval_ms or idle_ms
        if delay_ms and not self._ended:
            self._cancel = self.context.timers.call_later(delay_ms, self._tick)

    def _tick(self) -> None:
        self._send_watermark()
        if self._idle_after_s is not None:
            silent_s = self._awake_s() - self._active_at
            if silent_s >= self._idle_after_s:
                self._set_idle(True)
        self._arm()

    def _awake_s(self) -> float:
        """Seconds on a clock that stands still under backpressure: what waits then is not silent."""
        return self.context.clock.monotonic() - self.context.held_s()

    def _send_watermark(self) -> None:
        self._rows = 0
        if self._latest == WATERMARK_MIN:
            return
        watermark = max(self._latest - self._bound_ms - 1, WATERMARK_MIN)
        if watermark > self._sent:
            self._sent = watermark
            self.output.emit_watermark(watermark)

    def _watermark_lag(self) -> float:
        if self._sent == WATERMARK_MIN:
            return math.nan
        return self.context.clock.now_ms() - self._sent

    def _set_idle(self, idle: bool) -> None:
        if idle != self._idle:
            if idle:
                self._send_watermark()
            self._idle = idle
            self.output.emit_idle(idle)

    def _stop(self) -> None:
        self._ended = True
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
