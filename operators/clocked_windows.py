"""Aggregates of windows of the machine's clock (features.md TIM-06): a batch at a time.

The operator of event-time windows does the work: each batch gets the clock as the time of its records, and
a timer at the end of a window is the watermark that fires it. Event time goes by untouched.

No record is late. A clock that was set back, or that of another machine after a restore, stands still for
these windows until it has caught up: else records would fall into windows that have fired.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from ..state.snapshot import RestoredState, StateInfo, StateSnapshot
from .base import Operator, OperatorContext, Output
from .drops import DropKind
from .elements import WATERMARK_MIN, Batch, ColumnBatch
from .keyed_aggregate import columns_of
from .panes.operator import PaneAggregate
from .process.timers import DROPPED_COUNTER, SLEEP_MS_MAX
from .window_aggregate import WindowAggregate
from .windows import SlidingWindow, TumblingWindow


class ClockedWindows(Operator):
    """Tumbling or sliding windows of the machine's clock.

    Args:
        window: without lateness, zone and early results.
        windows: aggregates the same windows by event time.
        step: its name, for errors.
    """

    def __init__(
        self,
        window: TumblingWindow | SlidingWindow,
        windows: WindowAggregate | PaneAggregate,
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
        self._advance(now)  # a restore finds how far the clock was, also if no window has ended
        times = np.full(len(batch), now, np.int64)
        self._windows.process(ColumnBatch(columns_of(batch, self._step), times), 0)
        self._arm()

    def on_watermark(self, timestamp: int) -> None:
        """Event time goes by; these windows do not know it."""
        self.output.emit_watermark(timestamp)

    # --- the clock -----------------------------------------------------------------------------

    def _now(self) -> int:
        return max(self.context.clock.now_ms(), self._last)

    def _next_end(self, time: int) -> int:
        """The first end of a window behind `time`."""
        return time + self._every_ms - (time - self._offset_ms - self._size_ms) % self._every_ms

    def _last_end(self, time: int) -> int:
        """The end of the last window that `time` lies in."""
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
        """The end of the input: what is open never fires, and is counted."""
        self._stop()
        self._results.dropped = 0
        self._advance(self._last_end(self._now()))
        self.context.metrics.counter(DROPPED_COUNTER).inc(self._results.dropped)
        self.context.drops.add(DropKind.OPEN_WINDOWS, self._results.dropped)

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """As of windows of event time; the watermark is how far the clock was."""
        return self._windows.snapshot(checkpoint_id)

    def states(self) -> Sequence[StateInfo]:
        """As of windows of event time."""
        return self._windows.states()

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """What ended meanwhile fires at once."""
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
    """Takes the results of the windows, but not their time.

    Attributes:
        dropped: rows not passed on; None while they are.
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
        """The time of the windows is not event time."""

    def emit_idle(self, idle: bool) -> None:
        self._output.emit_idle(idle)
