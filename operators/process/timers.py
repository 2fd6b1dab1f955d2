"""The timers of a process function in one subtask, on both clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from ...errors import StateError
from ...state.evolution import compare
from ...state.keyed.keys import KeyShape
from ...state.keyed.timers import TimerTable, timer_layout
from ...state.snapshot import RestoredState, StateInfo, StateSnapshot
from ..base import OperatorContext
from ..drops import DropKind
from ..elements import WATERMARK_MAX
from .declared import TIMER_TABLES

EVENT, PROCESSING = TIMER_TABLES
DROPPED_COUNTER: Final = "timers_dropped"
FIRED_COUNTER: Final = "timers_fired"
SLEEP_MS_MAX: Final = 3_600_000
"""The machine's clock can be adjusted, so it is read at least this often."""


def timer_infos(keys: KeyShape) -> list[StateInfo]:
    """Return the declarations of the tables of timers."""
    return [timer_layout(keys).info(name) for name in (EVENT, PROCESSING)]


class FunctionTimers:
    """Two tables of timers, and one callback for the earliest timer on the machine's clock.

    Args:
        keys: the keys of the operator.
        context: of the subtask.
        fire: called in the mailbox when timers on the machine's clock may be due; calls `arm` when
            done.
    """

    def __init__(self, keys: KeyShape, context: OperatorContext, fire: Callable[[], None]) -> None:
        self.event = TimerTable(timer_layout(keys), context.max_parallelism)
        self.processing = TimerTable(timer_layout(keys), context.max_parallelism)
        self._infos = {info.name: info for info in timer_infos(keys)}
        self._context = context
        self._fire = fire
        self._fired = context.metrics.counter(FIRED_COUNTER)
        self._dropped = context.metrics.counter(DROPPED_COUNTER)
        self._armed_for: int | None = None
        self._disarm: Callable[[], None] | None = None

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
        snapshot.tables[EVENT] = self.event.snapshot()
        snapshot.tables[PROCESSING] = self.processing.snapshot()

    def restore(self, state: RestoredState) -> None:
        """Restore the timers of own key groups. Call `arm` afterwards, in the mailbox.

        Raises:
            StateError: the keys have another type now.
        """
        for name, table in ((EVENT, self.event), (PROCESSING, self.processing)):
            rows = state.tables.get(name)
            if rows is None:
                continue
            old = state.states.get(name)
            if old is not None and not (found := compare(old, self._infos[name])).ok:
                raise StateError(
                    f"timers cannot be restored: {found.text} step=`{self._context.operator_name}`",
                    fix="keep the type of the keys",
                )
            table.restore(rows)
