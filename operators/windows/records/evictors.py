"""Evictors leave records out of a window when it fires, or remove them afterwards.

A window with an evictor keeps all its records: nothing is combined on arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from ....errors import PlanError
from ...durations import Duration, parse_duration
from .window import Window, check_rows

T = TypeVar("T")


class TimedRecord(NamedTuple):
    """A record in a window with its event time in ms (None in a stream without event time)."""

    record: Any
    timestamp: int | None


class Evictor(Generic[T]):
    """Remove records from a window before or after its function sees them. Derive from it."""

    def evict_before(
        self, records: Sequence[TimedRecord], window: Window, watermark: int
    ) -> Sequence[TimedRecord]:
        """Return the records to pass to the window function; `records` are in order of arrival."""
        return records

    def evict_after(
        self, records: Sequence[TimedRecord], window: Window, watermark: int
    ) -> Sequence[TimedRecord]:
        """Return the records that the window keeps, out of those that its function got."""
        return records


class _Either(Evictor[T]):
    """An evictor that evicts before the function runs, unless told to evict afterwards."""

    def __init__(self, after: bool) -> None:
        self._after = after

    def evict_before(
        self, records: Sequence[TimedRecord], window: Window, watermark: int
    ) -> Sequence[TimedRecord]:
        return records if self._after else self._kept(records)

    def evict_after(
        self, records: Sequence[TimedRecord], window: Window, watermark: int
    ) -> Sequence[TimedRecord]:
        return self._kept(records) if self._after else records

    def _kept(self, records: Sequence[TimedRecord]) -> Sequence[TimedRecord]:
        raise NotImplementedError


class Count(_Either[Any]):
    """Keeps the `size` newest records, by arrival."""

    def __init__(self, size: int, *, after: bool = False) -> None:
        super().__init__(after)
        self._size = check_rows(size, "evictors.Count")

    def _kept(self, records: Sequence[TimedRecord]) -> Sequence[TimedRecord]:
        return records[-self._size :]


class Time(_Either[Any]):
    """Keeps records less than `span` older than the newest, or all of them without event time."""

    def __init__(self, span: Duration, *, after: bool = False) -> None:
        super().__init__(after)
        self._span_ms = parse_duration(span, "span of evictors.Time")

    def _kept(self, records: Sequence[TimedRecord]) -> Sequence[TimedRecord]:
        times = [timed.timestamp for timed in records if timed.timestamp is not None]
        if not times:
            return records
        cut = max(times) - self._span_ms
        return [timed for timed in records if timed.timestamp is None or timed.timestamp > cut]


class Delta(_Either[T]):
    """Keeps records that are nearer than `threshold` to the last one that arrived.

    Args:
        threshold: a limit in the unit of `distance`.
        distance: `(record, last record) -> number`.
        after: evict after the function has seen the records.
    """

    def __init__(
        self, threshold: float, distance: Callable[[T, T], float], *, after: bool = False
    ) -> None:
        super().__init__(after)
        if not callable(distance):
            raise PlanError(f"distance of evictors.Delta is not callable value=`{distance!r}`")
        self._threshold, self._distance = threshold, distance

    def _kept(self, records: Sequence[TimedRecord]) -> Sequence[TimedRecord]:
        if not records:
            return records
        last = records[-1].record
        return [t for t in records if self._distance(t.record, last) < self._threshold]
