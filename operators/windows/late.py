"""Late records: they are counted, and go to one side output unchanged and to another with context.

In the second, a column `record` has all columns of the late record, as in dead letters. Further
columns have its event time, its distance to the watermark, and the last of the windows that it
would have been in. They are only made if there is a consumer.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from ...state.aggregates.accumulators import Mask
from ...state.values import Index
from ..aggregation.partials import are_partial, records_in
from ..base import OperatorContext, Output
from ..drops import DropKind
from ..elements import Batch, ColumnBatch, ObjectBatch
from ..time_range import INSTANT_MAX_MS, is_instant
from .panes.grid import Grid

LATE: Final = "late"
"""The side output of late records, unchanged."""
WITH_CONTEXT: Final = "_with_context"
"""The suffix of the side output with the context of late records."""
LATE_COUNTER: Final = "late_records"
"""The metric of all late rows, also where a job reads the side output."""
_INSTANT: Final = pa.timestamp("ms", tz="UTC")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

LastWindows: TypeAlias = Callable[[Index], tuple[Index, Index]]
"""A function of the event times of late records that returns start and end (ms) of their last windows."""


class LateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A late record of a stream of Python objects.

    For a stream of columns these fields are columns.
    """

    record: Any
    event_time: datetime
    lateness_ms: int
    """How far the watermark of the step was ahead of the record's event time, ms."""
    window_start: datetime | None
    """The start of the last window that the record would have been in; None for steps without windows."""
    window_end: datetime | None
    operator: str
    """The name of the step."""


def late_sides(schema: pa.Schema | None, tag: str = LATE) -> dict[str, pa.Schema | None]:
    """Return the side outputs of the late records of one input, for `Node.sides`.

    Args:
        schema: the columns of the input; None: Python objects.
        tag: the name of the side output of unchanged records.
    """
    return {tag: schema, tag + WITH_CONTEXT: None if schema is None else late_schema(schema)}


def late_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of late records with context, for a stream with the columns of `schema`."""
    return pa.schema(
        [
            pa.field("record", pa.struct(list(schema)), False),
            pa.field("event_time", _INSTANT, False),
            pa.field("lateness_ms", pa.int64(), False),
            pa.field("window_start", _INSTANT),
            pa.field("window_end", _INSTANT),
            pa.field("operator", pa.string(), False),
        ]
    )


class LateOutput:
    """The output of late records of one input of an operator subtask."""

    def __init__(self, context: OperatorContext, output: Output, tag: str = LATE) -> None:
        self._output, self._tag, self._step = output, tag, context.operator_name
        self._counter = context.metrics.counter(LATE_COUNTER)
        self._drops = context.drops
        self._explained = tag + WITH_CONTEXT in context.sides_read
        # Where neither has a consumer, the plain records are sent, so that they count as dropped.
        self._plain = tag in context.sides_read or not self._explained

    def split(
        self, batch: Batch, late: Mask, now: int | Index, windows: LastWindows | None = None
    ) -> Batch:
        """Send the late records of a batch, and return the others.

        Args:
            batch: with event times.
            late: which of its records are late.
            now: how far event time is for all records of the batch, or for each.
            windows: for steps that have windows.
        """
        rows = np.flatnonzero(late)
        if not rows.size:
            return batch
        self.send(batch.take(rows), now if isinstance(now, int) else now[rows], windows)
        return batch.take(np.flatnonzero(~late))

    def send(
        self, batch: Batch, watermark: int | Index, windows: LastWindows | None = None
    ) -> None:
        """Count late records, and emit them.

        Args:
            batch: with event times.
            watermark: how far event time is for all records, or for each.
            windows: for steps that have windows.
        """
        if isinstance(batch, ColumnBatch) and are_partial(batch.data):
            # Nothing reads late records, or they would not have been aggregated on their way here.
            count = records_in(batch.data)
            self._counter.inc(count)
            self._drops.add(DropKind.LATE, count)
            return
        self._counter.inc(len(batch))
        if self._plain:
            self._output.emit_side(self._tag, batch)
        if not self._explained:
            return
        times = batch.timestamps
        assert times is not None
        late_by = np.minimum(watermark, INSTANT_MAX_MS) - times
        bounds = None if windows is None else windows(times)
        made = (
            self._columns(batch, times, late_by, bounds)
            if isinstance(batch, ColumnBatch)
            else self._objects(batch, times, late_by, bounds)
        )
        self._output.emit_side(self._tag + WITH_CONTEXT, made)

    def _columns(
        self,
        batch: ColumnBatch,
        times: Index,
        late_by: Index,
        bounds: tuple[Index, Index] | None,
    ) -> ColumnBatch:
        data, count = batch.data, len(times)
        edges = [pa.nulls(count, _INSTANT)] * 2
        if bounds is not None:
            edges = [pa.array(edge).view(_INSTANT) for edge in bounds]
        columns = [
            pa.StructArray.from_arrays(data.columns, fields=list(data.schema)),
            pa.array(times).view(_INSTANT),
            pa.array(late_by),
            *edges,
            pa.repeat(pa.scalar(self._step, pa.string()), count),
        ]
        schema = late_schema(data.schema)
        return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=schema), times)

    def _objects(
        self,
        batch: ObjectBatch,
        times: Index,
        late_by: Index,
        bounds: tuple[Index, Index] | None,
    ) -> ObjectBatch:
        none: list[datetime | None] = [None] * len(times)
        starts, ends = (
            (none, none) if bounds is None else (list(map(_moment, b.tolist())) for b in bounds)
        )
        found = [
            LateRecord(
                record=record,
                event_time=_EPOCH + timedelta(milliseconds=time),
                lateness_ms=late,
                window_start=start,
                window_end=end,
                operator=self._step,
            )
            for record, time, late, start, end in zip(
                batch.records, times.tolist(), late_by.tolist(), starts, ends, strict=True
            )
        ]
        return ObjectBatch(found, times)


def last_windows(grid: Grid, times: Index) -> tuple[Index, Index]:
    """Return start and end of the last window of each instant."""
    panes, which = np.unique(grid.panes_of(times), return_inverse=True)
    bounds = np.array([grid.bounds(_last_window(grid, pane)) for pane in panes.tolist()], np.int64)
    return bounds[which, 0], bounds[which, 1]


def _last_window(grid: Grid, pane: int) -> int:
    window = grid.windows_of(pane)[1]
    while not grid.is_real(window):
        window -= 1
    return window


def _moment(time: int) -> datetime | None:
    return _EPOCH + timedelta(milliseconds=time) if is_instant(time) else None
