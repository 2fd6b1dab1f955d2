"""Panes: the pieces of event time between the bounds of windows, and the windows made of them.

Every window is a run of panes, so a record is added once, whatever the number of its windows. Panes
and windows are numbered in order of time. There are at most two panes for each start of a window,
even where the size is no multiple of the slide ("paired windows": Krishnamurthy, Wu, Franklin
2006); where it is one, panes are as long as the slide.

What panes cut is event time as a calendar numbers it: plain milliseconds, or the days of a time
zone. A *place* is an integer that grows with time; windows have their sizes and bounds in places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Protocol, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from ...elements import Timestamps

Numbers = npt.NDArray[np.int64]

DAY_MS = 86_400_000
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = _EPOCH.replace(tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_SPAN_MAX = 4_096
_KNOWN_MAX = 100_000
_FIRST_DAY = (datetime(2, 1, 1) - _EPOCH).days
_LAST_DAY = (datetime(9998, 12, 31) - _EPOCH).days
"""Python's calendar ends here; later days are those of UTC."""


class Calendar(Protocol):
    """Converts instants to places and back."""

    def places(self, times: Timestamps) -> Numbers:
        """Return the place of each instant (ms since the epoch)."""
        ...

    def place(self, time: int) -> int:
        """Return the last place that begins at `time` or before; any integer is accepted."""
        ...

    def instant(self, place: int) -> int:
        """Return when a place begins, ms since the epoch."""
        ...


@dataclass(frozen=True, slots=True)
class Milliseconds:
    """Each millisecond is a place; number 0 is `offset_ms` after the epoch."""

    offset_ms: int = 0

    def places(self, times: Timestamps) -> Numbers:
        """Return the place of each instant."""
        return times - self.offset_ms if self.offset_ms else times

    def place(self, time: int) -> int:
        """Return the place of one instant."""
        return time - self.offset_ms

    def instant(self, place: int) -> int:
        """Return when a place begins."""
        return place + self.offset_ms


