"""Merges intervals of many keys at once, and finds late rows: numpy only, no state.

An interval [start, end) meets another if they overlap or touch, as sessions do: a record exactly
`gap` after the last one still belongs to the session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Times: TypeAlias = npt.NDArray[np.int64]
Index: TypeAlias = npt.NDArray[np.intp]
Mask: TypeAlias = npt.NDArray[np.bool_]
_BITS = 62


@dataclass(frozen=True, slots=True)
class Merged:
    """Components of intervals that meet, sorted by key and start.

    Attributes:
        component: the number of each interval's component.
        keys, starts, ends: of each component.
    """

    component: Index
    keys: Index
    starts: Times
    ends: Times


def merge_intervals(keys: Index, starts: Times, ends: Times) -> Merged:
    """Return the components of intervals; only intervals of one key can meet.

    Args:
        keys: numbers from 0, few more than there are intervals.
        starts: ms.
        ends: ms, each after its start.
    """
    low, bits = _span(starts, ends)
    shift = bits
    if bits + int(keys.max()).bit_length() > _BITS:
        times, places = np.unique(np.concatenate([starts, ends]), return_inverse=True)
        low_starts, low_ends = places[: len(starts)], places[len(starts) :]
        shift = max(1, len(times).bit_length())
    else:
        low_starts, low_ends = starts - low, ends - low
    high = keys.astype(np.int64) << shift
    packed = high | low_starts
    order = np.argsort(packed)
    packed = packed[order]
    # Keys are in the high bits, so a running maximum of ends never mixes keys.
    reach = np.maximum.accumulate((high | low_ends)[order])
    first = np.empty(len(order), np.bool_)
    first[0] = True
    np.greater(packed[1:], reach[:-1], out=first[1:])
    component = np.empty(len(order), np.intp)
    component[order] = np.cumsum(first) - 1
    at = np.flatnonzero(first)
    heads = order[at]
    last = np.append(at[1:], len(order)) - 1
    found = reach[last] & ((1 << shift) - 1)
    whole = found + low if shift == bits else times[found]
    return Merged(component, keys[heads], starts[heads], whole)


def _span(starts: Times, ends: Times) -> tuple[int, int]:
    """Return the least start, and the number of bits that all times need above it."""
    low = int(starts.min())
    return low, max(1, (int(ends.max()) - low).bit_length())


def accepted(keys: Index, starts: Times, ends: Times, first: Times, limit: int | Index) -> Mask:
    """Return which rows are not late, in order of arrival.

    A row whose own window has expired (its end is not above `limit`) is taken if it meets an open
    session, that is, one that ends above `limit`; it meets it if the session has begun by the end
    of the row's window. So of the sessions of a key only the least start counts, and each row that
    is taken may lower it for those after it. Such chains are followed in rounds, as many as the
    longest chain has links.

    Args:
        keys: the key of each row, as numbers from 0.
        starts: its time, ms.
        ends: of its own window.
        first: by key, the least start of its open sessions; the maximum of int64 where it has none.
        limit: sessions that end here or before have expired; one time, or one for each row.
    """
    taken: Mask = ends > limit
    open_ = np.flatnonzero(~taken)
    if not open_.size:
        return taken
    concerned = np.zeros(len(first), np.bool_)
    concerned[keys[open_]] = True
    rows = np.flatnonzero(concerned[keys])
    rows = rows[np.argsort(keys[rows], kind="stable")]
    least = _LeastBefore(keys[rows], first)
    mine, times, until = taken[rows], starts[rows], ends[rows]
    while True:
        fresh = ~mine & (until >= least(np.where(mine, times, _MAX)))
        if not fresh.any():
            break
        mine |= fresh
    taken[rows] = mine
    return taken


_MAX = np.iinfo(np.int64).max


class _LeastBefore:
    """The least of `first` and of some values of earlier rows of the same key, for each row."""

    def __init__(self, keys: Index, first: Times) -> None:
        heads = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        self._segment = np.cumsum(np.append(True, keys[1:] != keys[:-1])) - 1
        self._heads = heads
        self._first = first[keys[heads]]

    def __call__(self, values: Times) -> Times:
        # Ranks instead of times, and later segments lower: one running minimum serves all keys.
        known = np.concatenate([values, self._first])
        times, ranks = np.unique(known, return_inverse=True)
        width = len(times) + 1
        base = (len(self._heads) - 1 - self._segment) * width
        shifted = np.empty(len(values), np.int64)
        shifted[1:] = ranks[: len(values) - 1]
        shifted[self._heads] = ranks[len(values) :]
        least = np.minimum.accumulate(shifted + base) - base
        found: Times = times[least]
        return found
