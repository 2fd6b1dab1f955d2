"""Interval join: each row with the rows of the other stream that are near it in event time.

A left row at time t and a right row of the same key match if the time of the right one is in [t +
lower, t + upper], as in Flink; the result has the later of both times. A row first looks for
partners among the rows that wait. Then it waits itself until the watermark has passed the last time
that a partner can have. A row whose time is before the watermark is late (`<`, as in Flink: a row
exactly at the watermark is not).

Outer joins emit rows without a match when they stop waiting. Their time is before the watermark by
then, so the watermarks of outer joins trail those of the input by the length of the interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import numpy as np
import pyarrow as pa

from ...errors import PlanError
from ...state.aggregates.accumulators import Mask
from ...state.values import Index
from ..aggregation.keyed_aggregate import columns_of
from ..durations import Duration, format_duration, parse_duration
from ..elements import WATERMARK_MAX, Batch
from ..origin import Origin
from ..time_progress import clamped
from ..windows.windowed_aggregate import EMIT_ROWS_MAX
from .columns import LEFT, RIGHT
from .matching import Pairs, packed, unpacked
from .side import Side
from .step import JoinStep, WaitingRowsJoin, other


@dataclass(frozen=True, slots=True)
class Interval:
    """The distance of the right row's time from the left one's, ms; both bounds are inclusive."""

    lower_ms: int
    upper_ms: int

    def reach(self, side: int) -> tuple[int, int]:
        """Return the bounds of the other row's time, relative to a row of `side`."""
        if side == LEFT:
            return self.lower_ms, self.upper_ms
        return -self.upper_ms, -self.lower_ms

    def expired_before(self, side: int, watermark: int) -> int:
        """Return the time before which rows of `side` can only match rows that are late."""
        if watermark == WATERMARK_MAX:
            return WATERMARK_MAX
        return clamped(watermark - self.reach(side)[1])

    def delay(self, outer: Sequence[bool]) -> int:
        """Return how far unmatched rows of outer joins are behind the watermark when emitted, ms."""
        reaches = [self.reach(side)[1] + 1 for side in (LEFT, RIGHT) if outer[side]]
        return max([0, *reaches])


