"""Runs of rows by key, and the ranges in them that rows of the other side meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...state.values import Index

PAIRS_MAX = 1 << 20
"""Pairs are made about so many at a time (16 MiB)."""
_ROW_BITS = 32


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows that meet, by the probing row, then by the other one.

    `first` and `last` bound the probing rows these are all pairs of: first <= probe < last.
    """

    probe: Index
    rows: Index
    first: int
    last: int


def packed(probe: Index, rows: Index) -> Index:
    """Pairs as single numbers, which sort by `probe`, then by `rows` (below 2**32)."""
    return (probe << _ROW_BITS) | rows


def unpacked(pairs: Index, first: int, last: int) -> Pairs:
    """What `packed` made."""
    return Pairs(pairs >> _ROW_BITS, pairs & ((1 << _ROW_BITS) - 1), first, last)


def sorted_order(slots: npt.NDArray[np.integer]) -> Index:
    """The rows by slot, in their order within a slot. Sorting packed numbers is the fastest way."""
    numbers = packed(slots.astype(np.int64), np.arange(len(slots)))
    numbers.sort()
    return numbers & ((1 << _ROW_BITS) - 1)


def portions(counts: Index, most: int) -> Iterator[tuple[int, int]]:
    """Cut rows with so many pairs each into stretches of up to `most` pairs, but at least a row each."""
    ends = np.cumsum(counts)
    first, before = 0, 0
    while first < len(counts):
        last = int(np.searchsorted(ends, before + most, side="right"))
        last = max(last, first + 1)
        yield first, last
        first, before = last, int(ends[last - 1])


def expanded(low: Index, high: Index) -> tuple[Index, Index]:
    """All places of the ranges [low, high): which range each belongs to, and the place."""
    counts = high - low
    which = np.repeat(np.arange(len(low)), counts)
    places = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - low, counts)
    return which, places


def first_place(values: Index, low: Index, high: Index, bounds: Index, *, behind: bool) -> Index:
    """For each range [low, high) of `values`, which ascend in it, the first place at `bounds` or above.

    With `behind`, the first above. A binary search in all ranges at once.
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
    """Rows sorted by slot: where each slot's run is.

    Args:
        slots: of each row.
        size: how many slots there are.
    """

    def __init__(self, slots: npt.NDArray[np.integer], size: int) -> None:
        self.order = sorted_order(slots)
        counts = np.bincount(slots, minlength=size)
        self.ends: Index = np.cumsum(counts)
        self.starts: Index = self.ends - counts

    def pairs(self, slots: Index) -> Iterator[Pairs]:
        """All pairs of probing rows with these slots (-1: none) and the rows here, in portions."""
        known = slots >= 0
        low = np.where(known, self.starts[slots], 0)
        high = np.where(known, self.ends[slots], 0)
        for first, last in portions(high - low, PAIRS_MAX):
            which, places = expanded(low[first:last], high[first:last])
            yield Pairs(which + first, self.order[places], first, last)
