"""Aggregates of windows in processing time, a batch at a time.

The operator of event-time windows does the work: each batch gets the clock as the time of its
records, and a timer at the end of a window is the watermark that fires it. Event time passes by
unchanged.

No record is late. If the clock was set back, or is that of another machine after a restore, it
stands still for these windows until it has caught up; otherwise records would fall into windows
that have fired.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from ...state.queryable import KeyScan
from ...state.snapshot import CommitPermit, RestoredState, StateInfo, StateSnapshot
from ..aggregation.keyed_aggregate import columns_of
from ..base import Operator, OperatorContext, Output
from ..drops import DropKind
from ..elements import WATERMARK_MIN, Batch, ColumnBatch
from ..process.timers import DROPPED_COUNTER, SLEEP_MS_MAX
from .kinds import SlidingWindow, TumblingWindow
from .panes.operator import PaneAggregate
from .tumbling import TumblingAggregate


class ClockedWindows(Operator):
    """Tumbling or sliding windows in processing time.

    Args:
        window: without lateness, zone and early results.
        windows: aggregates the same windows by event time.
        step: its name, for errors.
    """

    def __init__(
        self,
        window: TumblingWindow | SlidingWindow,
        windows: TumblingAggregate | PaneAggregate,
        step: str,
    ) -> None:
        self._every_ms = window.size_ms if isinstance(window, TumblingWindow) else window.every_ms
        self._size_ms, self._offset_ms = window.size_ms, window.offset_ms
        self._windows, self._step = windows, step
        self._last = WATERMARK_MIN
        """The latest time that records got, or that was reached before a restore."""
        self._disarm: Callable[[], None] | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._results = _Results(self.output)
        self._windows.output = self._results
        self._windows.open(context)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if not len(batch):
            return
        self._last = now = self._now()
        self._advance(now)  # so that a restore knows the clock, even if no window has ended
        times = np.full(len(batch), now, np.int64)
        self._windows.process(ColumnBatch(columns_of(batch, self._step), times), 0)
        self._arm()

    def on_watermark(self, timestamp: int) -> None:
        """Ignore event time, which does not concern these windows."""
        self.output.emit_watermark(timestamp)

    # --- the clock -----------------------------------------------------------------------------

    def _now(self) -> int:
        return max(self.context.clock.now_ms(), self._last)

    def _next_end(self, time: int) -> int:
        """Return the first end of a window after `time`."""
        return time + self._every_ms - (time - self._offset_ms - self._size_ms) % self._every_ms

    def _last_end(self, time: int) -> int:
        """Return the end of the last window that contains `time`."""
        return time - (time - self._offset_ms) % self._every_ms + self._size_ms

    def _advance(self, now: int) -> None:
        """Fire the windows that have ended. The time `now` itself may still get records."""
        self._windows.on_watermark(now - 1)

    def _arm(self) -> None:
        if self._disarm is None:
            now = self.context.clock.now_ms()
            delay = max(0, self._next_end(self._now()) - now)
            self._disarm = self.context.timers.call_later(min(delay, SLEEP_MS_MAX), self._tick)

    def _tick(self) -> None:
        self._disarm = None
        now = self._now()
        self._advance(now)
        if now < self._last_end(self._last):
            self._arm()

    def finish(self) -> None:
        """End the input: open windows never fire, and are counted."""
        self._stop()
        self._results.dropped = 0
        self._advance(self._last_end(self._now()))
        self.context.metrics.counter(DROPPED_COUNTER).inc(self._results.dropped)
        self.context.drops.add(DropKind.OPEN_WINDOWS, self._results.dropped)

    # --- queries -------------------------------------------------------------------------------

    def query(self, state: str, key: Any, checkpoint_id: int = 0) -> Any:
        return self._windows.query(state, key, checkpoint_id)

    def query_many(self, state: str, keys: Sequence[Any], checkpoint_id: int = 0) -> Sequence[Any]:
        return self._windows.query_many(state, keys, checkpoint_id)

    def scan(self, state: str, checkpoint_id: int = 0) -> KeyScan:
        return self._windows.scan(state, checkpoint_id)

    def on_checkpoint_complete(self, permit: CommitPermit) -> None:
        self._windows.on_checkpoint_complete(permit)

    def drop_point(self, checkpoint_id: int) -> None:
        self._windows.drop_point(checkpoint_id)

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot as event-time windows do; the watermark is the progress of the clock."""
        return self._windows.snapshot(checkpoint_id)

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations, as of event-time windows."""
        return self._windows.states()

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the windows; those that have ended meanwhile fire at once."""
        waiting = self._windows.restore(state)
        if waiting is not None:
            return self._restored_later(waiting)
        self._restored()
        return None

    async def _restored_later(self, waiting: Awaitable[None]) -> None:
        await waiting
        self._restored()

    def _restored(self) -> None:
        if (latest := self._windows.latest) != WATERMARK_MIN:
            self._last = latest + 1
            self._disarm = self.context.timers.call_later(0, self._tick)

    def _stop(self) -> None:
        if self._disarm is not None:
            self._disarm()
            self._disarm = None

    def close(self) -> None:
        self._stop()
        self._windows.close()


class _Results:
    """Receives the results of the windows, but not their time.

    Attributes:
        dropped: the number of rows not emitted; None while they are emitted.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self.dropped: int | None = None

    def emit(self, batch: Batch) -> None:
        if self.dropped is None:
            self._output.emit(batch)
        else:
            self.dropped += len(batch)

    def emit_side(self, tag: str, batch: Batch) -> None:
        self._output.emit_side(tag, batch)

    def emit_watermark(self, timestamp: int) -> None:
        """Ignore the time of the windows, which is not event time."""

    def emit_idle(self, idle: bool) -> None:
        self._output.emit_idle(idle)
