"""The time use of a subtask: busy, full, idle, backpressured; they add up to wall time."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

WINDOW_S = 1.0
"""Rates are taken over at least this long, in seconds."""


class Activity(IntEnum):
    """The activities of a subtask's loop."""

    BUSY = 0
    IDLE = 1
    BACKPRESSURED = 2
    FULL = 3
    """It takes no more records until one of its asynchronous calls ends; its processor is not the limit."""


class Rates(NamedTuple):
    """The time use of a subtask, in ms per second."""

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
        """The start of the current piece of work, on the monotonic clock; None: there is none.

        For any thread.
        """

    def switch(self, activity: Activity) -> None:
        """Count time as `activity` from now on; a busy period from here on is another piece of work."""
        self.settle()
        self._activity = activity
        self.in_call_since = self._since if activity is Activity.BUSY else None

    def rest(self) -> None:
        """Yield to others, or wait; time still counts as before."""
        self.in_call_since = None

    def settle(self) -> None:
        """Count the time until now."""
        now = self._monotonic()
        self.seconds[self._activity] += now - self._since
        self._since = now

    @property
    def activity(self) -> Activity:
        """The activity that time counts as now."""
        return self._activity

    def seconds_in(self, activity: Activity) -> float:
        """Return the seconds so far in an activity, including a current spell; for other threads."""
        spent, since = self.seconds[activity], self._since
        if self._activity is activity:
            spent += max(0.0, self._monotonic() - since)
        return spent

    def backpressured_s(self) -> float:
        """The seconds so far under backpressure, without a current spell."""
        return self.seconds[Activity.BACKPRESSURED]

    @property
    def last_rates(self) -> Rates:
        """The last result of `rates`; for other threads."""
        return self._rates

    def rates(self) -> Rates:
        """Return the rates over the last window; their sum is 1000 but for rounding."""
        self.settle()
        elapsed = self._since - self._window_start
        if elapsed >= WINDOW_S:
            grown = zip(self.seconds, self._window_base, strict=True)
            self._rates = Rates(*(round(1000 * (now - then) / elapsed) for now, then in grown))
            self._window_start = self._since
            self._window_base = list(self.seconds)
        return self._rates
