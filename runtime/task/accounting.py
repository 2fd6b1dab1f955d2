"""The time of a subtask: how it was used, and how many rows a slice may have to last a given time.

Busy, full, idle and backpressured time add up to wall time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple, final

WINDOW_S = 1.0
"""Rates are taken over at least this long, in seconds."""
LOAD_WINDOW_S: Final = 0.1
"""The load of an event loop is taken over at least this long, in seconds."""
ROWS_MIN: Final = 1
FIRST_ROWS: Final = 1024
"""The first slice, while the cost of a record is unknown; fast operators soon reach whole batches.
"""
ROWS_MAX: Final = 1 << 30
GROWTH_MAX: Final = 2
"""The next slice has at most this multiple of the rows of the last one."""
SURPRISE: Final = 4.0
"""A slice that took this many times longer or shorter than expected invalidates all before it."""
MEMORY: Final = 0.8
"""The weight of a slice after the next one."""


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


@final
class LoopLoad:
    """The share of the last moments for which the subtasks of one event loop were at work.

    An idle subtask asks for it: if the others need most of the time, it is idle only because its
    senders wait for their turn.
    """

    def __init__(self) -> None:
        self._worked_s = 0.0
        self._window_start: float | None = None
        self._share = 0.0

    def worked(self, seconds: float) -> None:
        """Note that a subtask was at work for `seconds` and has yielded."""
        self._worked_s += seconds

    def share(self, now: float) -> float:
        """Return the share, from 0 to 1, over a window of at least `LOAD_WINDOW_S`."""
        if self._window_start is None:
            self._window_start, self._worked_s = now, 0.0
        elapsed = now - self._window_start
        if elapsed >= LOAD_WINDOW_S:
            self._share = min(1.0, self._worked_s / elapsed)
            self._window_start, self._worked_s = now, 0.0
        return self._share


class TimeAccounting:
    """Accumulates seconds per activity; `rates` gives ms per second over the last window."""

    def __init__(self, monotonic: Callable[[], float], load: LoopLoad | None = None) -> None:
        """Start idle; pieces of work count for `load`, too, when they end."""
        self._monotonic = monotonic
        self._load = load or LoopLoad()
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
        if self.in_call_since is not None:
            self._load.worked(self._since - self.in_call_since)
        self.in_call_since = self._since if activity is Activity.BUSY else None

    def rest(self) -> None:
        """Yield to others, or wait; time still counts as before."""
        if self.in_call_since is not None:
            self._load.worked(self._monotonic() - self.in_call_since)
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


@final
class SliceSizer:
    """Fits a line to the cost of slices: a price per call, and one per row; both change slowly.

    Without a price per call a slice is as large as the time allows. A call that has one (a round
    trip to a database, the wait for a contended processor) would only pay it more often in smaller
    slices: rows then get as much time as the call itself takes, if that is more than the rest of
    the budget.
    """

    def __init__(self, budget_ms: float) -> None:
        """Create a sizer for slices of about `budget_ms`."""
        self._budget_s = budget_ms / 1000
        self.rows = FIRST_ROWS
        """The number of rows of the next slice."""
        self._call_s = self._row_s = 0.0
        self._last = (0, 0.0)
        self._forget()

    def _forget(self) -> None:
        """Reset the sums over slices; they are separate attributes because this runs once per batch."""
        self._weight = self._rows = self._seconds = 0.0
        self._squares = 0.0
        """The sum of rows."""
        self._products = 0.0
        """The sum of rows times seconds."""

    def took(self, rows: int, seconds: float) -> None:
        """Note that a slice of `rows` rows took `seconds`."""
        if rows == 0:
            return
        expected_s = self._call_s + rows * self._row_s
        if not expected_s / SURPRISE <= seconds <= expected_s * SURPRISE:
            self._forget()
            last_rows, last_s = self._last
            if rows < last_rows and expected_s < seconds <= SURPRISE * last_s:
                # Nothing has become slower: most of it was the price of the call.
                self._add(last_rows, last_s)
        self._add(rows, seconds)
        self._last = (rows, seconds)
        self._fit()
        most = min(GROWTH_MAX * max(rows, self.rows), ROWS_MAX)
        for_rows_s = max(self._budget_s - self._call_s, self._call_s)
        fitting = for_rows_s / self._row_s if self._row_s > 0 else most
        self.rows = max(ROWS_MIN, int(min(fitting, most)))

    def _add(self, rows: int, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1.0
        self._rows = MEMORY * self._rows + rows
        self._seconds = MEMORY * self._seconds + seconds
        self._squares = MEMORY * self._squares + rows * rows
        self._products = MEMORY * self._products + rows * seconds

    def _fit(self) -> None:
        weight, rows, seconds, squares = self._weight, self._rows, self._seconds, self._squares
        spread = squares - rows * rows / weight
        if spread < 1e-3 * squares:  # slices of one size: everything counts as the price of rows
            self._call_s, self._row_s = 0.0, seconds / rows
            return
        slope = (self._products - rows * seconds / weight) / spread
        self._row_s = min(max(slope, 0.0), seconds / rows)
        self._call_s = max(0.0, (seconds - self._row_s * rows) / weight)
