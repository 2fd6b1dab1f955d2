"""Arrays by slot: one entry or one list per slot, which grow without being copied once they are large.

A small `SlotArray` grows by doubling. Above `RESERVE_FROM` entries it moves, once, into a stretch of
address space that is large enough for a long time (anonymous memory, not backed by pages until they are
written). From then on growth is the first touch of further pages, a block at a time, so no batch waits
for a copy of the whole state.

In `SlotLists` the lists of all slots lie in one array. A list that has no room left moves behind the
others, into twice the room. Items that are written never change, so the start and the length of a list
describe its content for ever, even after more items have been added: a cut needs to keep nothing else.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from ..values import Array, Index

RESERVE_FROM = 1 << 18
"""Arrays with more entries than this lie in reserved address space."""
RESERVED_ENTRIES = 1 << 26
"""This many entries are reserved at first (512 MiB of addresses for 8-byte ones), then 8 times as many."""
_FILL_BLOCK = 1 << 14
_SMALLEST = 64
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def reserved_zeros(entries: int, dtype: Any) -> Array | None:
    """Return zeros that take memory only where they are written; None if the system refuses."""
    size = entries * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, ValueError, OverflowError):
        return None
    return np.frombuffer(memory, dtype)


def large_zeros(entries: int, dtype: Any) -> Array:
    """Return zeros. If they are many, memory is taken page by page as they are written."""
    zeros = reserved_zeros(entries, dtype) if entries > RESERVE_FROM else None
    return np.zeros(entries, dtype) if zeros is None else zeros


class SlotArray:
    """A growing array with an initial value per slot.

    Attributes:
        data: the entries; those from `filled` on mean nothing yet. Growth may replace it by another
            array, and does not change the old one.
        filled: how many entries hold the initial value or a written one; never fewer than were reserved.
    """

    __slots__ = ("_initial", "_zero", "data", "filled")

    def __init__(self, dtype: Any, initial: Any = 0) -> None:
        self._initial = initial
        self._zero = np.zeros(1, dtype).tobytes() == np.full(1, initial, dtype).tobytes()
        self.data: Array = np.full(_SMALLEST, initial, dtype)
        self.filled = _SMALLEST

    def reserve(self, size: int) -> None:
        """Make sure that there are entries 0 to `size` - 1."""
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

    def put(self, which: Index, values: Array) -> None:
        """Set some entries."""
        self.data[which] = values

    def empty_from(self, size: int) -> None:
        """Give all entries but the first `size` their initial value again."""
        self.data[size : self.filled] = self._initial

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
    """A growing list of Python objects with an entry per slot, None at first. Python extends it in place.

    Attributes:
        data: the entries; growth keeps the list object.
    """

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data: list[Any] = []

    def reserve(self, size: int) -> None:
        """Make sure that there are entries 0 to `size` - 1."""
        if size > len(self.data):
            self.data.extend([None] * (size - len(self.data)))

    def reset(self, size: int) -> None:
        """Give the first `size` entries their initial value again."""
        self.data[:size] = [None] * size

    def put(self, which: Index, values: Array) -> None:
        """Set some entries."""
        held = self.data
        for at, value in zip(which.tolist(), values.tolist(), strict=True):
            held[at] = value

    def empty_from(self, size: int) -> None:
        """Give all entries but the first `size` their initial value again."""
        self.data[size:] = [None] * (len(self.data) - size)

    @property
    def nbytes(self) -> int:
        """Memory in use, without the objects themselves."""
        return 8 * len(self.data)


def entries_of(data: Array | list[Any], which: Index | slice) -> Array:
    """Return a copy of some entries of `SlotArray.data` or `ObjectArray.data`."""
    if isinstance(data, list):
        values = data[which] if isinstance(which, slice) else [data[at] for at in which.tolist()]
        found: Array = np.empty(len(values), object)
        found[:] = values
        return found
    return data[which].copy() if isinstance(which, slice) else data.take(which)


class SlotRanks:
    """Numbers the distinct slots of a batch without sorting, so that arrays over them are short. It keeps
    scratch memory by slot.
    """

    def __init__(self) -> None:
        self._seen = SlotArray(np.int32)

    def of(self, slots: Index, size: int) -> tuple[Index, Index]:
        """Return the distinct slots, and for each row the number of its slot among them; all slots are
        below `size`.
        """
        self._seen.reserve(size)
        seen, order = self._seen.data, np.arange(len(slots), dtype=np.int32)
        seen[slots] = order
        unique = slots[seen.take(slots) == order]
        seen[unique] = order[: len(unique)]
        return unique, seen.take(slots).astype(np.intp)


class SlotLists:
    """Lists by slot.

    Attributes:
        starts, lengths: the position of each list in the array, and the number of its items.
        room: the number of items for which each list has room.
    """

    def __init__(self, dtype: Any = np.int64) -> None:
        self._dtype = dtype
        self.starts, self.lengths = SlotArray(np.int64), SlotArray(np.int64)
        self.room = SlotArray(np.int64)
        self._ranks = SlotRanks()
        self._items = SlotArray(dtype)
        self._used = 0

    def fields(self) -> list[SlotArray]:
        """Return the arrays by slot."""
        return [self.starts, self.lengths, self.room]

    def reserve(self, size: int) -> None:
        """Make sure that there are slots 0 to `size` - 1."""
        for array in self.fields():
            array.reserve(size)

    def append(self, slots: Index, items: Array) -> None:
        """Append `items[i]` to the list of `slots[i]`, in the order of the items."""
        if not len(slots):
            return
        unique, rank = self._ranks.of(slots, self.lengths.filled)
        counts = np.bincount(rank, minlength=len(unique))
        before = self.lengths.data.take(unique)
        after = before + counts
        full = after > self.room.data.take(unique)
        if full.any():
            self._move(unique[full], before[full], after[full])
        order = np.argsort(rank.astype(np.uint16) if len(unique) < 2**16 else rank, kind="stable")
        first = self.starts.data.take(unique) + before
        self._items.data[ranges(first, counts)] = items[order]
        self.lengths.data[unique] = after

    def _move(self, slots: Index, lengths: Array, wanted: Array) -> None:
        """Give these lists more room."""
        room = np.where(lengths > 0, 2 * wanted, wanted)
        ends = np.cumsum(room) + self._used
        starts = ends - room
        self._items.reserve(int(ends[-1]))
        held = self._items.data[ranges(self.starts.data.take(slots), lengths)]
        self._items.data[ranges(starts, lengths)] = held
        self.starts.data[slots], self.room.data[slots] = starts, room
        self._used = int(ends[-1])

    def items(self, starts: Array, lengths: Array) -> Array:
        """Return the items of lists with these starts and lengths, one list after the other."""
        return self._items.data[ranges(starts, lengths)]

    def of(self, slots: Index) -> tuple[Array, Array]:
        """Return the lengths of these lists, and their items, one list after the other."""
        lengths = self.lengths.data.take(slots)
        return lengths, self.items(self.starts.data.take(slots), lengths)

    def reset(self, size: int) -> None:
        """Forget the first `size` lists, which are all."""
        for array in self.fields():
            array.reset(size)
        self._items, self._used = SlotArray(self._dtype), 0

    @property
    def used(self) -> int:
        """The number of items for which the lists together have room."""
        return self._used

    def go_back(self, used: int) -> None:
        """Give away what lies behind the first `used` items: all lists are as they were before it came."""
        self._used = used

    @property
    def nbytes(self) -> int:
        """Memory of the items."""
        return self._used * self._items.data.itemsize


def ranges(starts: Array, lengths: Array) -> Index:
    """Return the ranges of `lengths[i]` numbers from `starts[i]` on, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    found: Index = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return found