@dataclass(frozen=True, slots=True)
class LocalDays:
    """Days of a time zone, cut into steps; a place is a step.

    A day begins when the local clocks first show midnight plus `offset_ms`, or skip it, so that it
    has 23 or 25 hours when they change. Steps are counted from 0 each day. Each day has as many
    places as the longest day may need, so that windows of whole days have equal sizes in places.

    Attributes:
        zone: IANA name.
        offset_ms: when the day begins, after midnight.
        step_ms: length of a step; a whole day: each day is one step, however long.
    """

    zone: str
    offset_ms: int = 0
    step_ms: int = DAY_MS
    _starts: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def places_per_day(self) -> int:
        """Return how many places a day has."""
        return 1 if self.step_ms == DAY_MS else -(-2 * DAY_MS // self.step_ms)

    def places(self, times: Timestamps) -> Numbers:
        """Return the place of each instant."""
        if not len(times):
            return times
        days = (times - self.offset_ms) // DAY_MS
        low, high = int(days.min()), int(days.max())
        if high - low <= _SPAN_MAX:
            near = np.arange(low - 1, high + 3)
        else:
            near = np.unique(days[:, None] + np.arange(-1, 3))
        starts = np.array([self.start(day) for day in near.tolist()], np.int64)
        at = np.searchsorted(starts, times, side="right") - 1
        found: Numbers = near[at]
        per_day = self.places_per_day
        if per_day == 1:
            return found
        steps = np.minimum((times - starts[at]) // self.step_ms, per_day - 1)
        places: Numbers = found * per_day + steps
        return places

    def place(self, time: int) -> int:
        """Return the place of one instant."""
        day = (time - self.offset_ms) // DAY_MS + 1
        while self.start(day) > time:
            day -= 1
        per_day = self.places_per_day
        if per_day == 1:
            return day
        return day * per_day + min((time - self.start(day)) // self.step_ms, per_day - 1)

    def instant(self, place: int) -> int:
        """Return when a place begins; places that a day lacks begin with the next day."""
        day, step = divmod(place, self.places_per_day)
        start = self.start(day)
        return min(start + step * self.step_ms, self.start(day + 1)) if step else start

    def start(self, day: int) -> int:
        """Return when day number `day` since 1970-01-01 begins in the zone."""
        found = self._starts.get(day)
        if found is None:
            if len(self._starts) >= _KNOWN_MAX:
                self._starts.clear()
            found = self._starts[day] = self._start(day)
        return found

    def _start(self, day: int) -> int:
        plain = day * DAY_MS + self.offset_ms
        if not _FIRST_DAY <= day <= _LAST_DAY:
            return plain
        zone = ZoneInfo(self.zone)
        shown = _EPOCH + timedelta(milliseconds=plain)
        first, second = (plain - _offset(shown.replace(tzinfo=zone, fold=fold)) for fold in (0, 1))
        if first <= second:
            return first  # the clocks show it once or twice
        # They skip it, somewhere in between: where the offset changes.
        after = _offset(_at(first, zone))
        low, high = second, first
        while high - low > 1:
            middle = (low + high) // 2
            if _offset(_at(middle, zone)) == after:
                high = middle
            else:
                low = middle
        return high


def _at(time: int, zone: ZoneInfo) -> datetime:
    return (_EPOCH_UTC + timedelta(milliseconds=time)).astimezone(zone)


def _offset(moment: datetime) -> int:
    """Return how far the clocks are ahead of UTC, ms."""
    ahead = moment.utcoffset()
    assert ahead is not None
    return ahead // _MS


class Grid(Protocol):
    """The panes of one kind of window."""

    def panes_of(self, times: Timestamps) -> Numbers:
        """Return the pane of each instant."""
        ...

    def pane_of(self, time: int) -> int:
        """Return the pane of one instant."""
        ...

    def pane_bounds(self, pane: int) -> tuple[int, int]:
        """Return start and end of a pane, ms."""
        ...

    def windows_of(self, pane: int) -> tuple[int, int]:
        """Return the first and the last window that a pane is in."""
        ...

    def panes_in(self, window: int) -> tuple[int, int]:
        """Return the first and the last pane of a window."""
        ...

    def bounds(self, window: int) -> tuple[int, int]:
        """Return start and end of a window, ms."""
        ...

    def is_real(self, window: int) -> bool:
        """Return False for a number that is no window."""
        ...

    def ended(self, time: int) -> int:
        """Return the last window that ends at `time` or before."""
        ...

    def kept_from(self, time: int) -> int:
        """Return the first pane of a window that ends after `time`."""
        ...


@dataclass(frozen=True, slots=True)
class SlidingGrid:
    """Windows of `size` places, one every `every` places (at most `size`).

    Window k is [k * every, k * every + size) in places. If the size is no multiple of the slide,
    each slide has two panes: before and after the place where a window ends.
    """

    calendar: Calendar
    size: int
    every: int

    @property
    def _rest(self) -> int:
        return self.size % self.every

    @property
    def _slides(self) -> int:
        """The whole slides in a window."""
        return self.size // self.every

    def panes_of(self, times: Timestamps) -> Numbers:
        """Return the pane of each instant."""
        places = self.calendar.places(times)
        if not self._rest:
            return places if self.every == 1 else places // self.every
        slides, behind = np.divmod(places, self.every)
        return 2 * slides + (behind >= self._rest)

    def pane_of(self, time: int) -> int:
        """Return the pane of one instant."""
        slide, behind = divmod(self.calendar.place(time), self.every)
        return 2 * slide + (behind >= self._rest) if self._rest else slide

    def pane_bounds(self, pane: int) -> tuple[int, int]:
        """Return start and end of a pane."""
        return self._start(pane), self._start(pane + 1)

    def _start(self, pane: int) -> int:
        if not self._rest:
            return self.calendar.instant(pane * self.every)
        slide, half = divmod(pane, 2)
        return self.calendar.instant(slide * self.every + half * self._rest)

    def windows_of(self, pane: int) -> tuple[int, int]:
        """Return the first and the last window of a pane."""
        if not self._rest:
            return pane - self._slides + 1, pane
        slide, half = divmod(pane, 2)
        return slide - self._slides + half, slide

    def panes_in(self, window: int) -> tuple[int, int]:
        """Return the first and the last pane of a window."""
        if not self._rest:
            return window, window + self._slides - 1
        return 2 * window, 2 * (window + self._slides)

    def bounds(self, window: int) -> tuple[int, int]:
        """Return start and end of a window."""
        place = window * self.every
        return self.calendar.instant(place), self.calendar.instant(place + self.size)

    def is_real(self, window: int) -> bool:
        """Return True: all numbers are windows."""
        return True

    def ended(self, time: int) -> int:
        """Return the last window that ends at `time` or before."""
        return (self.calendar.place(time) - self.size) // self.every

    def kept_from(self, time: int) -> int:
        """Return the first pane of the first window that ends after `time`."""
        return self.panes_in(self.ended(time) + 1)[0]


@dataclass(frozen=True, slots=True)
class CumulativeGrid:
    """Windows that begin together, every `steps * step` places, and each end a step later.

    A window has the number of its last pane.
    """

    calendar: Calendar
    steps: int
    step: int

    def panes_of(self, times: Timestamps) -> Numbers:
        """Return the pane of each instant."""
        places = self.calendar.places(times)
        return places if self.step == 1 else places // self.step

    def pane_of(self, time: int) -> int:
        """Return the pane of one instant."""
        return self.calendar.place(time) // self.step

    def pane_bounds(self, pane: int) -> tuple[int, int]:
        """Return start and end of a pane."""
        places = (pane * self.step, (pane + 1) * self.step)
        return self.calendar.instant(places[0]), self.calendar.instant(places[1])

    def windows_of(self, pane: int) -> tuple[int, int]:
        """Return the first and the last window of a pane."""
        return pane, self._first(pane) + self.steps - 1

    def panes_in(self, window: int) -> tuple[int, int]:
        """Return the first and the last pane of a window."""
        return self._first(window), window

    def bounds(self, window: int) -> tuple[int, int]:
        """Return start and end of a window."""
        return self.pane_bounds(self._first(window))[0], self.pane_bounds(window)[1]

    def is_real(self, window: int) -> bool:
        """Return False for steps that only a longer day has: no window ends with them."""
        start, end = self.pane_bounds(window)
        return start < end

    def ended(self, time: int) -> int:
        """Return the last window that ends at `time` or before."""
        return self.calendar.place(time) // self.step - 1

    def kept_from(self, time: int) -> int:
        """Return the first pane of the period that contains `time`."""
        return self._first(self.pane_of(time))

    def _first(self, pane: int) -> int:
        return pane // self.steps * self.steps


def windows_with(grid: Grid, panes: Iterable[int], low: int | None, high: int | None) -> list[int]:
    """Return the windows from `low` to `high` that have any of these panes, ascending; None: any."""
    windows: set[int] = set()
    for pane in panes:
        first, last = grid.windows_of(pane)
        first = first if low is None else max(first, low)
        windows.update(range(first, (last if high is None else min(last, high)) + 1))
    return [window for window in sorted(windows) if grid.is_real(window)]


Part: TypeAlias = tuple[int, slice | npt.NDArray[np.intp]]
"""A number and its rows."""


def split(numbers: Numbers) -> Iterator[Part]:
    """Yield the rows of each number, ascending, in order of arrival; slices if the numbers ascend."""
    low, high = int(numbers.min()), int(numbers.max())
    if low == high:
        yield low, slice(0, len(numbers))
        return
    order = None
    if not (numbers[1:] >= numbers[:-1]).all():
        # 16-bit numbers are sorted by radix
        order = np.argsort(
            (numbers - low).astype(np.uint16) if high - low < 2**16 else numbers, kind="stable"
        )
        numbers = numbers[order]
    cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
    for start, stop in pairwise(cuts):
        yield int(numbers[start]), slice(start, stop) if order is None else order[start:stop]
