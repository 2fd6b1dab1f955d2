"""Fires due timers slice by slice, so that barriers never wait for all of them.

A watermark can make a million timers due. They are handled for as long as a step of the mailbox may
take; then the mailbox continues, and a callback handles the next slice. Meanwhile the watermark and
the records after it are held back. Barriers are not: timers that have yet to fire are in the
snapshot as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final, Protocol, TypeAlias

from ..base import OperatorContext, Output
from ..durations import parse_duration
from .context import TimerClock
from .timers import FunctionTimers

_SLICE_OPTION: Final = "headgate.task.slice"
_SLICE_DEFAULT: Final = "50ms"
Due: TypeAlias = Iterator[tuple[int, Any, Any]]


class TimerOwner(Protocol):
    """The operator, as the timers see it."""

    def handle_timer(self, timestamp: int, key: Any, tag: str, clock: TimerClock) -> None:
        """Call the user's function for one timer."""
        ...

    def begin_timers(self) -> None:
        """Begin to handle timers."""
        ...

    def end_timers(self) -> None:
        """Pause the handling of timers: emit the results so far."""
        ...


class TimerFiring:
    """Fires the timers of one operator subtask.

    Args:
        timers: the timers.
        context: of the subtask.
        owner: handles them.
        output: gets a watermark once all timers that it made due were handled.
    """

    def __init__(
        self,
        timers: FunctionTimers,
        context: OperatorContext,
        owner: TimerOwner,
        output: Output,
    ) -> None:
        self._timers = timers
        self._context = context
        self._owner = owner
        self._output = output
        self._slice_s = parse_duration(context.options.get(_SLICE_OPTION, _SLICE_DEFAULT)) / 1_000
        self._watermark: int | None = None
        """The watermark that is held back until its timers have fired."""
        self._idle: bool | None = None
        """The idle notice held back behind the watermark."""
        self._event: Due | None = None
        self._processing: Due | None = None
        self._cancel: Callable[[], None] | None = None

    @property
    def holds_watermark(self) -> bool:
        """True while a watermark waits for its timers: records after it must wait too."""
        return self._watermark is not None

    @property
    def unfinished(self) -> bool:
        """True while a callback will handle more due timers."""
        return self._cancel is not None

    def on_watermark(self, timestamp: int) -> None:
        """Fire the timers due at a watermark, then forward it."""
        self._watermark = timestamp
        self._go_on()

    def on_idle(self, idle: bool) -> None:
        """Forward that the input went idle or active, after any watermark before it."""
        if self._watermark is None:
            self._output.emit_idle(idle)
        else:
            self._idle = idle

    def on_clock(self) -> None:
        """Fire the timers that are due on the machine's clock."""
        if self._processing is None:
            self._processing = self._timers.due_processing()
        self._go_on()

    def complete(self) -> None:
        """Fire all due timers now, however long it takes."""
        if self._cancel is not None:
            self.close()
            self._slice(inf)

    def close(self) -> None:
        """Stop firing."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def _go_on(self) -> None:
        if self._cancel is None:
            self._slice(self._slice_s)

    def _next_slice(self) -> None:
        self._cancel = None
        self._slice(self._slice_s)

    def _slice(self, seconds: float) -> None:
        deadline = self._context.clock.monotonic() + seconds
        if not (self._fire_processing(deadline) and self._fire_event(deadline)):
            self._cancel = self._context.timers.call_later(0, self._next_slice)
            return
        if self._watermark is not None:
            passed, self._watermark = self._watermark, None
            self._output.emit_watermark(passed)
        if self._idle is not None:
            idle, self._idle = self._idle, None
            self._output.emit_idle(idle)

    def _fire_processing(self, deadline: float) -> bool:
        if self._processing is not None:
            if not self._run(self._processing, "processing", deadline):
                return False
            self._processing = None
            self._timers.arm()
        return True

    def _fire_event(self, deadline: float) -> bool:
        """Fire timers up to the watermark, which may have advanced since the last slice."""
        while self._watermark is not None:
            if self._event is None:
                next_time = self._timers.event.next_time
                if next_time is None or next_time > self._watermark:
                    return True
                self._event = self._timers.due_event(self._watermark)
            if not self._run(self._event, "event", deadline):
                return False
            self._event = None
        return True

    def _run(self, due: Due, clock: TimerClock, deadline: float) -> bool:
        """Handle timers until the deadline; return True if none are left."""
        monotonic, handle = self._context.clock.monotonic, self._owner.handle_timer
        self._owner.begin_timers()
        try:
            for timestamp, key, tag in due:
                handle(timestamp, key, tag, clock)
                if monotonic() >= deadline:
                    return False
            return True
        finally:
            self._owner.end_timers()
