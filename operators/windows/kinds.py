"""Windows: how a stream is cut into pieces.

`TumblingWindow`, `SlidingWindow` and `CumulativeWindow` cut event time; they are `PaneWindow`s:
made of panes, see `panes/`. A plain tumbling window also has the methods of its own operator,
`tumbling.py`. `CountWindow` and `GlobalWindow` have no times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from ...errors import PlanError
from ..durations import Duration, format_duration, parse_duration
from ..elements import Timestamps
from ..origin import Origin, capture_origin
from ..zones import check_zone
from .panes.grid import (
    DAY_MS,
    Calendar,
    CumulativeGrid,
    Grid,
    LocalDays,
    Milliseconds,
    Part,
    SlidingGrid,
    split,
)
from .records.window import WindowTime, is_processing

WINDOWS_PER_RECORD_MAX: Final = 100_000
"""The most windows that one record may be in: each gives a row per key, which multiplies the output.

It is no option of a job, because a window is made, and checked, before it belongs to a job.
"""
_Start = TypeVar("_Start", int, Timestamps)
WINDOW_FIELDS = (
    pa.field("window_start", pa.timestamp("ms", tz="UTC"), False),
    pa.field("window_end", pa.timestamp("ms", tz="UTC"), False),
)


@dataclass(frozen=True, slots=True)
class Early:
    """When early results are emitted, before a window closes; never, if both are 0.

    Attributes:
        every_ms: the interval, in processing time.
        rows: the number of rows of one subtask; results come at the end of a batch.
    """

    every_ms: int = 0
    rows: int = 0

    def __bool__(self) -> bool:
        return bool(self.every_ms or self.rows)

    def describe(self) -> str:
        """Describe the settings for `explain`, such as `, early every 10s`."""
        text = f", early every {format_duration(self.every_ms)}" if self.every_ms else ""
        return text + (f", early every {self.rows} rows" if self.rows else "")


NEVER: Final = Early()


class PaneWindow(Protocol):
    """Windows over event time that consist of panes.

    A window's result is due when the watermark reaches its end - 1; its state is kept, and late records
    update the result, until the watermark reaches end - 1 + `allowed_lateness_ms`.
    """

    @property
    def allowed_lateness_ms(self) -> int:
        """How long a window that has fired still takes records, ms."""
        ...

    @property
    def early(self) -> Early:
        """The settings of early results."""
        ...

    @property
    def identity(self) -> str:
        """The text that must stay the same for stored state to be restored: the bounds of windows."""
        ...

    def grid(self) -> Grid:
        """Return the panes."""
        ...

    def describe(self) -> str:
        """Describe the window for `explain`, such as `sliding 1m every 10s`."""
        ...


class _Shown:
    """The texts of windows of panes, made of their common fields."""

    __slots__ = ()

    offset_ms: int
    allowed_lateness_ms: int
    zone: str
    early: Early
    processing: bool = False

    @property
    def _bounds(self) -> str:
        """The bounds as text, such as `sliding 1m every 10s`."""
        raise NotImplementedError

    @property
    def _apart_ms(self) -> tuple[int, ...]:
        """The distances between the ends of windows, and of one end from 0."""
        raise NotImplementedError

    @property
    def ends_every_ms(self) -> int:
        """The ends of all windows in event time are multiples of this time; 0: it is not known."""
        return 0 if self.zone or self.processing else math.gcd(*self._apart_ms)

    @property
    def identity(self) -> str:
        """The text that must stay the same for stored state to be restored: the bounds of windows."""
        text = self._bounds
        if self.offset_ms:
            text += f", offset {format_duration(self.offset_ms)}"
        return f"{text}, zone {self.zone}" if self.zone else text

    def describe(self) -> str:
        """Describe the window for `explain`, such as `tumbling 1m, allowed lateness 5s`."""
        text = self.identity
        if self.allowed_lateness_ms:
            text += f", allowed lateness {format_duration(self.allowed_lateness_ms)}"
        return text + self.early.describe() + ", processing time" * self.processing


@dataclass(frozen=True, slots=True)
class TumblingWindow(_Shown):
    """Consecutive windows [start, start + size), in ms. In a time zone: whole days there."""

    size_ms: int
    offset_ms: int = 0
    allowed_lateness_ms: int = 0
    zone: str = ""
    early: Early = NEVER
    processing: bool = False

    @property
    def plain(self) -> bool:
        """True if all windows are equally long, and have no early results."""
        return not self.zone and not self.early

    @property
    def _bounds(self) -> str:
        return f"tumbling {format_duration(self.size_ms)}"

    @property
    def _apart_ms(self) -> tuple[int, ...]:
        return self.size_ms, self.offset_ms

    def grid(self) -> Grid:
        """Return the panes: each window is one."""
        calendar, unit = _calendar(self.zone, self.offset_ms)
        return SlidingGrid(calendar, self.size_ms // unit, self.size_ms // unit)

    # --- methods for plain windows ---------------------------------------------------------------

    def start_of(self, timestamp: int) -> int:
        """Return the start of the window of `timestamp`."""
        return timestamp - (timestamp - self.offset_ms) % self.size_ms

    def starts_of(self, timestamps: Timestamps) -> Timestamps:
        """Return the start of the window of each timestamp."""
        return timestamps - (timestamps - self.offset_ms) % self.size_ms

    def due_at(self, start: _Start) -> _Start:
        """Return the watermark that fires the window, and the event time of its results: end - 1."""
        return start + self.size_ms - 1

    def last_due(self, watermark: int) -> int:
        """Return the last start of windows that have fired."""
        return watermark - self.size_ms + 1

    def last_expired(self, watermark: int) -> int:
        """Return the last start of windows that have expired."""
        return self.last_due(watermark) - self.allowed_lateness_ms

    def first_kept(self, watermark: int) -> int:
        """Return the start of the earliest window that `watermark` has not dropped."""
        return self.first_behind(self.last_expired(watermark))

    def first_behind(self, time: int) -> int:
        """Return the start of the earliest window that starts after `time`."""
        return self.start_of(time) + self.size_ms

    def split(self, timestamps: Timestamps, earliest: int | None = None) -> Iterator[Part]:
        """Yield the rows of each window, earliest first; in order of arrival within a window.

        Rows are slices if the timestamps ascend, and for a batch within one window. `earliest` is
        the least timestamp, if it is known.
        """
        first = self.start_of(int(timestamps.min()) if earliest is None else earliest)
        if int(timestamps.max()) < first + self.size_ms:
            yield first, slice(0, len(timestamps))
            return
        for number, rows in split((timestamps - first) // self.size_ms):
            yield first + number * self.size_ms, rows


@dataclass(frozen=True, slots=True)
class SlidingWindow(_Shown):
    """Windows [start, start + size), one every `every`, in ms. In a time zone: whole days there."""

    size_ms: int
    every_ms: int
    offset_ms: int = 0
    allowed_lateness_ms: int = 0
    zone: str = ""
    early: Early = NEVER
    processing: bool = False

    @property
    def _bounds(self) -> str:
        return f"sliding {format_duration(self.size_ms)} every {format_duration(self.every_ms)}"

    @property
    def _apart_ms(self) -> tuple[int, ...]:
        return self.every_ms, self.offset_ms + self.size_ms

    def grid(self) -> Grid:
        """Return the panes."""
        calendar, unit = _calendar(self.zone, self.offset_ms)
        return SlidingGrid(calendar, self.size_ms // unit, self.every_ms // unit)


@dataclass(frozen=True, slots=True)
class CumulativeWindow(_Shown):
    """Windows that begin together, every `size`, and each end a `step` later, up to `size`, in ms."""

    size_ms: int
    step_ms: int
    offset_ms: int = 0
    allowed_lateness_ms: int = 0
    zone: str = ""
    early: Early = NEVER

    @property
    def _bounds(self) -> str:
        return f"cumulative {format_duration(self.size_ms)} by {format_duration(self.step_ms)}"

    @property
    def _apart_ms(self) -> tuple[int, ...]:
        return self.step_ms, self.size_ms, self.offset_ms

    def grid(self) -> Grid:
        """Return the panes: one per step."""
        if self.zone and self.step_ms < DAY_MS:
            days = LocalDays(self.zone, self.offset_ms, self.step_ms)
            return CumulativeGrid(days, self.size_ms // DAY_MS * days.places_per_day, 1)
        calendar, unit = _calendar(self.zone, self.offset_ms)
        return CumulativeGrid(calendar, self.size_ms // self.step_ms, self.step_ms // unit)


TimeWindow: TypeAlias = TumblingWindow | SlidingWindow | CumulativeWindow
"""The windows over event time whose bounds do not depend on the records."""


@dataclass(frozen=True, slots=True)
class CountWindow:
    """The last `size` records of a key, each time `every` more have come."""

    size: int
    every: int

    def describe(self) -> str:
        """Describe the window for `explain`, such as `count 100 every 10`."""
        text = f"count {self.size}"
        return text if self.every == self.size else f"{text} every {self.every}"


@dataclass(frozen=True, slots=True)
class GlobalWindow:
    """All records of a key; results are emitted early, and when the stream ends."""

    early: Early = NEVER

    def describe(self) -> str:
        """Describe the window for `explain`, such as `global, early every 10s`."""
        return f"global{self.early.describe()}"


Window: TypeAlias = TimeWindow | CountWindow | GlobalWindow


def tumbling(
    size: Duration,
    *,
    offset: Duration = "0s",
    allowed_lateness: Duration = "0s",
    zone: str | None = None,
    emit_every: Duration | None = None,
    emit_rows: int | None = None,
    time: WindowTime = "event",
) -> TumblingWindow:
    """Return windows of a fixed size, aligned with the epoch (UTC) plus `offset`.

    Args:
        size: length of a window.
        offset: shifts the bounds of all windows; less than the size.
        allowed_lateness: how long a window that has fired still takes records.
        zone: a time zone such as "Europe/Berlin": windows of whole days begin at midnight there
            (plus the offset), also when the clocks change.
        emit_every: emit early results at this processing-time interval.
        emit_rows: emit early results after this many rows of one subtask.
        time: `processing`: windows follow the machine's clock.

    Raises:
        UsageError: a duration that does not parse.
        PlanError: the size is 0, the offset is not below it, or the zone does not fit.
    """
    size_ms = _size(size, "tumbling")
    offset_ms = _offset(offset, size, zone)
    _check_zone(zone, size)
    lateness_ms = parse_duration(allowed_lateness, "allowed lateness")
    early = early_results(emit_every, emit_rows)
    processing = is_processing(time, allowed_lateness, zone, emit_every, emit_rows)
    return TumblingWindow(size_ms, offset_ms, lateness_ms, zone or "", early, processing)


def sliding(
    size: Duration,
    every: Duration,
    *,
    offset: Duration = "0s",
    allowed_lateness: Duration = "0s",
    zone: str | None = None,
    emit_every: Duration | None = None,
    emit_rows: int | None = None,
    time: WindowTime = "event",
) -> SlidingWindow:
    """Return windows of `size`, one starting at each `every`: a record is in several.

    See `tumbling`.

    Raises:
        UsageError: a duration that does not parse.
        PlanError: a size of 0, windows with gaps between them, or a zone that does not fit.
    """
    size_ms, every_ms = _size(size, "sliding"), parse_duration(every, "window slide")
    if not 0 < every_ms <= size_ms:
        raise PlanError(
            f"a sliding window must begin at least once in its size every=`{every}` size=`{size}`",
            fix='such as sliding("1m", "10s")',
        )
    _check_number(size_ms // every_ms, f"sliding({size!r}, {every!r})")
    offset_ms = _offset(offset, every, zone)
    _check_zone(zone, size, every)
    lateness_ms = parse_duration(allowed_lateness, "allowed lateness")
    early = early_results(emit_every, emit_rows)
    processing = is_processing(time, allowed_lateness, zone, emit_every, emit_rows)
    return SlidingWindow(size_ms, every_ms, offset_ms, lateness_ms, zone or "", early, processing)


def _check_number(windows: int, written: str) -> None:
    if windows > WINDOWS_PER_RECORD_MAX:
        raise PlanError(
            f"a record would be in up to {windows:,} windows of {written}, and at most "
            f"{WINDOWS_PER_RECORD_MAX:,} are possible",
            where=str(capture_origin()),
            fix="let windows begin, or grow, in larger steps",
        )


def check_window(window: object, origin: Origin) -> None:
    """Raise PlanError if `window` is a duration or a number instead of a window."""
    if isinstance(window, str | int | float | timedelta):
        raise PlanError(
            f"window needs a window, got {window!r}",
            where=str(origin),
            fix='such as hg.tumbling("1m"), hg.sliding("1m", "10s") or hg.count_window(100)',
        )


def cumulative(
    size: Duration,
    step: Duration,
    *,
    offset: Duration = "0s",
    allowed_lateness: Duration = "0s",
    zone: str | None = None,
    emit_every: Duration | None = None,
    emit_rows: int | None = None,
) -> CumulativeWindow:
    """Return windows that begin together, every `size`, and grow by `step`: totals since midnight, say.

    In a time zone, steps shorter than a day are counted from the beginning of the day there. See
    `tumbling`.

    Raises:
        UsageError: a duration that does not parse.
        PlanError: the size is no multiple of the step, or a zone that does not fit.
    """
    size_ms, step_ms = _size(size, "cumulative"), parse_duration(step, "window step")
    if step_ms <= 0 or size_ms % step_ms:
        raise PlanError(
            f"the size of a cumulative window must be a multiple of its step step=`{step}` "
            f"size=`{size}`",
            fix='such as cumulative("1d", "1h")',
        )
    _check_number(size_ms // step_ms, f"cumulative({size!r}, {step!r})")
    offset_ms = _offset(offset, size, zone)
    if zone is not None and step_ms < DAY_MS and DAY_MS % step_ms == 0:
        _check_zone(zone, size)
    else:
        _check_zone(zone, size, step)
    lateness_ms = parse_duration(allowed_lateness, "allowed lateness")
    early = early_results(emit_every, emit_rows)
    return CumulativeWindow(size_ms, step_ms, offset_ms, lateness_ms, zone or "", early)


def count_window(size: int, every: int | None = None) -> CountWindow:
    """Return windows of the last `size` records of each key, by arrival, at every `every` records.

    Args:
        size: records in a window.
        every: records between two results; without it windows do not overlap.

    Raises:
        PlanError: not numbers of records.
    """
    every = size if every is None else every
    for what, value in (("size", size), ("every", every)):
        if not _is_count(value):
            raise PlanError(
                f"a count window needs a number of records {what}=`{value}`",
                fix="such as count_window(100), or count_window(100, 10)",
            )
    return CountWindow(size, every)


def global_window(
    *, emit_every: Duration | None = None, emit_rows: int | None = None
) -> GlobalWindow:
    """Return the window of all records of each key; the result is emitted when the stream ends.

    Args:
        emit_every: also emit early results at this processing-time interval.
        emit_rows: also emit early results after this many rows of one subtask.

    Raises:
        UsageError: a duration that does not parse.
        PlanError: 0, or not a number of rows.
    """
    return GlobalWindow(early_results(emit_every, emit_rows))


def early_results(emit_every: Duration | None, emit_rows: int | None) -> Early:
    """Return the early-result settings of a window's options.

    Raises:
        UsageError: a duration that does not parse.
        PlanError: 0, or not a number of rows.
    """
    every_ms = 0 if emit_every is None else parse_duration(emit_every, "emit_every")
    if emit_every is not None and every_ms <= 0:
        raise PlanError(f"emit_every must not be 0 value=`{emit_every}`", fix='such as "10s"')
    if emit_rows is not None and not _is_count(emit_rows):
        raise PlanError(
            f"emit_rows must be a number of rows value=`{emit_rows}`", fix="such as 1000"
        )
    return Early(every_ms, emit_rows or 0)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _size(size: Duration, kind: str) -> int:
    size_ms = parse_duration(size, "window size")
    if size_ms <= 0:
        example = "" if kind == "tumbling" else ', "10s"'
        raise PlanError(
            f"a window needs a size value=`{size}`", fix=f'such as {kind}("1m"{example})'
        )
    return size_ms


def _offset(offset: Duration, below: Duration, zone: str | None) -> int:
    offset_ms = parse_duration(offset, "window offset")
    if zone is not None and offset_ms >= DAY_MS:
        raise PlanError(
            f"the offset of a window in a zone must be less than a day offset=`{offset}`"
        )
    if offset_ms >= parse_duration(below):
        raise PlanError(
            f"the offset of a window must be less than its size offset=`{offset}` size=`{below}`"
        )
    return offset_ms


def _check_zone(zone: str | None, *lengths: Duration) -> None:
    if zone is None:
        return
    check_zone(zone)
    for length in lengths:
        if parse_duration(length) % DAY_MS:
            raise PlanError(
                f"windows in a time zone are whole days there length=`{length}` zone=`{zone}`",
                fix='such as tumbling("1d", zone=...); for hours leave zone out, or use offset',
            )


def _calendar(zone: str, offset_ms: int) -> tuple[Calendar, int]:
    """The calendar, and how many ms one of its places stands for."""
    return (LocalDays(zone, offset_ms), DAY_MS) if zone else (Milliseconds(offset_ms), 1)
