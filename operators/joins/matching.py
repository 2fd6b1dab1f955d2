"""Which rows match: rows grouped by key, the ranges of them that rows of the other side meet, and chains.

The rows of one side wait by key: each key has a chain from its newest row to its oldest. A batch
walks all its chains at once, one row of each chain per round. A few keys may have very long chains,
which would make many rounds of few rows. The rows of such keys are instead gathered, sorted by key
and time, and found by binary search. This looks at all rows once per batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...state.slots.arrays import SlotArray
from ...state.values import Index

PAIRS_MAX = 1 << 20
"""The number of pairs made at a time (16 MiB)."""
_ROW_BITS = 32


@dataclass(frozen=True, slots=True)
class Pairs:
    """Matching rows, sorted by the probing row, then by the other one.

    The pairs are all those of the probing rows first <= probe < last.
    """

    probe: Index
    rows: Index
    first: int
    last: int


def packed(probe: Index, rows: Index) -> Index:
    """Pack each pair into one number; these sort by `probe`, then by `rows` (below 2**32)."""
    return (probe << _ROW_BITS) | rows


def unpacked(pairs: Index, first: int, last: int) -> Pairs:
    """Unpack pairs made by `packed`."""
    return Pairs(pairs >> _ROW_BITS, pairs & ((1 << _ROW_BITS) - 1), first, last)


def sorted_order(slots: npt.NDArray[np.integer]) -> Index:
    """Return the rows by slot, in their order within a slot. Sorting packed numbers is fastest."""
    numbers = packed(slots.astype(np.int64), np.arange(len(slots)))
    numbers.sort()
    return numbers & ((1 << _ROW_BITS) - 1)


def portions(counts: Index, most: int) -> Iterator[tuple[int, int]]:
    """Cut rows with these counts of pairs into stretches of up to `most` pairs, at least one row each."""
    ends = np.cumsum(counts)
    first, before = 0, 0
    while first < len(counts):
        last = int(np.searchsorted(ends, before + most, side="right"))
        last = max(last, first + 1)
        yield first, last
        first, before = last, int(ends[last - 1])


def expanded(low: Index, high: Index) -> tuple[Index, Index]:
    """Return all places of the ranges [low, high): the range of each, and the place."""
    counts = high - low
    which = np.repeat(np.arange(len(low)), counts)
    places = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - low, counts)
    return which, places


def first_place(values: Index, low: Index, high: Index, bounds: Index, *, behind: bool) -> Index:
    """Return, for each range [low, high) of ascending `values`, the first place at `bounds` or above.

    With `behind`, the first place above. All ranges are searched at once, by bisection.
    """
    low, high = low.copy(), high.copy()
    left = np.flatnonzero(low < high)
    while left.size:
        middle = (low[left] + high[left]) >> 1
        found = values[middle]
        below = found <= bounds[left] if behind else found < bounds[left]
        low[left[below]] = middle[below] + 1
        high[left[~below]] = middle[~below]
        left = left[low[left] < high[left]]
    return low


class Runs:
    """Rows sorted by slot, with the place of each slot's run.

    Args:
        slots: the slot of each row.
        size: the number of slots.
    """

    def __init__(self, slots: npt.NDArray[np.integer], size: int) -> None:
        self.order = sorted_order(slots)
        counts = np.bincount(slots, minlength=size)
        self.ends: Index = np.cumsum(counts)
        self.starts: Index = self.ends - counts

    def pairs(self, slots: Index) -> Iterator[Pairs]:
        """Yield all pairs of probing rows with these slots (-1: none) and the rows here, in portions."""
        known = slots >= 0
        low = np.where(known, self.starts[slots], 0)
        high = np.where(known, self.ends[slots], 0)
        for first, last in portions(high - low, PAIRS_MAX):
            which, places = expanded(low[first:last], high[first:last])
            yield Pairs(which + first, self.order[places], first, last)


CHAIN_MAX: Final = 48
"""Longer chains are not walked."""
_NO_TIME: Final = np.iinfo(np.int64).min


class Chains:
    """Rows 0, 1, 2, … with the slot of their key and their time (ms)."""

    def __init__(self) -> None:
        self.size = 0
        self._times = SlotArray(np.int64)
        self._slots = SlotArray(np.int32)
        self._older = SlotArray(np.int32)
        self._newest = SlotArray(np.int32, -1)  # by slot
        self._counts = SlotArray(np.int64)

    @property
    def times(self) -> Index:
        """The times of all rows (a view)."""
        return self._times.data[: self.size]

    def times_at(self, rows: Index) -> Index:
        """Return the times of some rows; the smallest int64 for row -1."""
        if not self.size:
            return np.full(len(rows), _NO_TIME)
        return np.where(rows >= 0, self._times.data.take(rows, mode="clip"), _NO_TIME)

    @property
    def slots(self) -> Index:
        """The slots of all rows (a view)."""
        return self._slots.data[: self.size]

    @property
    def nbytes(self) -> int:
        """The memory in use, bytes."""
        arrays = (self._times, self._slots, self._older, self._newest, self._counts)
        return sum(array.nbytes for array in arrays)

    def add(self, slots: Index, times: Index, keys: int) -> None:
        """Append rows; there are `keys` slots now."""
        first, rows = self.size, len(slots)
        if not rows:
            return
        self.size = first + rows
        for by_row in (self._times, self._slots, self._older):
            by_row.reserve(self.size)
        self._reserve_keys(keys)
        self._times.data[first : self.size] = times
        self._slots.data[first : self.size] = slots
        order = sorted_order(slots)
        by_slot, numbers = slots[order], order + first
        begins = np.empty(rows, np.bool_)
        begins[0] = True
        np.not_equal(by_slot[1:], by_slot[:-1], out=begins[1:])
        older = np.empty(rows, np.int64)
        older[1:] = numbers[:-1]
        older[begins] = self._newest.data[by_slot[begins]]
        self._older.data[numbers] = older
        starts = np.flatnonzero(begins)
        lasts = np.append(starts[1:], rows) - 1
        self._newest.data[by_slot[lasts]] = numbers[lasts]
        self._counts.data[by_slot[lasts]] += lasts - starts + 1

    def _reserve_keys(self, keys: int) -> None:
        self._newest.reserve(keys)
        self._counts.reserve(keys)

    def go_back(self, size: int, keys: int) -> None:
        """Forget the rows from number `size` on; before they came there were `keys` slots."""
        self.size = size
        self._newest, self._counts = SlotArray(np.int32, -1), SlotArray(np.int64)
        self._reserve_keys(keys)
        self._newest.data[self.slots] = np.arange(size)  # of several rows the last one is assigned
        self._counts.data[:keys] = np.bincount(self.slots, minlength=keys)

    # --- who meets -----------------------------------------------------------------------------

    def between(self, slots: Index, low: Index, high: Index, keys: int) -> Iterator[Pairs]:
        """Yield pairs of probing rows and the rows here with their slot and a time in [low, high].

        The portions cover all probing rows, in order, whether or not they have a match.
        """
        self._reserve_keys(keys)
        counts = self._counts.data[slots]
        long = counts > CHAIN_MAX
        gathered = _Gathered(self, slots[long], keys) if long.any() else None
        if int(counts.sum()) <= PAIRS_MAX:
            stretches = iter([(0, len(slots))])
        else:
            if gathered is not None:
                counts = counts.copy()
                counts[long] = gathered.counts(slots[long], low[long], high[long])
            stretches = portions(counts, PAIRS_MAX)
        for first, last in stretches:
            short = np.flatnonzero(~long[first:last]) + first
            found = self._walked(short, slots, low, high)
            if gathered is not None:
                rest = np.flatnonzero(long[first:last]) + first
                found.append(gathered.between(rest, slots[rest], low[rest], high[rest]))
            pairs = np.concatenate(found) if found else np.zeros(0, np.int64)
            pairs.sort()
            yield unpacked(pairs, first, last)

    def _walked(self, probe: Index, slots: Index, low: Index, high: Index) -> list[Index]:
        """Return packed pairs, found by walking the chains of some probing rows."""
        rows = self._newest.data[slots[probe]]
        low, high = low[probe], high[probe]
        found: list[Index] = []
        left = rows >= 0
        while True:
            rows, probe, low, high = (each[left] for each in (rows, probe, low, high))
            if not rows.size:
                return found
            times = self._times.data.take(rows)
            meets = (times >= low) & (times <= high)
            found.append(packed(probe[meets], rows[meets]))
            rows = self._older.data.take(rows)
            left = rows >= 0

    def latest(self, slots: Index, times: Index, keys: int) -> Index:
        """Return, for each probing row, the latest row of its slot that is not after its time.

        Of equal times the newer row wins; -1 where there is none.
        """
        self._reserve_keys(keys)
        best = np.full(len(slots), -1, np.int64)
        long = self._counts.data[slots] > CHAIN_MAX
        if long.any():
            rest = np.flatnonzero(long)
            best[rest] = _Gathered(self, slots[rest], keys).latest(slots[rest], times[rest])
        probe = np.flatnonzero(~long)
        rows = self._newest.data[slots[probe]]
        while True:
            left = rows >= 0
            rows, probe = rows[left], probe[left]
            if not rows.size:
                return best
            found, known = self._times.data.take(rows), best[probe]
            # Chains go from newer to older: of equal times the first one found stays.
            better = (found <= times[probe]) & (
                (known < 0) | (found > self._times.data.take(known, mode="clip"))
            )
            best[probe[better]] = rows[better]
            rows = self._older.data.take(rows)


class _Gathered:
    """The rows of the keys with long chains, sorted by key and time."""

    def __init__(self, chains: Chains, slots: Index, keys: int) -> None:
        wanted = np.zeros(keys, np.bool_)
        wanted[slots] = True
        self._number = np.cumsum(wanted) - 1  # the number of each wanted slot
        rows = np.flatnonzero(wanted[chains.slots])
        rows = rows[np.argsort(chains.times[rows], kind="stable")]  # mostly sorted already
        numbers = self._number[chains.slots[rows]]
        self._rows = rows[sorted_order(numbers)]
        self._times = chains.times[self._rows]
        counts = np.bincount(numbers, minlength=int(wanted.sum()))
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

    def _ranges(self, slots: Index, low: Index, high: Index) -> tuple[Index, Index]:
        numbers = self._number[slots]
        starts, ends = self._starts[numbers], self._ends[numbers]
        first = first_place(self._times, starts, ends, low, behind=False)
        return first, first_place(self._times, first, ends, high, behind=True)

    def counts(self, slots: Index, low: Index, high: Index) -> Index:
        """Return the number of matches of each probing row."""
        first, last = self._ranges(slots, low, high)
        return last - first

    def between(self, probe: Index, slots: Index, low: Index, high: Index) -> Index:
        """Return packed pairs of the rows `probe`."""
        first, last = self._ranges(slots, low, high)
        which, places = expanded(first, last)
        return packed(probe[which], self._rows[places])

    def latest(self, slots: Index, times: Index) -> Index:
        """See `Chains.latest`."""
        numbers = self._number[slots]
        starts, ends = self._starts[numbers], self._ends[numbers]
        place = first_place(self._times, starts, ends, times, behind=True) - 1
        return np.where(place >= starts, self._rows[np.maximum(place, 0)], -1)
