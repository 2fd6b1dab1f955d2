"""A list of numbers per slot; all lists lie in one array, and grow a batch at a time.

A list that has no room left moves behind the others, into twice the room. What was written once never
changes, so the start and the length of a list say what it was, also after more came to it: that is all
that a cut needs to keep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import StateError
from .reserved import SlotArray
from .slot_ranks import SlotRanks
from .values import Array, Index


class SlotLists:
    """Lists by slot.

    Attributes:
        starts, lengths: where each list lies in the array, and how many items it has.
    """

    def __init__(self, dtype: Any = np.int64) -> None:
        self._dtype = dtype
        self.starts, self.lengths = SlotArray(np.int64), SlotArray(np.int64)
        self._room = SlotArray(np.int64)
        self._ranks = SlotRanks()
        self._items = SlotArray(dtype)
        self._used = 0

    def reserve(self, size: int) -> None:
        """Make sure of slots 0 to `size` - 1."""
        for array in (self.starts, self.lengths, self._room):
            array.reserve(size)

    def append(self, slots: Index, items: Array) -> None:
        """Add items to the ends of lists, in their order; `items[i]` to that of `slots[i]`."""
        if not len(slots):
            return
        unique, rank = self._ranks.of(slots, self.lengths.filled)
        counts = np.bincount(rank, minlength=len(unique))
        before = self.lengths.data.take(unique)
        after = before + counts
        full = after > self._room.data.take(unique)
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
        self.starts.data[slots], self._room.data[slots] = starts, room
        self._used = int(ends[-1])

    def items(self, starts: Array, lengths: Array) -> Array:
        """The items of lists that start there and have these lengths, one after the other."""
        return self._items.data[ranges(starts, lengths)]

    def of(self, slots: Index) -> tuple[Array, Array]:
        """The lengths of these lists, and their items one after the other."""
        lengths = self.lengths.data.take(slots)
        return lengths, self.items(self.starts.data.take(slots), lengths)

    def reset(self, size: int) -> None:
        """Forget the first `size` lists, which are all."""
        for array in (self.starts, self.lengths, self._room):
            array.reset(size)
        self._items, self._used = SlotArray(self._dtype), 0

    @property
    def nbytes(self) -> int:
        """Memory of the items."""
        return self._used * self._items.data.itemsize


def ranges(starts: Array, lengths: Array) -> Index:
    """The numbers of `lengths[i]` places from `starts[i]` on, one range after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    found: Index = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return found


def list_array(lengths: Array, items: pa.Array) -> pa.Array:
    """Lists of these lengths, of items that stand one after the other."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets), items)


def list_column(table: pa.Table, name: str, type_: pa.DataType) -> tuple[Array, pa.Array] | None:
    """The lengths and the items of a column of lists in a snapshot; None if it is not there.

    Raises:
        StateError: it is a column of another type.
    """
    if name not in table.column_names:
        return None
    column = table.column(name)
    if column.type != type_:
        raise StateError(
            f"the snapshot does not fit this aggregate column=`{name}` expected=`{type_}` "
            f"found=`{column.type}`",
            fix="keep aggregates as they were, or give the changed ones a new name",
        )
    lists = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), lists.flatten()
