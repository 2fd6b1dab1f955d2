"""One side of a join: the rows that wait, by key and by time, and consistent cuts of them.

Rows are only ever appended, marked as matched, or released. Released rows stay in place until they
outnumber the others; then the rest is compacted. A cut is the list of pieces and the size at the
barrier, neither of which changes any more. Only the marks change, and `state/slots/epochs.py` keeps them
as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ...state.aggregates.accumulators import Mask
from ...state.slots.arrays import SlotArray
from ...state.slots.epochs import (
    RESTORED_EPOCH,
    ChangedSlots,
    Field,
    KeptSlots,
    SlotCut,
    TableEpoch,
)
from ...state.slots.key_index import BatchKeys, KeyCut, KeyHasher, KeyIndex
from ...state.values import Index
from .matching import Chains
from .row_store import HeldRows, RowStore, TimeOrder, rows_of_pieces

DEAD_MIN: Final = 32_768
"""Fewer released rows than this are not worth a compaction."""
Alive = Callable[[Index, Index], Mask]
"""A function that says which rows, given by number and time, count at a cut."""


class Side:
    """The rows of one side that wait.

    Args:
        schema: the schema of the rows.
        marks: whether rows can be marked as matched.
    """

    def __init__(self, schema: pa.Schema, *, marks: bool) -> None:
        self.schema = schema
        self._marks = marks
        self.epoch = TableEpoch()
        self.next_id = 0
        """The number of the next row."""
        self._renew()

    def _renew(self) -> None:
        self.store = RowStore(self.schema)
        self.chains = Chains()
        self.order = TimeOrder()
        self.released = 0
        """The number of released rows that are still in place."""
        self._dead = SlotArray(np.bool_)
        self._ids = SlotArray(np.int64)
        self._matched = SlotArray(np.bool_)
        fields: list[Field] = [self._matched] if self._marks else []
        self._changes = ChangedSlots(self.epoch, lambda: fields)

    @property
    def size(self) -> int:
        """The number of rows in place, including released ones."""
        return self.store.size

    @property
    def live(self) -> int:
        """The number of rows that wait."""
        return self.size - self.released

    @property
    def row_bytes(self) -> int:
        """The bytes of the columns of the rows in place."""
        return self.store.nbytes

    @property
    def nbytes(self) -> int:
        """The memory in use, bytes."""
        marks = self._matched.nbytes if self._marks else 0
        flags = self._dead.nbytes + marks + self._changes.nbytes
        return self.store.nbytes + self.chains.nbytes + self._ids.nbytes + flags

    def add(
        self,
        rows: pa.RecordBatch,
        times: Index,
        slots: Index,
        keys: int,
        matched: Mask | None = None,
    ) -> None:
        """Append rows with the slots of their keys; there are `keys` slots now."""
        if not rows.num_rows:
            return
        ids = np.arange(self.next_id, self.next_id + rows.num_rows)
        self.next_id += rows.num_rows
        self._append(rows, times, slots, keys, ids, self.epoch.current, matched)

    def _append(
        self,
        rows: pa.RecordBatch | None,
        times: Index,
        slots: Index,
        keys: int,
        ids: Index,
        epochs: Any,
        matched: Mask | None,
    ) -> None:
        numbers = np.arange(self.chains.size, self.chains.size + len(times))
        if rows is not None:
            self.store.append(rows)
        self.chains.add(slots, times, keys)
        self.order.add(times, numbers)
        self._ids.reserve(self.chains.size)
        self._ids.data[numbers] = ids
        self._dead.reserve(self.chains.size)
        self._matched.reserve(self.chains.size)
        if self._marks and matched is not None:
            self._matched.data[numbers] = matched
        self._changes.mark(numbers, self.chains.size, epochs)

    def mark(self, rows: Index) -> None:
        """Mark rows, which may repeat, as matched."""
        fresh = rows[~self._matched.data[rows]]
        if fresh.size:
            self._changes.touch(fresh, self.chains.size)
            self._matched.data[fresh] = True

    def unmarked(self, rows: Index) -> Index:
        """Return those of some rows that are not marked."""
        return rows[~self._matched.data[rows]]

    def described(self, rows: Index) -> tuple[Index, Index, Mask]:
        """Return the ids, times and marks of some rows."""
        return self._ids.data[rows], self.chains.times[rows], self._matched.data[rows]

    # --- release ----------------------------------------------------------------------------------

    def release(self, rows: Index) -> None:
        """Release rows, each of which was waiting until now."""
        self._dead.data[rows] = True
        self.released += len(rows)

    def alive(self) -> Index:
        """Return the rows that wait, ascending."""
        return np.flatnonzero(~self._dead.data[: self.size])

    def held(self) -> HeldRows:
        """Return the rows that wait."""
        rows = self.alive()
        ids, times, matched = self.described(rows)
        return HeldRows(self.store, rows, ids, times, matched if self._marks else None)

    def dead(self) -> Mask:
        """Return which rows are released, as a copy."""
        return self._dead.data[: self.size].copy()

    @property
    def wasteful(self) -> bool:
        """Return True if more rows are released than wait."""
        return self.released > max(DEAD_MIN, self.live)

    def compact(self, alive: Index, slots: Index, keys: int) -> None:
        """Drop all rows but `alive()`, which get these slots of `keys`."""
        store, chains, order = self.store, self.chains, self.order
        ids, matched = self._ids.data[alive], self._matched.data[alive]
        epochs = self._changes.epochs_of(alive)
        times = chains.times[alive]
        numbers = np.full(chains.size, -1, np.int64)
        numbers[alive] = np.arange(len(alive))
        self._renew()
        self.store = store.kept(alive)
        if len(alive):
            self._append(None, times, slots, keys, ids, epochs, matched)
        order.renumber(numbers)
        self.order = order

    # --- snapshots -----------------------------------------------------------------------------

    def cut(self, alive: Alive) -> SideCut:
        """Return a consistent cut; `alive` tells, in any thread, which of its rows count."""
        epoch = self.epoch.cut()
        return SideCut(
            epoch,
            self.schema,
            self.store.pieces,
            self._ids.data[: self.size],
            self.chains.times,
            self._changes.cut(epoch, self.size),
            alive,
        )

    def load(
        self,
        rows: pa.RecordBatch,
        times: Index,
        slots: Index,
        keys: int,
        ids: Index,
        matched: Mask | None,
    ) -> None:
        """Restore rows; `epoch.restored()` was called before."""
        if rows.num_rows:
            self.next_id = max(self.next_id, int(ids.max()) + 1)
            self._append(rows, times, slots, keys, ids, RESTORED_EPOCH, matched)

    def keep(self, grew: Callable[[], None], keys: SharedKeys, alive: Alive) -> KeptSide:
        """Open a cut to which the rows can go back: that which the side has just counted.

        Args:
            grew: called now and then while old values come.
            keys: those of the rows.
            alive: tells which of the rows count at the cut.
        """
        changes = self._changes.keep(self.size, grew)
        return KeptSide(
            self, changes, keys, alive, self.chains, self._ids, self._dead, self._matched
        )

    def go_back(self, kept: KeptSide, keys: int) -> None:
        """Take over the rows of another side, as they were at a cut; only into an empty one.

        The slots of their keys are below `keys`.
        """
        kept.changes.go_back()
        kept.chains.go_back(kept.changes.size, keys)
        self.store = RowStore.of(self.schema, kept.pieces)
        self.chains, self._ids, self._dead = kept.chains, kept.ids, kept.dead
        self._matched = kept.matched
        fields: list[Field] = [self._matched] if self._marks else []
        self._changes = ChangedSlots(self.epoch, lambda: fields)
        self._changes.mark(slice(0, self.size), self.size, RESTORED_EPOCH)
        numbers = np.arange(self.size)
        gone = ~kept.alive(numbers, self.chains.times)
        self._dead.data[: self.size] = gone
        self._dead.empty_from(self.size)
        self.released = int(gone.sum())
        waiting = np.flatnonzero(~gone)
        self.order.add(self.chains.times[waiting], waiting)
        self.next_id = int(self._ids.data[waiting].max()) + 1 if waiting.size else 0


@dataclass(frozen=True, slots=True)
class SideCut:
    """The rows of a side at a cut. Call `rows` or `close` once, in any thread.

    Attributes:
        epoch: the number of the cut.
    """

    epoch: int
    _schema: pa.Schema
    _pieces: list[pa.RecordBatch]
    _ids: Index
    _times: Index
    _changes: SlotCut
    _alive: Alive

    def rows(self, since: int | None) -> tuple[pa.Table, Index, Index, Mask | None]:
        """Return the rows added or marked after cut `since`, or all for None, and close the cut.

        The result holds them, their ids, times and marks (None if they have no marks).
        """
        try:
            which = self._changes.slots(since)
            numbers = np.arange(which.stop) if isinstance(which, slice) else which
            numbers = numbers[self._alive(numbers, self._times[numbers])]
            marks = self._changes.values(numbers)
        finally:
            self.close()
        rows = rows_of_pieces(self._pieces, self._schema, numbers)
        return rows, self._ids[numbers], self._times[numbers], marks[0] if marks else None

    def close(self) -> None:
        """Close the cut without reading it."""
        self._changes.close()


class KeptSide:
    """A cut to which the rows of a side can go back.

    Numbers, times, keys and ids of rows never change, and pieces of their columns neither. What is dead is
    known from `alive`, and the chains of the rows are made again.

    Args:
        side: of which it is a cut.
        changes: the marks at the cut.
        keys: of the rows, those of both sides.
        alive: tells which of the rows count at the cut.
        chains, ids, dead, matched: of the side; it gets others when it is compacted.

    Attributes:
        pieces: the columns of the rows at the cut.
        index, keys_then: the keys, and what they were at the cut.
    """

    def __init__(
        self,
        side: Side,
        changes: KeptSlots,
        keys: SharedKeys,
        alive: Alive,
        chains: Chains,
        ids: SlotArray,
        dead: SlotArray,
        matched: SlotArray,
    ) -> None:
        self.changes, self.alive, self.chains = changes, alive, chains
        self.ids, self.dead, self.matched = ids, dead, matched
        self.pieces = side.store.pieces
        self.index = keys.index
        self.keys_then = keys.index.cut()
        self._side: Side | None = side
        self._keys: SharedKeys | None = keys

    @property
    def nbytes(self) -> int:
        """Roughly the memory of the old values, and of rows and keys that only the cut has."""
        size = self.changes.nbytes
        if self._side is not None and self._side.chains is not self.chains:
            size += sum(piece.nbytes for piece in self.pieces)
            size += self.chains.nbytes + self.ids.nbytes + self.dead.nbytes + self.matched.nbytes
        if self._keys is not None and self._keys.index is not self.index:
            size += self.index.used_bytes
        return size

    def close(self) -> None:
        """Note no more old values."""
        self._side = self._keys = None
        self.changes.close()


def not_before(time: int) -> Alive:
    """Return a function by which rows not older than `time` count."""
    return lambda _, times: times >= time


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
        self.index = KeyIndex(hasher)
        """The keys; another one after keys were forgotten."""

    @property
    def size(self) -> int:
        """The number of slots."""
        return self.index.size

    @property
    def nbytes(self) -> int:
        """The memory in use, bytes."""
        return self.index.nbytes + self.index.key_bytes

    def go_back(self, index: KeyIndex, then: KeyCut) -> None:
        """Take over the keys of another attempt, as they were at a cut; for both sides, if both do."""
        index.go_back(then)
        self.index = index

    def slots(self, columns: list[pa.Array]) -> Index:
        """Return the slot of each row's key; new keys get new slots."""
        found, _ = self.index.lookup_new(BatchKeys(self._hasher, columns), None)
        return found.astype(np.int64)

    def tidy(self) -> bool:
        """Compact rows and forget keys where that is worth it; return True if rows or slots changed."""
        if self.size > max(FORGET_MIN, 2 * sum(side.live for side in self._sides)):
            self._forget()
            return True
        wasteful = [side for side in self._sides if side.wasteful]
        for side in wasteful:
            alive = side.alive()
            side.compact(alive, side.chains.slots[alive], self.size)
        return bool(wasteful)

    def _forget(self) -> None:
        alive = [side.alive() for side in self._sides]
        slots = [side.chains.slots[rows] for side, rows in zip(self._sides, alive, strict=True)]
        used = np.unique(np.concatenate(slots))
        index = KeyIndex(self._hasher)
        numbers = np.zeros(self.size, np.int64)
        if used.size:
            keys = BatchKeys(self._hasher, self.index.take(used))
            numbers[used] = index.lookup(keys)
        self.index = index
        for side, rows, old in zip(self._sides, alive, slots, strict=True):
            side.compact(rows, numbers[old], index.size)
