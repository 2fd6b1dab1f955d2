"""The numbering of event time that windows cut: plain milliseconds, or the days of a time zone.

A *place* is an integer that grows with time; windows have their sizes and bounds in places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol
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
