"""The keys of a join, as slots that both sides share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ...state.slots.key_index import BatchKeys, KeyHasher, KeyIndex
from ...state.values import Index
from .side import Side

FORGET_MIN: Final = 65_536
"""Fewer keys without rows than this are not worth a clean-up."""


class SharedKeys:
    """Slots by key. Keys without waiting rows are forgotten together, once they are the majority.

    Args:
        hasher: hashes the keys.
        sides: the sides whose rows have these slots.
    """

    def __init__(self, hasher: KeyHasher, sides: Sequence[Side]) -> None:
        self._hasher, self._sides = hasher, sides
        self._index = KeyIndex(hasher)

    @property
    def size(self) -> int:
        """The number of slots."""
        return self._index.size

    @property
    def nbytes(self) -> int:
        """The memory in use, bytes."""
        return self._index.nbytes + self._index.key_bytes

    def slots(self, columns: list[pa.Array]) -> Index:
        """Return the slot of each row's key; new keys get new slots."""
        found, _ = self._index.lookup_new(BatchKeys(self._hasher, columns), None)
        return found.astype(np.int64)

    def tidy(self) -> bool:
        """Compact rows and forget keys where that is worth it; return True if rows or slots changed."""
        if self.size > max(FORGET_MIN, 2 * sum(side.live for side in self._sides)):
            self._forget()
            return True
        wasteful = [side for side in self._sides if side.wasteful]
        for side in wasteful:
            alive = side.alive()
            side.keep(alive, side.chains.slots[alive], self.size)
        return bool(wasteful)

    def _forget(self) -> None:
        alive = [side.alive() for side in self._sides]
        slots = [side.chains.slots[rows] for side, rows in zip(self._sides, alive, strict=True)]
        used = np.unique(np.concatenate(slots))
        index = KeyIndex(self._hasher)
        numbers = np.zeros(self.size, np.int64)
        if used.size:
            keys = BatchKeys(self._hasher, self._index.take(used))
            numbers[used] = index.lookup(keys)
        self._index = index
        for side, rows, old in zip(self._sides, alive, slots, strict=True):
            side.keep(rows, numbers[old], index.size)
