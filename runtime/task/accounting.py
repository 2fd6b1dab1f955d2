"""Where a subtask's time goes: busy, full, idle, backpressured; they add up to wall time (OBS-02)."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

WINDOW_S = 1.0
"""Rates are taken over at least this long."""


class Activity(IntEnum):
    """The activities of a subtask's loop."""

    BUSY = 0
    IDLE = 1
    BACKPRESSURED = 2
    FULL = 3
    """It takes no more records until one of its asynchronous calls ends: others wait for it, not for its
    processor."""


class Rates(NamedTuple):
    """Where the time of a subtask went, in ms per second."""

    busy: int
    idle: int
    backpressured: int
    full: int


class TimeAccounting:
    """Accumulates seconds per activity; `rates` gives ms per second over the last window."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since = monotonic()
        self._activity = Activity.IDLE
        self.seconds = [0.0] * len(Activity)
        self._window_start = self._since
        self._window_base = list(self.seconds)
        self._rates = Rates(0, 1000, 0, 0)
        self.in_call_since: float | None = None
        """Since when one piece of work goes on, on the monotonic clock; None: none does. Also for other
        threads."""

    def switch(self, activity: Activity) -> None:
        """From now on time counts as `activity`; what is busy from here on is another piece of work."""
        self.settle()
        self._activity = activity
        self.in_call_since = self._since if activity is Activity.BUSY else None

    def rest(self) -> None:
        """Others have their turn, or something is waited for; time goes on counting as before."""
        self.in_call_since = None

    def settle(self) -> None:
        """Count the time until now."""
        now = self._monotonic()
        self.seconds[self._activity] += now - self._since
        self._since = now

    @property
    def activity(self) -> Activity:
        """What time counts as now."""
        return self._activity

    def seconds_in(self, activity: Activity) -> float:
        """Seconds so far in an activity, a spell that still lasts included; for other threads."""
        spent, since = self.seconds[activity], self._since
        if self._activity is activity:
            spent += max(0.0, self._monotonic() - since)
        return spent

    def backpressured_s(self) -> float:
        """Seconds so far under backpressure, without a spell that still lasts."""
        return self.seconds[Activity.BACKPRESSURED]

    @property
    def last_rates(self) -> Rates:
        """The last result of `rates`; for other threads."""
        return self._rates

    def rates(self) -> Rates:
        """Over the last window; their sum is 1000 but for rounding."""
        self.settle()
        elapsed = self._since - self._window_start
        if elapsed >= WINDOW_S:
            grown = zip(self.seconds, self._window_base, strict=True)
            self._rates = Rates(*(round(1000 * (now - then) / elapsed) for now, then in grown))
            self._window_start = self._since
            self._window_base = list(self.seconds)
        return self._rates
