"""What a trigger is handed: clocks, timers of its window, and a memory of its window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..process.context import instant_ms

if TYPE_CHECKING:
    from datetime import datetime

    from .store import WindowStore


class TriggerTimers:
    """Timers of one window, on one clock; one per tag. They go with the window."""

    def __init__(self, store: WindowStore, clock: str) -> None:
        self._store = store
        self._clock = clock

    def at(self, when: datetime | int, *, tag: str = "") -> None:
        """Call `on_event_time`, or `on_processing_time`, at a point in time; one of this tag is moved.

        Args:
            when: an aware datetime, or ms since 1970 UTC.
            tag: tells the timers of a window apart.
        """
        at_end = when == self._store.window.last  # that of the global window is at the end of time
        time = self._store.window.last if at_end else instant_ms(when)
        self._store.set_timer(self._clock, time, tag)

    def cancel(self, tag: str = "") -> None:
        """Delete the timer of this tag, if there is one."""
        self._store.cancel_timer(self._clock, tag)


class TriggerProcessingTimers(TriggerTimers):
    """The same by the machine's clock, which it shows."""

    @property
    def now(self) -> int:
        """The time of the machine, ms since 1970 UTC."""
        return self._store.now()


class TriggerContext:
    """What a trigger may know and do about the window at hand.

    Attributes:
        event_time: timers in event time: `at`, `cancel`.
        processing_time: the machine's clock: `now`, `at`, `cancel`.
        processing_windows: the windows are in processing time.
    """

    def __init__(self, store: WindowStore, processing_windows: bool) -> None:
        self._store = store
        self.event_time = TriggerTimers(store, "event")
        self.processing_time = TriggerProcessingTimers(store, "processing")
        self.processing_windows = processing_windows

    @property
    def watermark(self) -> int:
        """How far event time has come, ms; far in the past before the first watermark."""
        return self._store.watermark

    @property
    def input_ended(self) -> bool:
        """True once no record can come any more: a trigger must then stop setting its timers again."""
        return self._store.input_ended

    @property
    def key(self) -> Any:
        """The key of the window."""
        return self._store.key

    def get(self, name: str, default: Any = None) -> Any:
        """What was remembered of this window under a name."""
        return self._store.recall(name, default)

    def set(self, name: str, value: Any) -> None:
        """Remember something of this window; goes into the checkpoint."""
        self._store.remember(name, value)

    def remove(self, name: str) -> None:
        """Forget it."""
        self._store.forget(name)

    def merged(self, name: str) -> list[Any]:
        """In `on_merge`: what was remembered of the windows that the new one takes the place of."""
        return self._store.recall_merged(name)