class IntervalJoin(WaitingRowsJoin):
    """Interval join."""

    kind = "interval join"

    def __init__(self, step: JoinStep, interval: Interval) -> None:
        expired_before = [partial(interval.expired_before, side) for side in (LEFT, RIGHT)]
        super().__init__(step, *expired_before, marks=step.outer)
        self._interval = interval
        self._delay_ms = interval.delay(step.outer)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        side, progress = input_index, self._progress
        groups = self._groups_of(side, columns_of(batch, self._step.name))
        rows, times = self._timely(batch, side, progress.now(groups), groups)
        if not rows.num_rows:
            return
        slots = self._keys.slots(self._columns.key_columns(side, rows))
        waits = times >= progress.expired(self._groups_of(side, rows), side)
        met = self._meet(side, rows, times, slots, waits)
        own = self._sides[side]
        if waits.all():
            own.add(rows, times, slots, self._keys.size, met)
        elif waits.any():
            which = np.flatnonzero(waits)
            part = rows.take(pa.array(which))
            own.add(part, times[which], slots[which], self._keys.size, met[which])
        self._settle_disk()

    def _meet(
        self, side: int, rows: pa.RecordBatch, times: Index, slots: Index, waits: Mask
    ) -> Mask:
        """Emit the pairs of new rows with rows that wait; return which new rows matched any."""
        met = np.zeros(len(times), np.bool_)
        marked = self._meet_on_disk(side, rows, times, met) if self._disk else None
        waiting, outer = self._sides[other(side)], self._step.outer
        for pairs in self._pairs(side, waiting, times, slots, self._keys.size):
            met[pairs.probe] = True
            if outer[side]:
                pairs = _with_lonely(pairs, waits, met)
            self._send_pairs(side, waiting, rows, times, pairs)
        if marked is not None:  # only now, as they have met already
            disk = self._disk[other(side)]
            disk.take_back(marked, self._keys.slots(disk.keys_of(marked)), self._keys.size)
        return met

    def _meet_on_disk(
        self, side: int, rows: pa.RecordBatch, times: Index, met: Mask
    ) -> pa.Table | None:
        """Emit the pairs of new rows with rows that wait on disk, and note which new rows matched any.

        Return the rows on disk that have matched for the first time, if they have marks.
        """
        disk, keys = self._disk[other(side)], self._columns.key_columns(side, rows)
        before, behind = self._interval.reach(side)
        found = disk.meeting(keys, int(times.min()) + before, int(times.max()) + behind)
        if found is None:
            return None
        waiting, stored, index = found
        _, _, matched = waiting.described(np.arange(waiting.size))
        slots = disk.slots(index, keys)
        for pairs in self._pairs(side, waiting, times, slots, index.size):
            met[pairs.probe] = True
            self._send_pairs(side, waiting, rows, times, pairs)
        _, _, now = waiting.described(np.arange(waiting.size))
        fresh = np.flatnonzero(now & ~matched)
        return stored.take(pa.array(fresh)) if fresh.size else None

    def _pairs(
        self, side: int, waiting: Side, times: Index, slots: Index, keys: int
    ) -> Iterator[Pairs]:
        """Yield the pairs of new rows with rows that wait, which are marked if they have marks."""
        before, behind = self._interval.reach(side)
        for pairs in waiting.chains.between(slots, times + before, times + behind, keys):
            if self._step.outer[other(side)]:
                waiting.mark(pairs.rows)
            yield pairs

    def _send_pairs(
        self, side: int, waiting: Side, rows: pa.RecordBatch, times: Index, pairs: Pairs
    ) -> None:
        for low in range(0, len(pairs.probe), EMIT_ROWS_MAX):
            probe = pairs.probe[low : low + EMIT_ROWS_MAX]
            partners = pairs.rows[low : low + EMIT_ROWS_MAX]
            self._send(
                side,
                rows.take(pa.array(probe)).columns,
                waiting.store.take(partners),
                np.maximum(times[probe], waiting.chains.times_at(partners)),
            )

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Drop rows that can match no more, emitting those of outer sides; then forward the watermark."""
        if self._progress.advance(timestamp):
            for side in (LEFT, RIGHT):
                self._let_go(side, self._progress.bounds[side])
            if self._keys.tidy():
                self._dropped()
        if timestamp != WATERMARK_MAX:
            timestamp = clamped(timestamp - self._delay_ms)
        self.output.emit_watermark(timestamp)

    def _let_go(self, side: int, before: int) -> None:
        if self._disk:
            for columns, times in self._disk[side].release(before):
                self._send(side, columns, None, times)
        own = self._sides[side]
        due = own.order.due(before)
        if not due.size:
            return
        if self._step.outer[side]:
            alone = own.unmarked(due)
            for low in range(0, len(alone), EMIT_ROWS_MAX):
                part = alone[low : low + EMIT_ROWS_MAX]
                self._send(side, own.store.take(part), None, own.chains.times[part])
        own.release(due)


def _with_lonely(pairs: Pairs, waits: Mask, met: Mask) -> Pairs:
    """Return the pairs, and with partner -1 those rows that matched none and will not wait."""
    stretch = slice(pairs.first, pairs.last)
    lonely = np.flatnonzero(~waits[stretch] & ~met[stretch]) + pairs.first
    if not lonely.size:
        return pairs
    # Partner numbers are one higher here, so that -1 sorts too; each such row has one entry.
    numbers = packed(
        np.append(pairs.probe, lonely), np.append(pairs.rows + 1, np.zeros_like(lonely))
    )
    numbers.sort()
    merged = unpacked(numbers, pairs.first, pairs.last)
    return Pairs(merged.probe, merged.rows - 1, pairs.first, pairs.last)


_FIX = 'such as within=("-10m", "0s"): the other row is up to ten minutes older'


def parse_interval(within: object, origin: Origin) -> Interval:
    """Parse the bounds given with `within=`.

    Raises:
        PlanError: not a pair, or the first is above the second.
        UsageError: a bound is no duration.
    """
    if not isinstance(within, tuple | list) or len(within) != 2:
        raise PlanError(
            f"within= needs a pair of durations value=`{within!r}`", where=str(origin), fix=_FIX
        )
    lower, upper = (_signed(bound, origin) for bound in within)
    if lower > upper:
        raise PlanError(
            f"within= ends before it begins value=`{within!r}`", where=str(origin), fix=_FIX
        )
    return Interval(lower, upper)


def show_interval(interval: Interval) -> str:
    """Format an interval, such as `-10m to 0s`."""
    return f"{format_duration(interval.lower_ms)} to {format_duration(interval.upper_ms)}"


def _signed(bound: Duration, origin: Origin) -> int:
    if isinstance(bound, timedelta) and bound < timedelta(0):
        return -parse_duration(-bound, "within", str(origin))
    if isinstance(bound, str) and bound.lstrip()[:1] in ("-", "+"):
        text = bound.lstrip()
        sign = -1 if text[0] == "-" else 1
        return sign * parse_duration(text[1:], "within", str(origin))
    return parse_duration(bound, "within", str(origin))
