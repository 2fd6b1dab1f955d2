"""Triggers decide when a window emits its contents: the interface and the built-in triggers.

One instance serves all keys and windows of a subtask. A trigger keeps what it has to remember of a
window in its context, where it is part of the checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ....errors import PlanError
from ...durations import Duration, parse_duration
from ...process.context import END_REPEATS_MAX, instant_ms
from .window import Window, check_rows

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


T = TypeVar("T")


class TriggerResult(Enum):
    """The action on a window: `FIRE` emits its contents, `PURGE` removes them."""

    CONTINUE = (False, False)
    FIRE = (True, False)
    PURGE = (False, True)
    FIRE_AND_PURGE = (True, True)

    @property
    def fires(self) -> bool:
        """True if results are emitted."""
        return self.value[0]

    @property
    def purges(self) -> bool:
        """True if the records are removed."""
        return self.value[1]


_CONTINUE, _FIRE = TriggerResult.CONTINUE, TriggerResult.FIRE


class Trigger(Generic[T]):
    """Decides when a window fires. Derive from it, and override what is needed.

    Attributes:
        can_merge: `on_merge` is implemented, so the trigger works with windows that merge, such as
            sessions.
    """

    can_merge: bool = False

    @abstractmethod
    def on_element(
        self, record: T, timestamp: int, window: Window, ctx: TriggerContext
    ) -> TriggerResult:
        """Handle a record that came to the window.

        `timestamp` (ms) is the record's event time; in a stream without event time, the machine's
        time.
        """
        raise NotImplementedError

    def on_event_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        """Handle a due timer of `ctx.event_time`."""
        return _CONTINUE

    def on_processing_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        """Handle a due timer of `ctx.processing_time`."""
        return _CONTINUE

    def on_merge(self, window: Window, ctx: TriggerContext) -> None:
        """Set the timers of a window that replaced others.

        `ctx.merged(name)` has what the others remembered. Their timers and memory are removed
        afterwards, after `clear` was called for each.
        """
        raise NotImplementedError

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        """Clean up for a window that is cleared. Its memory and timers in the context go by themselves."""


_END: Final = "end"
_NEXT: Final = "next"
_COUNT: Final = "count"
_LAST: Final = "last"


class EventTime(Trigger[Any]):
    """Fires when the watermark reaches the end of the window, and for each record that comes later."""

    can_merge = True

    def on_element(
        self, record: Any, timestamp: int, window: Window, ctx: TriggerContext
    ) -> TriggerResult:
        if window.last <= ctx.watermark:
            return _FIRE
        ctx.event_time.at(window.last, tag=_END)
        return _CONTINUE

    def on_event_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return _FIRE if time == window.last else _CONTINUE

    def on_merge(self, window: Window, ctx: TriggerContext) -> None:
        if window.last > ctx.watermark:
            ctx.event_time.at(window.last, tag=_END)


class ProcessingTime(Trigger[Any]):
    """Fires when the machine's clock reaches the end of the window."""

    can_merge = True

    def on_element(
        self, record: Any, timestamp: int, window: Window, ctx: TriggerContext
    ) -> TriggerResult:
        ctx.processing_time.at(window.last, tag=_END)
        return _CONTINUE

    def on_processing_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return _FIRE

    def on_merge(self, window: Window, ctx: TriggerContext) -> None:
        ctx.processing_time.at(window.last, tag=_END)


class Count(Trigger[Any]):
    """Fires for every `size` records of the window."""

    can_merge = True

    def __init__(self, size: int) -> None:
        self._size = check_rows(size, "triggers.Count")

    def on_element(
        self, record: Any, timestamp: int, window: Window, ctx: TriggerContext
    ) -> TriggerResult:
        count = ctx.get(_COUNT, 0) + 1
        if count >= self._size:
            ctx.remove(_COUNT)
            return _FIRE
        ctx.set(_COUNT, count)
        return _CONTINUE

    def on_merge(self, window: Window, ctx: TriggerContext) -> None:
        if counts := ctx.merged(_COUNT):
            ctx.set(_COUNT, sum(counts))


