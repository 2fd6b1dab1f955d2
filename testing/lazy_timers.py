"""Timers of an operator that looks at the clock again and again: seldom, while nothing happens.

A step that makes watermarks does so every 200 ms: 432,000 times in a day that a test lets pass, nearly
always for nothing. So the longer it has been quiet, the longer a timer takes, up to a twentieth of the
silence. Whatever was due by then is caught up with at the end of each move of the clock, and as soon as
something happens timers are as exact as they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from ..operators.base import TimerService
from ..operators.clock import Clock

_SHARE: Final = 0.05
_SLACK_S: Final = 1e-6
"""Sums of floats: what is due this soon is due."""


@dataclass(slots=True, eq=False)
class _Timer:
    callback: Callable[[], None]
    due_s: float
    """When it was asked for."""
    cancel: Callable[[], None]


class LazyTimers:
    """A timer service for one operator, on top of that of its subtask."""

    def __init__(self, timers: TimerService, clock: Clock) -> None:
        self._timers = timers
        self._clock = clock
        self._active_s = clock.monotonic()
        self._waiting: dict[_Timer, None] = {}

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` once after `delay_ms`, or later; returns a function that cancels it."""
        now_s = self._clock.monotonic()
        quiet_ms = 1000 * (now_s - self._active_s)
        timer = _Timer(callback, now_s + delay_ms / 1000, _nothing)
        self._start(timer, max(delay_ms, int(_SHARE * quiet_ms)))
        return partial(self._cancel, timer)

    def active(self) -> None:
        """Something happened: timers are exact from now on."""
        now_s = self._clock.monotonic()
        if now_s == self._active_s:
            return
        self._active_s = now_s
        for timer in list(self._waiting):
            timer.cancel()
            self._start(timer, max(0, round(1000 * (timer.due_s - now_s))))

    def catch_up(self) -> None:
        """Run what is due by now."""
        now_s = self._clock.monotonic()
        for timer in [timer for timer in self._waiting if timer.due_s <= now_s + _SLACK_S]:
            timer.cancel()
            self._timers.call_later(0, partial(self._fire, timer))

    def _start(self, timer: _Timer, delay_ms: int) -> None:
        self._waiting[timer] = None
        timer.cancel = self._timers.call_later(delay_ms, partial(self._fire, timer))

    def _fire(self, timer: _Timer) -> None:
        if timer in self._waiting:
            del self._waiting[timer]
            timer.callback()

    def _cancel(self, timer: _Timer) -> None:
        timer.cancel()
        self._waiting.pop(timer, None)


def _nothing() -> None:
    """Cancels a timer that has not begun."""
