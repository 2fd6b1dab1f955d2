"""Panes that do not fit into memory: one table over sorted runs, with a row per key and pane.

Panes begin in a `PaneTable` in memory, which does less work per result, and move here once that has
used up its part of the budget.
Rows lie in the order of the hashes of their keys, so all panes of a key are side by side. A window that
fires reads the table from end to end, a piece at a time, and merges the panes of each key that are in
the window. Rows of expired panes are left out when runs are merged.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ....state.runs.cut import decoded_meta
from ....state.runs.layout import Records, RowLayout
from ....state.slots.key_index import BatchKeys, plain_column
from ....state.snapshot import CollectedFiles, FilesCut, RestoredFiles
from ....state.values import Array, Index
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedRows
from ...aggregation.spilling_group import AggregateSpace, SpillingGroup
from ...base import OperatorContext
from ...spilling_space import RESTORE_ROWS, ExpiryBound
from ..committed import CommittedWindows
from .early import ChangedRows
from .grid import Grid, Numbers, windows_with
from .table import PaneTable, state_table

META_VERSION: Final = 1
Bounds = Callable[[Array], list[Array]]
"""Returns start and end of panes, ms."""
Totals = tuple[list[pa.Array], list[pa.Array]]
"""Key columns, and a column per aggregate."""


class PanesMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the files of a cut.

    Attributes:
        panes: the numbers of the panes that may have rows.
        runs: the description of the runs.
    """

    version: int
    panes: list[int]
    runs: bytes


