"""Rows grouped by key, and the ranges of them that rows of the other side match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
