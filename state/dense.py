"""Slots of integer keys that lie close together: a plain array from key - base to slot.

Identifiers are often numbered one after the other. Then an array indexed by the key is the best index
there is: one gather per batch, no hash, no probing. `lookup` answers None as soon as the keys spread too
far for that; the caller moves on to the hash table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
        self._slots: Slots = np.empty(0, np.int32)

    def clear(self) -> None:
        """Forget all keys; keeps the memory."""
        self._slots.fill(-1)
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
        missing = np.flatnonzero(slots < 0)
        if not missing.size:
            return slots, missing
        where = at[missing]
        # Each row claims its key's entry, backwards, so that the first row of a key has it.
        claims = np.arange(missing.size, dtype=np.int32)
        self._slots[where[::-1]] = claims[::-1]
        won = self._slots.take(where) == claims
        fresh = missing[won]
        self._slots[where[won]] = np.arange(self.size, self.size + fresh.size, dtype=np.int32)
        self.size += fresh.size
        slots[missing] = self._slots.take(where)
        return slots, fresh

    def _cover(self, low: int, high: int, rows: int) -> bool:
        """Make room for keys from `low` to `high`; False if that would be too much."""
        room = len(self._slots)
        if self.size and low >= self._base and high < self._base + room:
            return True
        if self.size:
            low, high = min(low, self._base), max(high, self._base + room - 1)
        span = high - low + 1
        if span > max(SPAN_ALWAYS, SPAN_PER_KEY * max(self.size, rows)):
            return False
        if not self.size and span <= room:
            self._base = _centred(low, span, room)
            return True
        # Half as much again, so that keys that grow by and by do not make a copy per batch.
        larger = np.full(max(span + span // 2, 1024), -1, np.int32)
        base = _centred(low, span, len(larger))
        if self.size:
            offset = self._base - base
            larger[offset : offset + room] = self._slots
        self._base, self._slots = base, larger
        return True


def _centred(low: int, span: int, room: int) -> int:
    """A base that leaves a quarter of the free room below `low`, the rest above: keys mostly grow."""
    base = low - (room - span) // 4
    smallest, largest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    return int(max(smallest, min(base, largest - room + 1)))
