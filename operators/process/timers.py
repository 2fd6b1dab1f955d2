"""The timers of a process function in one subtask, on both clocks, and how those that are due fire.

A watermark can make a million timers due, and barriers never wait for all of them. Timers are
handled for as long as a step of the mailbox may take; then the mailbox continues, and a callback
handles the next slice. Meanwhile the watermark and the records after it are held back. Barriers are
not: timers that have yet to fire are in the snapshot as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final, Protocol, TypeAlias

from ...errors import StateError
from ...state.evolution import compare
from ...state.keyed.canonical import TableSpec
from ...state.keyed.keys import KeyShape
from ...state.keyed.timers import timer_layout
from ...state.queryable import CommittedPoints
from ...state.snapshot import KeptState, RestoredState, StateInfo, StateSnapshot, TableCut
from ..base import OperatorContext, Output
from ..drops import DropKind
from ..durations import parse_duration
from ..elements import WATERMARK_MAX
from ..keyed_backend import open_timer_table
from .context import TimerClock
from .declared import TIMER_TABLES

EVENT, PROCESSING = TIMER_TABLES
DROPPED_COUNTER: Final = "timers_dropped"
FIRED_COUNTER: Final = "timers_fired"
SLEEP_MS_MAX: Final = 3_600_000
"""The machine's clock can be adjusted, so it is read at least this often."""


def timer_infos(keys: KeyShape) -> list[StateInfo]:
    """Return the declarations of the tables of timers."""
    return [TableSpec(name, timer_layout(keys)).info for name in TIMER_TABLES]


class FunctionTimers:
    """Two tables of timers, and one callback for the earliest timer on the machine's clock.

    Args:
        keys: the keys of the operator.
        context: of the subtask.
        fire: called in the mailbox when timers on the machine's clock may be due; calls `arm` when
            done.
    """

    def __init__(self, keys: KeyShape, context: OperatorContext, fire: Callable[[], None]) -> None:
        self.event, self.processing = (
            open_timer_table(context, TableSpec(name, timer_layout(keys))) for name in TIMER_TABLES
        )
        self._infos = {info.name: info for info in timer_infos(keys)}
        self._context = context
        self._fire = fire
        self._fired = context.metrics.counter(FIRED_COUNTER)
        self._dropped = context.metrics.counter(DROPPED_COUNTER)
        self._armed_for: int | None = None
        self._disarm: Callable[[], None] | None = None

    @property
    def pending(self) -> int:
        """The number of timers that wait, on both clocks."""
        return len(self.event) + len(self.processing)

    def due_event(self, until: int) -> Iterator[tuple[int, Any, Any]]:
        """Pop the event-time timers due at or before `until` (ms)."""
        return self._counted(self.event.pop_due(until))

    def due_processing(self) -> Iterator[tuple[int, Any, Any]]:
        """Pop the timers that are due on the machine's clock now."""
        return self._counted(self.processing.pop_due(self._context.clock.now_ms()))

    def _counted(self, due: Iterator[tuple[int, Any, Any]]) -> Iterator[tuple[int, Any, Any]]:
        for timer in due:
            self._fired.inc()
            yield timer

    def arm(self) -> None:
        """Schedule `fire` for the earliest timer on the machine's clock, if there is any."""
        due = self.processing.next_time
        if due is None or (self._armed_for is not None and self._armed_for <= due):
            return
        self.disarm()
        self._armed_for = due
        delay = min(max(0, due - self._context.clock.now_ms()), SLEEP_MS_MAX)
        self._disarm = self._context.timers.call_later(delay, self._wake)

    def _wake(self) -> None:
        self._armed_for = self._disarm = None
        self._fire()

    def disarm(self) -> None:
        """Cancel the callback."""
        if self._disarm is not None:
            self._disarm()
        self._armed_for = self._disarm = None

    def drop_processing(self) -> None:
        """Drop, and count, timers on the machine's clock: the input has ended."""
        self.disarm()
        dropped = sum(1 for _ in self.processing.pop_due(WATERMARK_MAX))
        if dropped:
            self._dropped.inc(dropped)
        self._context.drops.add(DropKind.TIMERS, dropped)

    def snapshot_into(self, snapshot: StateSnapshot) -> None:
        """Add a cut of both tables."""
        for name, table in ((EVENT, self.event), (PROCESSING, self.processing)):
            cut = table.snapshot()
            if isinstance(cut, TableCut):
                snapshot.tables[name] = cut
            else:
                snapshot.files[name] = cut

    def restore(self, state: RestoredState) -> None:
        """Restore the timers of own key groups. Call `arm` afterwards, in the mailbox.

        Raises:
            StateError: the keys have another type now.
        """
        for name, table in ((EVENT, self.event), (PROCESSING, self.processing)):
            if name not in state.tables and not state.files.get(name) and name not in state.kept:
                continue
            old = state.states.get(name)
            if old is not None and not (found := compare(old, self._infos[name])).ok:
                raise StateError(
                    f"timers cannot be restored: {found.text} step=`{self._context.operator_name}`",
                    fix="keep the type of the keys",
                )
            table.restore(state)

    @property
    def points(self) -> list[CommittedPoints[Any]]:
        """See `KeyedBackend.points`."""
        return [*self.event.points, *self.processing.points]

    def keep(self) -> dict[str, KeptState]:
        """See `KeyedBackend.keep`."""
        found = {EVENT: self.event.keep(), PROCESSING: self.processing.keep()}
        return {name: kept for name, kept in found.items() if kept is not None}

    def close(self) -> None:
        """Release the tables."""
        self.disarm()
        self.event.close()
        self.processing.close()


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
        self._continue()

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
        self._continue()

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

    def _continue(self) -> None:
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
