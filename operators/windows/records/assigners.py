"""Window assigners decide which windows a record belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar

from ....errors import PlanError, UserCodeError
from ...durations import parse_duration
from ...time_range import INSTANT_TEXT, is_instant
from ..sessions.window import GAP_MS_MAX
from .triggers import EventTime, ProcessingTime, Trigger
from .window import GLOBAL, Window, WindowTime

T = TypeVar("T")


class WindowAssigner(Generic[T]):
    """Assign records to windows. Derive from it for your own windows; one instance serves all keys.

    Attributes:
        time: the clock that the windows follow, `event` or `processing`.
        merging: windows of one key that overlap or touch become one, as sessions do. Each record
            then has exactly one window.
    """

    time: WindowTime = "event"
    merging: ClassVar[bool] = False

    def assign(self, record: T, timestamp: int) -> Iterable[Window]:
        """Return the windows of a record. `timestamp` (ms) is its event time or the machine's time."""
        raise NotImplementedError

    def default_trigger(self) -> Trigger[Any] | None:
        """Return the trigger to use without `trigger=`; None if the user must give one."""
        return EventTime() if self.time == "event" else ProcessingTime()

    def describe(self) -> str:
        """Describe the assigner for `explain`."""
        return type(self).__name__

    @property
    def identity(self) -> str:
        """Return the text that must stay the same for stored state to be restored.

        It is made of the class and its plain attributes, which fix the bounds of the windows. The
        bounds of sessions come from their records, so the gap of a session may change.
        """
        plain = {} if self.merging else vars(self)
        sizes = [
            f"{k.lstrip('_')}={v}" for k, v in sorted(plain.items()) if isinstance(v, int | str)
        ]
        return " ".join([self.describe(), *sizes])


class Tumbling(WindowAssigner[Any]):
    """Windows of `size_ms`, one after the other."""

    def __init__(self, size_ms: int, offset_ms: int, time: WindowTime) -> None:
        self._size, self._offset, self.time = size_ms, offset_ms, time

    def assign(self, record: Any, timestamp: int) -> Iterable[Window]:
        start = timestamp - (timestamp - self._offset) % self._size
        return (Window(start, start + self._size),)


class Sliding(WindowAssigner[Any]):
    """Windows of `size_ms`, of which one begins every `every_ms`; `assign` gives the latest first."""

    def __init__(self, size_ms: int, every_ms: int, offset_ms: int, time: WindowTime) -> None:
        self._size, self._every, self._offset = size_ms, every_ms, offset_ms
        self.time = time

    def assign(self, record: Any, timestamp: int) -> Iterable[Window]:
        last = timestamp - (timestamp - self._offset) % self._every
        starts = range(last, timestamp - self._size, -self._every)
        return [Window(start, start + self._size) for start in starts]


class Cumulative(WindowAssigner[Any]):
    """Windows that begin together, every `size_ms`, and end `step_ms` apart."""

    def __init__(self, size_ms: int, step_ms: int, offset_ms: int) -> None:
        self._size, self._step, self._offset = size_ms, step_ms, offset_ms

    def assign(self, record: Any, timestamp: int) -> Iterable[Window]:
        since = (timestamp - self._offset) % self._size
        start = timestamp - since
        first = since - since % self._step + self._step
        return [Window(start, start + end) for end in range(first, self._size + 1, self._step)]


class Session(WindowAssigner[Any]):
    """Windows that reach from each record to a gap after it, and merge.

    Args:
        gap_ms: the same for all records, or a function of the record.
        time: the clock.
        step: the name of the step, for errors.
    """

    merging = True

    def __init__(
        self, gap_ms: int | Callable[[Any], Any], time: WindowTime, step: str = ""
    ) -> None:
        self._gap, self.time, self._step = gap_ms, time, step

    def assign(self, record: Any, timestamp: int) -> Iterable[Window]:
        gap = self._gap
        length = gap if isinstance(gap, int) else self._length(gap(record), record)
        return (Window(timestamp, timestamp + length),)

    def _length(self, gap: Any, record: Any) -> int:
        if isinstance(gap, str | timedelta):
            gap = parse_duration(gap, "session gap", self._step)
        if isinstance(gap, bool) or not isinstance(gap, int) or not 0 < gap <= GAP_MS_MAX:
            raise UserCodeError(
                f"the gap of a session must be a duration, or whole ms above 0 gap=`{gap!r}` "
                f"step=`{self._step}` record=`{record!r}`",
                fix='let the function return such as "30s" or 30_000 for every record',
            )
        return gap


class Global(WindowAssigner[Any]):
    """One window per key, without end; it needs a trigger."""

    time: WindowTime = "processing"

    def describe(self) -> str:
        return "global"

    def assign(self, record: Any, timestamp: int) -> Iterable[Window]:
        return (GLOBAL,)

    def default_trigger(self) -> Trigger[Any] | None:
        return None


def checked_windows(
    made: object, assigner: WindowAssigner[Any], step: str, record: Any
) -> list[Window]:
    """Check what a user's assigner returned, and return it as a list of windows.

    Raises:
        UserCodeError: the result is not made of valid windows.
    """
    windows: list[Any] = list(made) if isinstance(made, Iterable) else [made]
    for window in windows:
        if not isinstance(window, Window) or window.start >= window.end:
            raise UserCodeError(
                f"assign gave something else than windows got=`{window!r}` "
                f"assigner=`{type(assigner).__name__}` step=`{step}` record=`{record!r}`",
                fix="return a list of hg.Window(start, end), in ms, with start below end",
            )
        if not (window.is_global or (is_instant(window.start) and is_instant(window.end))):
            raise UserCodeError(
                f"assign gave a window out of {INSTANT_TEXT} got=`{window!r}` "
                f"assigner=`{type(assigner).__name__}` step=`{step}` record=`{record!r}`",
                fix="hg.global_window() is the window without end",
            )
    if assigner.merging and len(windows) > 1:
        raise UserCodeError(
            f"an assigner of merging windows gave {len(windows)} windows for a record "
            f"assigner=`{type(assigner).__name__}` step=`{step}` record=`{record!r}`",
            fix="give one window for each record",
        )
    return windows


def not_an_assigner(window: object, where: str) -> PlanError:
    """Return the error for a `window` argument that is no window."""
    return PlanError(
        f"not a window type=`{type(window).__name__}`",
        where=where,
        fix='such as hg.tumbling("1m"), hg.session("30m"), or an instance of your hg.WindowAssigner',
    )
