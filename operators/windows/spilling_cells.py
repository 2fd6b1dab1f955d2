"""Cells of windows that do not fit into memory: a table of cells in memory over sorted runs.

A cell is the state of a key in a window, such as a session, and a row of the runs. Cells begin in a table
in memory, and move here once that has used up its part of the budget. From then on such a table is the
delta over the runs. A batch first fetches all cells of its keys from the runs, and then goes on as in
memory: cells are found, extended and merged into results there.

**Whole hashes.** Cells are fetched by the hash of their key, the first lane of their identity, and the
delta has all cells of a hash or none of them. `CellDelta.find` therefore goes by that lane alone, and
rows on disk whose hash is in the delta are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

import pyarrow as pa

from ...state.hashing import Hashes, distinct
from ...state.slots.key_index import BatchKeys
from ...state.slots.table import Slots, SlotTable
from ...state.snapshot import RestoredFiles
from ...state.values import Index
from ..aggregation.spilling_group import AggregateSpace
from ..spilling_space import by_hash

_HASH_BYTES: Final = 8 + 4 * 6
"""The bytes of a hash in a `SlotTable`."""


class CellTable(Protocol):
    """A table of cells in memory."""

    @property
    def used_bytes(self) -> int:
        """The bytes of the cells and their keys."""
        ...


C = TypeVar("C", bound=CellTable)


class CellDelta(Generic[C]):
    """The cells that are not in runs: for each hash of a key all of its cells.

    Args:
        new_cells: makes an empty table in memory.
    """

    def __init__(self, space: AggregateSpace, new_cells: Callable[[], C]) -> None:
        self._space, self._new_cells = space, new_cells
        self.cells = new_cells()
        self._hashes = SlotTable()

    @property
    def size(self) -> int:
        """The number of hashes."""
        return self._hashes.size

    @property
    def nbytes(self) -> int:
        """The bytes of the cells and their keys."""
        return self._hashes.size * _HASH_BYTES + self.cells.used_bytes if self.size else 0

    @property
    def held_bytes(self) -> int:
        """The bytes that are left after `clear`."""
        return self._hashes.nbytes

    def claim(self, hashes: Hashes) -> None:
        """Note that all cells of these hashes are here from now on."""
        self._hashes.lookup(hashes)

    def find(self, hashes: Hashes, checks: Hashes | None) -> Slots:
        """Return a number that is not negative for each hash that is here."""
        return self._hashes.find(hashes)

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """Return the identity of each cell that is written."""
        raise NotImplementedError

    def table(self, slots: Index) -> pa.Table:
        """Return some of the cells that are written."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all cells."""
        self.cells = self._new_cells()
        self._hashes.clear()


class SpillingCells(Generic[C]):
    """The cells of one subtask. All methods run in its mailbox, or in a thread that it waits for.

    Attributes:
        active: the cells are here, and no longer in a table in memory.
    """

    def __init__(self, space: AggregateSpace, new_delta: Callable[[], CellDelta[C]]) -> None:
        self.active = False
        self._space = space
        self._table = space.new_table(new_delta)

    @property
    def room(self) -> int:
        """The bytes that cells in memory may take."""
        return self._space.room

    @property
    def cells(self) -> C:
        """The table to which rows are added now, until `settle`."""
        return self._table.delta.cells

    def _claimed(self, keys: list[pa.Array]) -> Iterator[tuple[Index, list[pa.Array]]]:
        """Yield cells of keys that have none here, in parts: which ones, and their keys.

        The caller loads each part into `cells`.
        """
        for rows, hashes in by_hash(self._space.key_hasher.identify(keys)[0]):
            self._table.delta.claim(hashes)
            indices = pa.array(rows)
            yield rows, [key.take(indices) for key in keys]
            self.settle()

    def fetch(self, keys: BatchKeys | None) -> None:
        """Load the cells of these keys; called before rows of theirs are added."""
        assert keys is not None
        delta, hashes = self._table.delta, keys.lanes(None)[0]
        hashes = distinct(hashes[delta.find(hashes, None) < 0])
        rows = self._stored(hashes)
        delta.claim(hashes)
        if rows is not None:
            self._load_stored(rows)

    def _stored(self, hashes: Hashes) -> pa.Table | None:
        """Return the cells on disk of keys with these hashes; None if there are none."""
        found = self._table.lookup_all(hashes)
        return None if found is None else found.table

    def _load_stored(self, rows: pa.Table) -> None:
        """Load cells from disk into the table in memory."""
        raise NotImplementedError

    def settle(self) -> None:
        """Enforce the memory budget; called after each batch.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        self._table.settle()

    def restore_files(self, restored: Sequence[RestoredFiles]) -> None:
        """Restore runs, before anything else.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
        """
        self.active = True
        self._table.restore_files(restored)

    def close(self) -> None:
        """Release files, memory and threads. Does not raise."""
        self._table.close()
        self._space.close()
