"""Arrays with one entry per slot that grow without being copied once they are large.

A small array grows by doubling. Above `RESERVE_FROM` entries it moves, once, into a stretch of address
space that is large enough for long (anonymous memory, not backed by pages until they are written); from
then on growth is the first touch of further pages, a block at a time. So no batch waits for a copy of the
whole state.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from .values import Array, Index

RESERVE_FROM = 1 << 18
"""Arrays with more entries than this lie in reserved address space."""
RESERVED_ENTRIES = 1 << 26
"""So many entries are reserved at first (512 MiB of addresses for 8-byte ones), then 8 times as many."""
_FILL_BLOCK = 1 << 14
_SMALLEST = 64
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def reserved_zeros(entries: int, dtype: Any) -> Array | None:
    """Zeros that take memory only where they are written; None if the system refuses."""
    size = entries * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, ValueError, OverflowError):
        return None
    return np.frombuffer(memory, dtype)


def large_zeros(entries: int, dtype: Any) -> Array:
    """Zeros whose memory comes page by page as it is written, if they are many."""
    zeros = reserved_zeros(entries, dtype) if entries > RESERVE_FROM else None
    return np.zeros(entries, dtype) if zeros is None else zeros


class SlotArray:
    """A growing array with an initial value per slot.

    Attributes:
        data: the entries; those from `filled` on mean nothing yet. Growth may replace it by another
            array, and leaves the one before as it is.
        filled: entries that hold the initial value or what was written; never less than reserved.
    """

    __slots__ = ("_initial", "_zero", "data", "filled")

    def __init__(self, dtype: Any, initial: Any = 0) -> None:
        self._initial = initial
        self._zero = np.zeros(1, dtype).tobytes() == np.full(1, initial, dtype).tobytes()
        self.data: Array = np.full(_SMALLEST, initial, dtype)
        self.filled = _SMALLEST

    def reserve(self, size: int) -> None:
        """Make sure of entries 0 to `size` - 1."""
        if size <= self.filled:
            return
        if size > len(self.data):
            self._move(size)
        if size > self.filled:
            filled = min(size + _FILL_BLOCK, len(self.data))
            if not self._zero:
                self.data[self.filled : filled] = self._initial
            self.filled = filled

    def reset(self, size: int) -> None:
        """Give the first `size` entries their initial value again."""
        self.data[:size] = self._initial

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self.filled * self.data.itemsize

    def _move(self, size: int) -> None:
        before = self.data
        larger = None
        if size > RESERVE_FROM:
            entries = RESERVED_ENTRIES
            while entries < size:
                entries *= 8
            larger = reserved_zeros(entries, before.dtype)
        if larger is None:
            entries = max(size, 2 * len(before))
            larger = np.full(entries, self._initial, before.dtype)
            filled = entries
        else:
            filled = self.filled
        larger[: self.filled] = before[: self.filled]
        self.data, self.filled = larger, filled


class ObjectArray:
    """The same for Python objects, None at first; a list, which Python extends in place.

    Attributes:
        data: the entries; growth keeps the list.
    """

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data: list[Any] = []

    def reserve(self, size: int) -> None:
        """Make sure of entries 0 to `size` - 1."""
        if size > len(self.data):
            self.data.extend([None] * (size - len(self.data)))

    def reset(self, size: int) -> None:
        """Give the first `size` entries their initial value again."""
        self.data[:size] = [None] * size

    @property
    def nbytes(self) -> int:
        """Memory in use, without the objects themselves."""
        return 8 * len(self.data)


def entries_of(data: Array | list[Any], which: Index | slice) -> Array:
    """A copy of some entries of `SlotArray.data` or `ObjectArray.data`."""
    if isinstance(data, list):
        values = data[which] if isinstance(which, slice) else [data[at] for at in which.tolist()]
        found: Array = np.empty(len(values), object)
        found[:] = values
        return found
    return data[which].copy() if isinstance(which, slice) else data.take(which)
