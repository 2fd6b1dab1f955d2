"""Cells of count windows that do not fit into memory: a `CountTable` over sorted runs, with a row per cell.

Cells begin in a `CountTable` in memory, and move here once that has used up its part of the budget.
From then on such a table is the delta over the runs. A batch first fetches all cells of its keys from
the runs, and then goes on as in memory: rows are numbered, added and merged into results there.

**Finished cells.** Whether a cell is still needed depends on the number of its key's rows, which only
the newest cell of the key tells. So merges cannot find finished cells by themselves. The delta, which
has all cells of a key, deletes those that it has read from runs.

**Whole hashes.** Cells are fetched by the hash of their key, the first lane of their identity, and the
delta has all cells of a hash or none of them. `CountDelta.find` therefore goes by that lane alone, and
rows on disk whose hash is in the delta are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import pyarrow as pa

from ....errors import StateError
from ....state.hashing import Hashes, distinct
from ....state.runs.cut import decoded_meta
from ....state.slots.key_index import BatchKeys, KeyHasher, plain_column
from ....state.slots.table import Slots, SlotTable
from ....state.snapshot import DELETED_COLUMN, CollectedFiles, FilesCut, RestoredFiles
from ....state.values import Array, Index
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.spilling_group import AggregateSpace
from ...base import OperatorContext
from ...spilling_space import by_hash
from ..panes.table import state_table
from .table import CountTable

META_VERSION: Final = 1
FIRST_ROW: Final = pa.field("__first_row", pa.int64(), False)
"""The number of a cell's first row among the rows of its key."""
ROWS: Final = "__rows"
"""The aggregate that counts the rows of a cell."""
_HASH_BYTES: Final = 8 + 4 * 6
"""The bytes of a hash in a `SlotTable`."""
NewTable = Callable[[KeyHasher], CountTable]
"""Returns an empty table with this hasher of keys."""


class CountsMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the files of a cut.

    Attributes:
        pane_rows: the number of rows of a pane.
        runs: the description of the runs.
    """

    version: int
    pane_rows: int
    runs: bytes


class CountDelta:
    """The cells that are not in runs: for each hash of a key all of its cells."""

    def __init__(
        self, plan: AggregatePlan, space: AggregateSpace, new_cells: Callable[[], CountTable]
    ) -> None:
        self._plan, self._space, self._new_cells = plan, space, new_cells
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
        cells = self.cells.written()
        return self._space.identify([*self._keys(cells), self._first_rows(cells)])

    def table(self, slots: Index) -> pa.Table:
        """Return some of the cells that are written; finished ones are deleted."""
        cells = self.cells.written()[slots]
        state = state_table(self._plan, self.cells.state, cells)
        columns = [*self._keys(cells), self._first_rows(cells), *state.columns]
        table = pa.Table.from_arrays(columns, schema=self._space.shape.schema)
        return table.append_column(DELETED_COLUMN, pa.array(~self.cells.alive()[cells]))

    def _keys(self, cells: Index) -> list[pa.Array]:
        return self.cells.keys.take(self.cells.cell_keys.data[cells])

    def _first_rows(self, cells: Index) -> pa.Array:
        return pa.array(self.cells.cell_panes.data[cells] * self.cells.pane_rows)

    def clear(self) -> None:
        """Forget all cells."""
        self.cells = self._new_cells()
        self._hashes.clear()


class SpillingCounts:
    """The cells of one subtask. All methods run in its mailbox, or in a thread that it waits for.

    Args:
        plan: keys and aggregates, with `FIRST_ROW` and `ROWS`.
        new_table: makes the tables of cells in memory.
        other_windows: returns the error for cells of windows of another size.

    Attributes:
        active: the cells are here, and no longer in a table in memory.
    """

    def __init__(
        self,
        plan: AggregatePlan,
        context: OperatorContext,
        name: str,
        new_table: NewTable,
        other_windows: Callable[[], StateError],
    ) -> None:
        self.active = False
        self._plan, self._other_windows = plan, other_windows
        self._space = space = AggregateSpace(plan, context, name, FIRST_ROW)
        self._table = space.new_table(
            lambda: CountDelta(plan, space, lambda: new_table(space.key_hasher))
        )

    # --- records -------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """The bytes that cells in memory may take."""
        return self._space.room

    @property
    def cells(self) -> CountTable:
        """The table to which rows are added now, until `settle`."""
        return self._table.delta.cells

    def take_over(self, table: CountTable) -> None:
        """Move the cells from memory to here."""
        self.active = True
        cells = table.written()
        state = state_table(self._plan, table.state, cells)
        keys = table.keys.take(table.cell_keys.data[cells])
        self.load(keys, table.cell_panes.data[cells], _numbers(state, ROWS), state)

    def load(self, keys: list[pa.Array], panes: Array, counts: Array, state: pa.Table) -> None:
        """Restore cells of keys that have none here."""
        for rows, hashes in by_hash(self._space.key_hasher.identify(keys)[0]):
            self._table.delta.claim(hashes)
            indices = pa.array(rows)
            part = [key.take(indices) for key in keys]
            self.cells.load(part, panes[rows], counts[rows], state.take(indices))
            self.settle()

    def fetch(self, keys: BatchKeys | None) -> None:
        """Load the cells of these keys; called before rows of theirs are added."""
        assert keys is not None
        delta, hashes = self._table.delta, keys.lanes(None)[0]
        hashes = distinct(hashes[delta.find(hashes, None) < 0])
        found = self._table.lookup_all(hashes)
        delta.claim(hashes)
        if found is not None:
            rows = found.table
            panes = _numbers(rows, FIRST_ROW.name) // self.cells.pane_rows
            counts = _numbers(rows, ROWS)
            delta.cells.load(self._space.keys_of(rows), panes, counts, rows, is_stored=True)

    def settle(self) -> None:
        """Enforce the memory budget; called after each batch.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        self._table.settle()

    # --- snapshots -----------------------------------------------------------------------------

    def snapshot(self) -> FilesCut:
        """Return a cut of all cells."""
        cut, pane_rows = self._table.snapshot(), self.cells.pane_rows

        def collect() -> CollectedFiles:
            collected = cut.collect()
            meta = CountsMeta(version=META_VERSION, pane_rows=pane_rows, runs=collected.meta)
            return CollectedFiles(collected.files, msgspec.msgpack.encode(meta))

        def tables() -> Iterator[pa.Table]:
            for rows in cut.tables():
                yield self._space.canonical(rows, [_numbers(rows, FIRST_ROW.name)])

        return replace(cut, collect=collect, tables=tables)

    def restore_files(self, restored: Sequence[RestoredFiles]) -> None:
        """Restore runs, before anything else.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
        """
        self.active = True
        runs = []
        for one in restored:
            meta = decoded_meta(one.meta, CountsMeta, META_VERSION, "count window")
            if meta.pane_rows != self.cells.pane_rows:
                raise self._other_windows()
            runs.append(replace(one, meta=meta.runs))
        self._table.restore_files(runs)

    def close(self) -> None:
        """Release files, memory and threads. Does not raise."""
        self._table.close()
        self._space.close()


def _numbers(rows: pa.Table, column: str) -> Array:
    numbers: Array = plain_column(rows.column(column)).to_numpy()
    return numbers