class ContinuousEventTime(Trigger[Any]):
    """Fires whenever the watermark passes a multiple of `interval`, and at the end of the window.

    A global window has no end: the last firing is at the multiple pending when the input ends.
    """

    can_merge = True

    def __init__(self, interval: Duration) -> None:
        self._interval_ms = _interval(interval, "triggers.ContinuousEventTime")

    def on_element(
        self, record: Any, timestamp: int, window: Window, ctx: TriggerContext
    ) -> TriggerResult:
        if window.last <= ctx.watermark:
            return _FIRE
        if not window.is_global:
            ctx.event_time.at(window.last, tag=_END)
        if ctx.get(_NEXT) is None:
            self._next(timestamp - timestamp % self._interval_ms, window, ctx)
        return _CONTINUE

    def on_event_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        if time == window.last:
            return _FIRE
        if time != ctx.get(_NEXT):
            return _CONTINUE
        self._next(time, window, ctx)
        return _FIRE

    def on_merge(self, window: Window, ctx: TriggerContext) -> None:
        if window.last > ctx.watermark:
            ctx.event_time.at(window.last, tag=_END)
        if times := ctx.merged(_NEXT):
            self._next(min(times) - self._interval_ms, window, ctx)

    def _next(self, after: int, window: Window, ctx: TriggerContext) -> None:
        time = min(after + self._interval_ms, window.last)
        if ctx.input_ended and window.last - time > END_REPEATS_MAX * self._interval_ms:
            # no more records can arrive: every firing until then would be the same
            time = window.last
        ctx.set(_NEXT, time)
        if time < window.last:  # the end of the window has a timer of its own
            ctx.event_time.at(time, tag=_NEXT)


class ContinuousProcessingTime(Trigger[Any]):
    """Fires whenever the machine's clock passes a multiple of `interval` while the window exists.

    It also fires at the end of windows in processing time, but not at the end of windows in event
    time.
    """

    can_merge = True

    def __init__(self, interval: Duration) -> None:
        self._interval_ms = _interval(interval, "triggers.ContinuousProcessingTime")

    def on_element(
        self, record: Any, timestamp: int, window: Window, ctx: TriggerContext
    ) -> TriggerResult:
        if ctx.get(_NEXT) is None:
            now = ctx.processing_time.now
            self._next(now - now % self._interval_ms, window, ctx)
        return _CONTINUE

    def on_processing_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        self._next(time, window, ctx)
        return _FIRE

    def on_merge(self, window: Window, ctx: TriggerContext) -> None:
        if times := ctx.merged(_NEXT):
            self._next(min(times) - self._interval_ms, window, ctx)

    def _next(self, after: int, window: Window, ctx: TriggerContext) -> None:
        time = after + self._interval_ms
        if ctx.processing_windows:
            if after >= window.last:
                return
            time = min(time, window.last)
        ctx.set(_NEXT, time)
        ctx.processing_time.at(time, tag=_NEXT)


class Delta(Trigger[T]):
    """Fires when a record is further than `threshold` from the one that last fired.

    Args:
        threshold: a limit in the unit of `distance`.
        distance: `(earlier record, record) -> number`.
    """

    def __init__(self, threshold: float, distance: Callable[[T, T], float]) -> None:
        self._threshold = threshold
        self._distance = distance

    def on_element(
        self, record: T, timestamp: int, window: Window, ctx: TriggerContext
    ) -> TriggerResult:
        held = ctx.get(_LAST)
        if held is not None and self._distance(held[0], record) <= self._threshold:
            return _CONTINUE
        ctx.set(_LAST, (record,))
        return _CONTINUE if held is None else _FIRE


class Purging(Trigger[T]):
    """Fires like another trigger, and removes the records of a window that has fired."""

    def __init__(self, trigger: Trigger[T]) -> None:
        if not isinstance(trigger, Trigger):
            raise PlanError(
                f"triggers.Purging needs a trigger, got `{type(trigger).__name__}`",
                fix="such as hg.triggers.Purging(hg.triggers.Count(100))",
            )
        self._trigger = trigger
        self.can_merge = trigger.can_merge

    def on_element(
        self, record: T, timestamp: int, window: Window, ctx: TriggerContext
    ) -> TriggerResult:
        return _purged(self._trigger.on_element(record, timestamp, window, ctx))

    def on_event_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return _purged(self._trigger.on_event_time(time, window, ctx))

    def on_processing_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return _purged(self._trigger.on_processing_time(time, window, ctx))

    def on_merge(self, window: Window, ctx: TriggerContext) -> None:
        self._trigger.on_merge(window, ctx)

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        self._trigger.clear(window, ctx)


def _innermost(trigger: Trigger[Any]) -> Trigger[Any]:
    while isinstance(trigger, Purging):
        trigger = trigger._trigger
    return trigger


def goes_by_clock(trigger: Trigger[Any]) -> bool:
    """Return True if a trigger, or the one it wraps, acts on the machine's clock."""
    return type(_innermost(trigger)).on_processing_time is not Trigger.on_processing_time


def needs_event_time(trigger: Trigger[Any]) -> bool:
    """Return True if a trigger, or the one it wraps, only fires by event time."""
    return isinstance(_innermost(trigger), EventTime | ContinuousEventTime)


def _purged(result: TriggerResult) -> TriggerResult:
    return TriggerResult.FIRE_AND_PURGE if result.fires else result


def _interval(interval: Duration, what: str) -> int:
    milliseconds = parse_duration(interval, f"interval of {what}")
    if milliseconds <= 0:
        raise PlanError(f"{what} needs an interval value=`{interval}`", fix='such as "10s"')
    return milliseconds
