"""The context of a trigger: clocks, and the timers and memory of its window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...process.context import instant_ms

if TYPE_CHECKING:
    from datetime import datetime

    from .store import WindowStore


class TriggerTimers:
    """The timers of one window on one clock, one per tag. They are deleted with the window."""

    def __init__(self, store: WindowStore, clock: str) -> None:
        self._store = store
        self._clock = clock

    def at(self, when: datetime | int, *, tag: str = "") -> None:
        """Call `on_event_time` or `on_processing_time` at a point in time.

        A timer that this tag already has is moved.

        Args:
            when: an aware datetime, or ms since 1970 UTC.
            tag: tells the timers of a window apart.
        """
        at_end = when == self._store.window.last  # the global window ends at the end of time
        time = self._store.window.last if at_end else instant_ms(when)
        self._store.set_timer(self._clock, time, tag)

    def cancel(self, tag: str = "") -> None:
        """Delete the timer of this tag, if there is one."""
        self._store.cancel_timer(self._clock, tag)


class TriggerProcessingTimers(TriggerTimers):
    """Timers on the machine's clock, which can be read here too."""

    @property
    def now(self) -> int:
        """Return the machine's time, ms since 1970 UTC."""
        return self._store.now()


class TriggerContext:
    """The view that a trigger has of its window.

    Attributes:
        event_time: timers in event time: `at`, `cancel`.
        processing_time: the machine's clock: `now`, `at`, `cancel`.
        processing_windows: whether the windows are in processing time.
    """

    def __init__(self, store: WindowStore, processing_windows: bool) -> None:
        self._store = store
        self.event_time = TriggerTimers(store, "event")
        self.processing_time = TriggerProcessingTimers(store, "processing")
        self.processing_windows = processing_windows

    @property
    def watermark(self) -> int:
        """The watermark, ms; far in the past before the first one."""
        return self._store.watermark

    @property
    def input_ended(self) -> bool:
        """True once no more records can arrive: a trigger must then stop setting its timers again."""
        return self._store.input_ended

    @property
    def key(self) -> Any:
        """The key of the window."""
        return self._store.key

    def get(self, name: str, default: Any = None) -> Any:
        """Return what was stored for this window under a name."""
        return self._store.recall(name, default)

    def set(self, name: str, value: Any) -> None:
        """Store a value for this window; it is part of checkpoints."""
        self._store.remember(name, value)

    def remove(self, name: str) -> None:
        """Remove the value stored under a name."""
        self._store.forget(name)

    def merged(self, name: str) -> list[Any]:
        """Return, in `on_merge`, what was stored for the windows that the new one replaces."""
        return self._store.recall_merged(name)