class SpillingPanes:
    """The panes of one subtask. All methods run in its mailbox, or in a thread that it waits for.

    Attributes:
        active: the panes are here, and no longer in a `PaneTable`.
        expiry: the number up to which panes have expired.
        changed: the cells of which early results are due.
    """

    def __init__(
        self, plan: AggregatePlan, context: OperatorContext, name: str, grid: Grid
    ) -> None:
        self._plan, self._grid, self.active = plan, grid, False
        names = {field.name for field in plan.state_schema}
        self._pane = "pane"
        while self._pane in names:
            self._pane += "_"
        field = pa.field(self._pane, pa.int64(), False)
        self.expiry = ExpiryBound(self._pane, context.max_parallelism)
        self._space = AggregateSpace(plan, context, name, field, expired=self.expiry)
        self._cells = SpillingGroup(self._space)
        self.changed = ChangedRows(self._cells.table, self._space)
        self._numbers: list[int] = []  # ascending

    def _panes_of(self, records: Records) -> npt.NDArray[np.int64]:
        return RowLayout.numbers(records, self._pane)

    # --- records -------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """The bytes that panes in memory may take."""
        return self._space.room

    def take_over(self, table: PaneTable, changed: Index) -> None:
        """Move the panes from memory to here; early results of the cells `changed` are due."""
        self.active = True
        self.expiry.move(table.expired)
        for number in table.numbers():
            (pane,) = table.between(number, number)
            keys, cells = pane.members()
            panes = np.full(len(keys), number, np.int64)
            self.load(table.key_columns(keys), panes, state_table(self._plan, table.state, cells))
        if changed.size:
            panes = pa.array(table.cell_panes.data[changed])
            columns = [*table.keys.take(table.cell_keys.data[changed]), panes]
            self.changed.add(*self._space.identify(columns))

    def add(self, rows: KeyedRows, panes: Numbers, old: CommittedWindows | None) -> Index:
        """Add rows to these panes. Return their cells, which are valid until `settle`.

        `old` keeps cells before they change.
        """
        group = self._cells.group
        keys = BatchKeys(self._space.hasher, [*rows.key_columns, pa.array(panes)])
        cells, fresh = group.slots_and_new(keys)
        if old is not None and old.keeps:
            self._keep(old, np.setdiff1d(cells, fresh), fresh)
        group.state.add(cells, rows.values, group.keys.size)
        self._note(np.unique(panes).tolist())
        return cells

    def _keep(self, old: CommittedWindows, held: Index, fresh: Index) -> None:
        """Keep cells that are about to change, and that new ones did not exist."""
        group, cells = self._cells.group, np.concatenate([held, fresh])
        *keys, panes = group.keys.take(cells)

        def read(places: Index) -> tuple[Index, list[pa.Array]]:
            owners = np.flatnonzero(places < len(held))
            return owners, group.state.columns(cells[places[owners]])

        old.keep(keys, plain_column(panes).to_numpy(), read)

    def _note(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self.next_from(number) != number:
                insort(self._numbers, number)

    def settle(self) -> None:
        """Enforce the memory budget; called after each batch.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        delta = self._cells.table.delta
        self._cells.settle()
        self.changed.after_write(delta)

    def keys_and_panes(self, cells: Index) -> tuple[list[pa.Array], Index]:
        """Return the keys of some cells, and their panes."""
        *columns, panes = self._cells.group.keys.take(cells)
        return columns, plain_column(panes).to_numpy()

    def take_changed(self) -> Iterator[tuple[list[pa.Array], Index]]:
        """Yield keys and panes of the cells of which early results are due; each is due once.

        All panes of a key are in one piece. No rows may be added meanwhile.
        """
        for rows in self.changed.take():
            panes = plain_column(rows.column(self._pane)).to_numpy()
            keys = self._space.keys_of(rows)
            kept = ~self.expiry.has_expired(self._space.key_hasher.identify(keys)[0], panes)
            yield [key.filter(pa.array(kept)) for key in keys], panes[kept]

    def next_from(self, first: int) -> int | None:
        """Return the number of the first pane from `first` on that may have rows."""
        at = bisect_left(self._numbers, first)
        return self._numbers[at] if at < len(self._numbers) else None

    def drop(self, kept: int) -> None:
        """Drop the panes before number `kept`."""
        self.expiry.move(max(self.expiry.limit, kept - 1))
        del self._numbers[: bisect_left(self._numbers, kept)]

    # --- results -------------------------------------------------------------------------------

    def totals(self, first: int, last: int) -> Iterator[Totals]:
        """Yield the totals of all keys over the panes `first` to `last`, in pieces.

        No rows may be added meanwhile.
        """
        for rows in self._rows_between(first, last):
            columns = self._space.keys_of(rows)
            slots = self._space.key_index(columns)[1]
            firsts, values = self._merged(rows, slots)
            indices = pa.array(firsts)
            yield [column.take(indices) for column in columns], values

    def cells_before(self, kept: int) -> Iterator[tuple[list[pa.Array], Numbers, list[pa.Array]]]:
        """Yield the cells of panes before number `kept`: keys, panes, and state columns.

        No rows may be added meanwhile.
        """
        if not self._numbers or self._numbers[0] >= kept:
            return
        for rows in self._rows_between(self._numbers[0], kept - 1):
            panes = plain_column(rows.column(self._pane)).to_numpy()
            names = self._plan.state_names
            yield self._space.keys_of(rows), panes, [plain_column(rows[name]) for name in names]

    def cells_of(self, columns: list[pa.Array]) -> Iterator[tuple[Index, Numbers, pa.Table]]:
        """Yield the cells of different keys, as `PaneTable.cells_of` does."""
        for pane in self._numbers:
            places, rows = self._cells_of(columns, pane)
            if len(places):
                yield places, np.full(len(places), pane), rows.select(self._plan.state_names)

    def _rows_between(self, first: int, last: int) -> Iterator[pa.Table]:
        """Yield the rows of the panes `first` to `last`; all rows of a hash are in one piece."""

        def wanted(records: Records) -> npt.NDArray[np.bool_]:
            panes = self._panes_of(records)
            return (panes >= first) & (panes <= last)

        group = self._cells.group
        held, hashes = np.zeros(0, np.intp), np.zeros(0, np.uint64)
        if group.keys.size:
            panes = plain_column(group.keys.keys()[-1]).to_numpy()
            held = np.flatnonzero((panes >= first) & (panes <= last))
            hashes = self._cells.table.delta.lanes()[0][held]
        return self._cells.table.scan(held, hashes, wanted)

    def _merged(self, rows: pa.Table, slots: Index) -> tuple[Index, list[pa.Array]]:
        """Return a row of each slot, and the result of merging all its rows in the order of panes."""
        panes = plain_column(rows.column(self._pane)).to_numpy()
        order = np.lexsort((panes, slots))
        keys = slots[order]
        begins = np.concatenate([[True], keys[1:] != keys[:-1]])
        firsts, others = np.flatnonzero(begins), np.flatnonzero(~begins)
        into = firsts[np.cumsum(begins)[others] - 1]
        values = self._space.results(rows.take(pa.array(order)), (firsts, others, into))
        return order[firsts], values

    def results_of(
        self, columns: list[pa.Array], panes: Index, low: int, high: int | None
    ) -> Iterator[tuple[int, list[pa.Array], list[pa.Array]]]:
        """Yield windows `low` to `high` with the keys that have these panes of the window, and totals."""
        windows = windows_with(self._grid, np.unique(panes).tolist(), low, high)
        if not windows:
            return
        index, which = self._space.key_index(columns)
        found: dict[int, tuple[Index, pa.Table]] = {}
        for window in windows:
            first, last = self._grid.panes_in(window)
            touched = np.unique(which[(panes >= first) & (panes <= last)])
            parts: list[tuple[Index, pa.Table]] = []
            for pane in self._numbers[bisect_left(self._numbers, first) :]:
                if pane > last:
                    break
                if pane not in found:
                    found[pane] = self._cells_of(index.keys(), pane)
                parts.append(found[pane])
            slots = np.concatenate([part[0] for part in parts])
            rows = pa.concat_tables([part[1] for part in parts])
            kept = np.flatnonzero(np.isin(slots, touched))
            firsts, values = self._merged(rows.take(pa.array(kept)), slots[kept])
            yield window, index.take(slots[kept][firsts]), values

    def panes_with(self, columns: list[pa.Array]) -> Index:
        """Return the panes that have one key."""
        found = [pane for pane in self._numbers if len(self._cells_of(columns, pane)[0])]
        return np.array(found, np.int64)

    def keys_now(self) -> tuple[Iterator[list[pa.Array]], Callable[[], None]]:
        """Return the keys, once for each of their panes; see `SpillingGroup.keys_now`."""
        return self._cells.keys_now()

    def _cells_of(self, keys: list[pa.Array], pane: int) -> tuple[Index, pa.Table]:
        """Return the positions of those keys that a pane has, and their rows."""
        columns = [*keys, pa.array(np.full(len(keys[0]), pane))]
        hashes, checks = self._space.identify(columns)
        table = self._cells.table
        cells = table.delta.find(hashes, checks)
        held, rest = np.flatnonzero(cells >= 0), np.flatnonzero(cells < 0)
        positions, tables = [held], [table.delta.table(cells[held].astype(np.intp))]
        found = table.lookup(hashes[rest], None if checks is None else checks[rest])
        if found is not None:
            positions.append(rest[found.positions])
            tables.append(found.table)
        return np.concatenate(positions), pa.concat_tables(tables)

    # --- snapshots -----------------------------------------------------------------------------

    def snapshot(self, bounds: Bounds) -> FilesCut:
        """Return a cut of all panes; `bounds` are the columns that canonical tables have of each."""
        numbers = list(self._numbers)
        delta = self._cells.table.delta
        cut = self._cells.table.snapshot(expired=self.expiry.now())
        self.changed.after_write(delta)

        def collect() -> CollectedFiles:
            collected = cut.collect()
            meta = PanesMeta(version=META_VERSION, panes=numbers, runs=collected.meta)
            return CollectedFiles(collected.files, msgspec.msgpack.encode(meta))

        def tables() -> Iterator[pa.Table]:
            for rows in cut.tables():
                edges = bounds(plain_column(rows.column(self._pane)).to_numpy())
                yield self._space.canonical(rows, edges)

        keys = (*self._plan.keys, *(field.name for field in self._plan.added))
        return msgspec.structs.replace(cut, collect=collect, tables=tables, keys=keys)

    def restore_files(self, restored: Sequence[RestoredFiles]) -> None:
        """Restore runs, before anything else.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
        """
        self.active = True
        runs = []
        for one in restored:
            meta = decoded_meta(one.meta, PanesMeta, META_VERSION, "pane")
            runs.append(msgspec.structs.replace(one, meta=meta.runs))
            self._note(number for number in meta.panes if number > self.expiry.limit)
        self._cells.restore_files(runs)

    def load(self, columns: list[pa.Array], panes: Numbers, state: pa.Table) -> None:
        """Restore cells, each of another key and pane, none of which is here."""
        group_of = self._cells
        for low in range(0, len(panes), RESTORE_ROWS):
            part = slice(low, low + RESTORE_ROWS)
            numbers = pa.array(panes[part])
            keys = [column.slice(low, len(numbers)) for column in columns]
            group = group_of.group
            cells = group.keys.lookup(BatchKeys(self._space.hasher, [*keys, numbers]))
            rows = state.slice(low, len(numbers))
            group.state.load(cells.astype(np.intp), rows, group.keys.size)
            self.settle()
        self._note(np.unique(panes).tolist())

    def close(self) -> None:
        """Release files, memory and threads. Does not raise."""
        self.changed.close()
        self._cells.close()
        self._space.close()
