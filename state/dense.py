"""Slots of integer keys that lie close together: a plain array from key - base to slot.

Identifiers are often numbered one after the other. Then an array indexed by the key is the best index
there is: one gather per batch, no hash, no probing. `lookup` answers None as soon as the keys spread too
far for that; the caller moves on to the hash table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .reserved import RESERVE_FROM, RESERVED_ENTRIES, reserved_zeros
from .slots import Rows, Slots

SPAN_ALWAYS = 1 << 18
"""Keys within a span of this many numbers are always close enough (1 MiB of slots)."""
SPAN_PER_KEY = 16
"""Beyond that the array may have this many entries per key, or per row of the batch."""


class DenseSlots:
    """Maps int64 keys to dense slots 0, 1, 2, …. Not thread-safe."""

    def __init__(self) -> None:
        self.size = 0
        self._base = 0
        self._low = self._high = 0  # of the keys so far
        self._slots: Slots = np.empty(0, np.int32)  # slot + 1 of key - base; 0: absent

    @property
    def nbytes(self) -> int:
        """Memory in use, at most."""
        return min(len(self._slots), self._high - self._low + 1) * self._slots.itemsize

    @property
    def memory(self) -> Slots:
        """The array this consists of."""
        return self._slots

    def clear(self) -> None:
        """Forget all keys; keeps the memory if it is little."""
        if len(self._slots) > SPAN_ALWAYS:
            self._slots = np.empty(0, np.int32)
        else:
            self._slots.fill(0)
        self.size = 0

    def lookup(self, keys: npt.NDArray[np.int64]) -> tuple[Slots, Rows] | None:
        """The slot of each row's key, and for each new slot, in order, a row that holds its key.

        None, with nothing changed, if the keys spread too far.
        """
        if not len(keys):
            return np.empty(0, np.int32), np.empty(0, np.intp)
        if not self._cover(int(keys.min()), int(keys.max()), len(keys)):
            return None
        at = keys - self._base
        slots = self._slots.take(at)
        slots -= 1
        missing = np.flatnonzero(slots < 0)
        if not missing.size:
            return slots, missing
        where = at[missing]
        # Each row claims its key's entry, backwards, so that the first row of a key has it.
        claims = np.arange(missing.size, dtype=np.int32)
        self._slots[where[::-1]] = claims[::-1]
        won = self._slots.take(where) == claims
        fresh = missing[won]
        new = np.arange(self.size + 1, self.size + 1 + fresh.size, dtype=np.int32)
        self._slots[where[won]] = new
        self.size += fresh.size
        slots[missing] = self._slots.take(where)
        slots[missing] -= 1
        return slots, fresh

    def _cover(self, low: int, high: int, rows: int) -> bool:
        """Make room for keys from `low` to `high`; False if that would be too much."""
        if self.size:
            low, high = min(low, self._low), max(high, self._high)
        span, room = high - low + 1, len(self._slots)
        if span > max(SPAN_ALWAYS, SPAN_PER_KEY * max(self.size, rows)):
            return False
        if not self.size and span <= room:
            self._base = _centred(low, span, room)
        elif low < self._base or high >= self._base + room:
            self._make_room(low, span)
        self._low, self._high = low, high
        return True

    def _make_room(self, low: int, span: int) -> None:
        """Move to a larger array that covers `span` keys from `low` on, and the old keys."""
        # Half as much again, so that keys that grow by and by do not make a copy per batch; if large, in
        # reserved address space, where what is not used costs nothing.
        larger = None
        if span > RESERVE_FROM:
            larger = reserved_zeros(max(RESERVED_ENTRIES, 8 * span), np.int32)
        if larger is None:
            larger = np.zeros(max(span + span // 2, 1024), np.int32)
        base = _centred(low, span, len(larger))
        if self.size:
            held = self._slots[self._low - self._base : self._high - self._base + 1]
            larger[self._low - base : self._low - base + len(held)] = held
        self._base, self._slots = base, larger


def _centred(low: int, span: int, room: int) -> int:
    """A base that leaves a quarter of the free room below `low`, the rest above: keys mostly grow."""
    base = low - (room - span) // 4
    smallest, largest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    return int(max(smallest, min(base, largest - room + 1)))
