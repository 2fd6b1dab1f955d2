"""Panes: the pieces of event time between the bounds of windows, and the windows made of them.

Every window is a run of panes, so a record is added once, whatever the number of its windows. Panes
and windows are numbered in order of time. There are at most two panes for each start of a window,
even where the size is no multiple of the slide ("paired windows": Krishnamurthy, Wu, Franklin
2006); where it is one, panes are as long as the slide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...elements import Timestamps
from .calendar import Calendar, Numbers


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
