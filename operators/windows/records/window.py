"""The window that functions of records see, and the clock that windows follow."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias

from ....errors import PlanError
from ...durations import Duration, parse_duration
from ...elements import WATERMARK_MAX, WATERMARK_MIN

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """The window [start, end), ms since 1970 UTC; or `GLOBAL`, which has no end."""

    start: int
    end: int

    @property
    def last(self) -> int:
        """The last ms of the window, which is the event time of its results."""
        return self.end - 1

    @property
    def is_global(self) -> bool:
        """True for the one window that holds all records of a key."""
        return self == GLOBAL

    @property
    def start_at(self) -> datetime:
        """The start as an aware datetime; `GLOBAL` has none."""
        return _EPOCH + timedelta(milliseconds=self.start)

    @property
    def end_at(self) -> datetime:
        """The end as an aware datetime; `GLOBAL` has none."""
        return _EPOCH + timedelta(milliseconds=self.end)

    def meets(self, other: Window) -> bool:
        """Return True if the two overlap or touch."""
        return self.start <= other.end and other.start <= self.end

    def cover(self, other: Window) -> Window:
        """Return the smallest window that holds both."""
        return Window(min(self.start, other.start), max(self.end, other.end))


GLOBAL: Final = Window(WATERMARK_MIN, WATERMARK_MAX)


def check_rows(size: int, what: str) -> int:
    """Return the number of records given to a trigger or an evictor, if it is at least 1."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise PlanError(f"{what} needs a number of records of at least 1 value=`{size!r}`")
    return size


WindowTime: TypeAlias = Literal["event", "processing"]


def is_processing(time: object, allowed_lateness: Duration, *others: object) -> bool:
    """Return True if the windows follow the machine's clock.

    Args:
        time: the value that the user gave.
        allowed_lateness: the value that the user gave; processing time has no lateness.
        others: options that exist in event time only, None where they were not given.

    Raises:
        PlanError: there is no such time, or it does not have these options.
    """
    if time not in ("event", "processing"):
        raise PlanError(f"the time of a window is event or processing value=`{time}`")
    if time == "event":
        return False
    late = parse_duration(allowed_lateness, "allowed lateness")
    if late or any(other is not None for other in others):
        raise PlanError(
            "windows in processing time have no lateness, zones and early results",
            fix="leave these options out; a trigger shows results early",
        )
    return True
