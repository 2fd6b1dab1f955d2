"""Aggregates over the last records of each key, after a fixed number of records: count windows.

A result is emitted with the record that completes its window, and has its event time. Time plays no
other role, so nothing is late. As in Flink, the first results of a key cover fewer records if
windows overlap.

The rows of a key are numbered. A pane is `gcd(size, every)` rows, so a result covers the key's last
panes, and is always due with the last row of one. A cell is the state of a key in a pane. A key without
cells that are still needed is forgotten, and its numbers restart: where one window ends another begins. A
snapshot has the number of rows of each cell as one more aggregate, which makes it complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...state.aggregates.accumulators import Mask
from ...state.aggregates.state import AggregateState
from ...state.hashing import Hashes
from ...state.runs.cut import decoded_meta
from ...state.slots.arrays import SlotArray
from ...state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ...state.slots.key_index import BatchKeys, KeyHasher, KeyIndex, plain_column
from ...state.snapshot import (
    DELETED_COLUMN,
    CollectedFiles,
    CommitPermit,
    FilesCut,
    KeptState,
    RestoredFiles,
    RestoredState,
    StateInfo,
    StateSnapshot,
)
from ...state.values import Array, Index
from ..aggregation.aggregate_tables import (
    CutPart,
    aggregate_info,
    files_of_another_backend,
    restored_rows,
    table_cut,
)
from ..aggregation.aggregates import Aggregate, AggregatePlan
from ..aggregation.keyed_aggregate import GroupCut, KeyedRows, Rows, columns_of, identity_seed
from ..aggregation.spilling_group import AggregateSpace, lies_on_disk
from ..base import OperatorContext
from ..elements import Batch, ColumnBatch
from ..rollback import Rollback
from ..spilling_space import SpillingOperator
from .kinds import CountWindow
from .panes.table import CellKeys, state_table
from .panes.totals import copied
from .spilling_cells import CellDelta, SpillingCells

_COUNTS: Final = "counts"
META_VERSION: Final = 1
FIRST_ROW: Final = pa.field("__first_row", pa.int64(), False)
"""The number of a cell's first row among the rows of its key."""
ROWS: Final = "__rows"
"""The aggregate that counts the rows of a cell."""
DEAD_MIN: Final = 16_384
"""Fewer finished cells than this are not worth a compaction."""
_ENTRIES_MAX: Final = 1 << 18
"""The number of copied cells merged at a time."""
_CELL_BYTES: Final = 8 + 8 + 8 + 1
_KEY_BYTES: Final = 8 + 8


class CountAggregate(SpillingOperator):
    """Aggregates over windows of a number of records, per key, or without keys over all records."""

    def __init__(self, window: CountWindow, plan: AggregatePlan, step: str = "window") -> None:
        assert not plan.added
        self._window, self._step = window, step
        self._result_schema = plan.result_schema
        aggregates = {**plan.aggregates, ROWS: Aggregate("count")}
        self._plan = AggregatePlan(plan.keys, aggregates, plan.schema, (FIRST_ROW,), plan.where)
        self._disk: SpillingCounts | None = None
        self._rollback: Rollback[KeptCounts] = Rollback.off()

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._in_memory = self._new_table(self._hasher)
        if lies_on_disk(self._plan, context):
            self._disk = SpillingCounts(
                self._plan, context, _COUNTS, self._new_table, self._other_windows
            )
        else:
            self._rollback = Rollback(context.options, _COUNTS, self._open_kept)

    def _new_table(self, hasher: KeyHasher) -> CountTable:
        return CountTable(self._window, self._plan, hasher, self._epoch)

    @property
    def _spilling(self) -> SpillingCounts | None:
        """The cells on disk if they are there, instead of `_in_memory`."""
        disk = self._disk
        return disk if disk is not None and disk.active else None

    @property
    def _table(self) -> CountTable:
        """The cells to which rows are added now; it may change with each `_settle`."""
        return self._in_memory if self._spilling is None else self._spilling.cells

    def _settle(self) -> None:
        """Enforce the memory budget; called after each batch."""
        disk = self._disk
        if disk is None:
            self._rollback.grew()  # cells that were moved stay in kept cuts
            return
        if disk.active:
            disk.settle()
        elif self._in_memory.used_bytes > disk.room:
            disk.take_over(self._in_memory)
            self._in_memory = self._new_table(self._hasher)

    def process(self, batch: Batch, input_index: int) -> None:
        data = columns_of(batch, self._step)
        if not data.num_rows:
            return
        rows = KeyedRows(self._plan, self._hasher, data, batch.timestamps)
        if self._spilling is not None:
            self._spilling.fetch(rows.keys)
        last, results = self._table.add(rows)
        if last.size:
            columns = [*rows.keys_at(last), *results[:-1]]
            found = pa.RecordBatch.from_arrays(columns, schema=self._result_schema)
            times = None if batch.timestamps is None else batch.timestamps[last]
            self.output.emit(ColumnBatch(found, times))
        self._settle()

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `counts`: one row per key and pane, always all of them; or its runs."""
        if self._spilling is not None:
            return StateSnapshot(files={_COUNTS: self._spilling.snapshot()})
        epoch, table = self._epoch.cut(), self._in_memory
        keys = table.keys.cut()
        pane, panes = table.pane_rows, table.cell_panes.data

        def first_rows(which: Rows) -> list[Array]:
            return [panes[which] * pane]

        cells = CellKeys(keys._pieces, keys.size, table.cell_keys.data)
        parts = [CutPart(GroupCut(cells, table.state.cut(epoch)), first_rows)]
        cut = table_cut(self._plan, epoch, parts, self.context.max_parallelism)
        cut.epoch = 0  # a delta could not tell which cells were dropped
        self._rollback.cut(checkpoint_id)
        return StateSnapshot(tables={_COUNTS: cut})

    def _open_kept(self) -> KeptCounts:
        """Open a cut to which the cells can go back; see `Rollback`."""
        return KeptCounts(self._in_memory, self._rollback.grew)

    def on_checkpoint_complete(self, permit: CommitPermit) -> None:
        self._rollback.completed(permit.checkpoint_id)

    def drop_point(self, checkpoint_id: int) -> None:
        self._rollback.aborted(checkpoint_id)

    def keep(self) -> dict[str, KeptState]:
        return self._rollback.keep()

    def states(self) -> Sequence[StateInfo]:
        """Return the declaration of table `counts`."""
        return [aggregate_info(self._plan, _COUNTS, "window")]

    @property
    def _uses_disk(self) -> bool:
        return self._disk is not None

    def _restore(self, state: RestoredState) -> None:
        """Restore the panes."""
        self._epoch.restored()
        if files := state.files.get(_COUNTS):
            if self._disk is None:
                raise files_of_another_backend(_COUNTS, self._step)
            self._disk.restore_files(files)
        kept = self._rollback.found(state)
        if kept is not None:
            self._in_memory.go_back(kept)
        table = state.tables.get(_COUNTS)
        if table is not None and table.num_rows:
            self._load(table, state.states.get(_COUNTS))
        self._rollback.restored(self.context.restored_checkpoint)

    def _load(self, table: pa.Table, info: StateInfo | None) -> None:
        rows = restored_rows(self._plan, table, info, self._step)
        first = plain_column(rows.column(FIRST_ROW.name)).to_numpy()
        counts = plain_column(rows.column(ROWS)).to_numpy()
        pane = self._in_memory.pane_rows
        if (first % pane != 0).any() or int(counts.max()) > pane:
            raise self._other_windows()
        columns = [plain_column(rows.column(key)) for key in self._plan.keys]
        panes = np.asarray(first // pane)
        if self._disk is not None and rows.nbytes > self._disk.room:
            self._disk.active = True
        if self._spilling is not None:
            self._spilling.load(columns, panes, counts, rows)
        else:
            self._in_memory.load(columns, panes, counts, rows)

    def _other_windows(self) -> StateError:
        return StateError(
            f"the snapshot has other windows new=`{self._window.describe()}`",
            where=self._step,
            fix="keep size and slide of the window, or give the step another name",
        )

    def close(self) -> None:
        self._rollback.close()
        if self._disk is not None:
            self._disk.close()


@dataclass(frozen=True, slots=True)
class _Placed:
    """The rows of a batch by key, in order of arrival; `order` maps them to their places in the batch."""

    order: Index
    slots: Index
    first: Index
    numbers: Array


class CountTable:
    """The keys, and a cell of state per key and pane.

    Attributes:
        state: the cells.
        cell_keys: the slot of each cell's key.
        cell_panes: the number of each cell's pane.
        pane_rows: the number of rows of a pane.
        is_stored: by cell: True if it was read from disk, where a finished cell must be deleted.
        before: by cell: that of the key's pane before + 1; 0: there is none.
        left: the number of cells that were restored, or left by the last compaction.
    """

    def __init__(
        self, window: CountWindow, plan: AggregatePlan, hasher: KeyHasher, epoch: TableEpoch
    ) -> None:
        self._size, self._every = window.size, window.every
        self.pane_rows = gcd(window.size, window.every)
        self._plan, self._hasher, self._epoch = plan, hasher, epoch
        self._results = plan.new_state(TableEpoch())  # scratch
        self._renew(KeyIndex(hasher))

    def _renew(self, keys: KeyIndex) -> None:
        self.keys = keys
        self.state: AggregateState = self._plan.new_state(self._epoch)
        self.cell_keys, self.cell_panes = SlotArray(np.intp), SlotArray(np.int64)
        self.before = SlotArray(np.int64)
        self._rows = SlotArray(np.int64)  # by key
        self._latest = SlotArray(np.int64)  # by key: its last cell + 1
        self.is_stored = SlotArray(np.bool_)
        self._cells = self._keys = 0
        self.left = 0

    @property
    def used_bytes(self) -> int:
        """The bytes that keys and cells take, without room to grow."""
        entries = self._cells * _CELL_BYTES + self._keys * _KEY_BYTES
        return self.keys.used_bytes + self.state.used_bytes + entries

    # --- rows ----------------------------------------------------------------------------------

    def add(self, rows: KeyedRows) -> tuple[Index, list[pa.Array]]:
        """Add rows; return those that complete a window, ascending, and the result columns."""
        placed = self._placed(rows)
        cells = self._cells_of(placed)
        by_row = np.empty(rows.size, np.intp)
        by_row[placed.order] = cells
        self.state.add(by_row, rows.values, self._cells)
        due = np.flatnonzero((placed.numbers + 1) % self._every == 0)
        due = due[np.argsort(placed.order[due])]
        results = self.results(cells[due])
        if self._cells - self.left >= max(DEAD_MIN, self.left):
            self._compact()
        return placed.order[due], results

    def _placed(self, rows: KeyedRows) -> _Placed:
        """Return the number of each row among those of its key."""
        if rows.keys is None:
            slots, size = np.zeros(rows.size, np.intp), 1
        else:
            slots, size = self.keys.lookup(rows.keys).astype(np.intp), self.keys.size
        self._rows.reserve(size)
        self._latest.reserve(size)
        self._keys = size
        order = np.argsort(slots.astype(np.uint16) if size < 2**16 else slots, kind="stable")
        slots = slots[order]
        starts = np.ones(len(slots), np.bool_)
        starts[1:] = slots[1:] != slots[:-1]
        first = np.maximum.accumulate(np.where(starts, np.arange(len(slots)), 0))
        numbers = self._rows.data[slots] + (np.arange(len(slots)) - first)
        self._rows.data[slots] = numbers + 1  # the last row of a key is written last
        return _Placed(order, slots, first, numbers)

    def _cells_of(self, placed: _Placed) -> Index:
        """Return the cell of each placed row, making those of new panes."""
        slots, first, numbers = placed.slots, placed.first, placed.numbers
        fresh = np.flatnonzero(numbers % self.pane_rows == 0)
        latest_fresh = np.full(len(slots), -1)
        latest_fresh[fresh] = np.arange(len(fresh))
        latest_fresh = np.maximum.accumulate(latest_fresh)
        here = np.zeros(len(slots), np.bool_)  # in a pane that began in this batch
        if fresh.size:
            here = (latest_fresh >= 0) & (fresh[latest_fresh] >= first)
        cells = np.where(here, self._cells + latest_fresh, self._latest.data[slots] - 1)
        new = np.arange(self._cells, self._cells + len(fresh))
        self._cells += len(fresh)
        for array in (self.cell_keys, self.cell_panes, self.before, self.is_stored):
            array.reserve(self._cells)
        self.cell_keys.data[new] = slots[fresh]
        self.cell_panes.data[new] = numbers[fresh] // self.pane_rows
        again = fresh > first[fresh]
        before = np.where(again, cells[fresh - 1] + 1, self._latest.data[slots[fresh]])
        self.before.data[new] = before
        self._latest.data[slots] = cells + 1  # the last row of a key is written last
        return cells

    def results(self, cells: Index) -> list[pa.Array]:
        """Return the results of the windows that end with these cells."""
        panes = self._size // self.pane_rows
        if panes == 1 or not len(cells):
            return self.state.results(cells)
        step = max(1, _ENTRIES_MAX // panes)
        parts = [self._merged(cells[at : at + step]) for at in range(0, len(cells), step)]
        return [pa.concat_arrays(list(column)) for column in zip(*parts, strict=True)]

    def _merged(self, cells: Index) -> list[pa.Array]:
        chain = [(np.arange(len(cells)), cells)]
        lowest = self.cell_panes.data[cells] - self._size // self.pane_rows
        while len(chain) < self._size // self.pane_rows:
            which, at = chain[-1]
            before = self.before.data[at] - 1
            more = np.flatnonzero(before >= 0)
            more = more[self.cell_panes.data[before[more]] > lowest[which[more]]]
            if not more.size:
                break
            chain.append((which[more], before[more]))
        which = np.concatenate([which for which, _ in reversed(chain)])
        merged = self._results
        entries = copied(
            self._plan, self.state, np.concatenate([at for _, at in reversed(chain)]), merged
        )
        into = np.empty(len(cells), np.intp)
        into[which[::-1]] = entries[::-1]  # the oldest
        others = np.flatnonzero(into[which] != entries)
        merged.merge(into[which[others]], entries[others])
        found = merged.results(into)
        merged.reset()
        return found

    # --- finished cells ------------------------------------------------------------------------

    def alive(self) -> Mask:
        """Return which cells are of windows to come, or the last of a key between two results."""
        keys, panes = self.cell_keys.data[: self._cells], self.cell_panes.data[: self._cells]
        rows = self._rows.data[: self._keys]
        needed = (rows // self._every + 1) * self._every - self._size
        alive: Mask = (panes + 1) * self.pane_rows > needed[keys]
        # the last cell of a key tells the distance to the next result
        alive |= (panes == (rows[keys] - 1) // self.pane_rows) & (rows[keys] % self._every != 0)
        return alive

    def written(self) -> Index:
        """Return the cells that are alive, and those that have finished and are still on disk."""
        return np.flatnonzero(self.alive() | self.is_stored.data[: self._cells])

    def _compact(self) -> None:
        cells = self.written()
        of_keys, of_panes = self.cell_keys.data[cells], self.cell_panes.data[cells]
        state, epochs = state_table(self._plan, self.state, cells), self.state.epochs_of(cells)
        is_stored = self.is_stored.data[cells]
        alive, of_keys = np.unique(of_keys, return_inverse=True)
        rows = self._rows.data[alive]
        columns = self.keys.take(alive) if self._plan.keys and len(alive) else []
        self._renew(KeyIndex(self._hasher))
        slots = np.arange(len(alive))
        if columns:
            slots = self.keys.lookup(BatchKeys(self._hasher, columns)).astype(np.intp)
        self._fill(slots[of_keys], of_panes, state, epochs)
        self._rows.data[slots] = rows
        self.is_stored.data[: self._cells] = is_stored

    def load(
        self,
        columns: list[pa.Array],
        panes: Array,
        counts: Array,
        state: pa.Table,
        *,
        is_stored: bool = False,
    ) -> None:
        """Restore cells with their numbers of rows; all cells of keys that have none here."""
        slots = np.zeros(len(panes), np.intp)
        if self._plan.keys:
            slots = self.keys.lookup(BatchKeys(self._hasher, columns)).astype(np.intp)
        first = self._cells
        self._fill(slots, panes, state, RESTORED_EPOCH)
        np.maximum.at(self._rows.data, slots, panes * self.pane_rows + counts)
        self.is_stored.data[first : self._cells] = is_stored
        if not first and not is_stored and not self.alive().all():
            self._compact()

    def _fill(self, slots: Index, panes: Array, state: pa.Table, epochs: Array | int) -> None:
        """Append cells; all of the keys in these slots, which have none yet."""
        first = self._cells
        self._cells += len(slots)
        self.left += len(slots)
        if len(slots):
            self._keys = max(self._keys, int(slots.max()) + 1)
        self._rows.reserve(self._keys)
        self._latest.reserve(self._keys)
        for array in (self.cell_keys, self.cell_panes, self.before, self.is_stored):
            array.reserve(self._cells)
        self.cell_keys.data[first : self._cells] = slots
        self.cell_panes.data[first : self._cells] = panes
        order = np.lexsort((panes, slots))
        same = np.flatnonzero(slots[order][1:] == slots[order][:-1])
        self.before.data[first : self._cells] = 0
        self.before.data[first + order[same + 1]] = first + order[same] + 1
        self._latest.data[slots[order]] = first + order + 1
        self.state.load(np.arange(first, self._cells), state, self._cells, epochs)

    # --- going back ----------------------------------------------------------------------------

    def go_back(self, kept: KeptCounts) -> None:
        """Take over the cells of another table, as they were at a cut; only into an empty one."""
        kept.keys.go_back(kept.keys_then)
        kept.state.go_back(kept.aggregates, self._epoch)
        self.keys, self.state = kept.keys, kept.state
        self.cell_keys, self.cell_panes = kept.cell_keys, kept.cell_panes
        self.before = kept.before
        self._cells, self.left = self.state.size, kept.left
        self.is_stored.reserve(self._cells)
        before = self.before.data[: self._cells]
        is_last = np.ones(self._cells, np.bool_)
        is_last[before[before > 0] - 1] = False
        last = np.flatnonzero(is_last)  # of each key
        slots, panes = self.cell_keys.data[last], self.cell_panes.data[last]
        self._keys = len(last)
        self._rows.reserve(self._keys)
        self._latest.reserve(self._keys)
        self._latest.data[slots] = last + 1
        counts = self.state.last_numbers()[last]  # of `ROWS`
        self._rows.data[slots] = panes * self.pane_rows + counts


class KeptCounts:
    """A cut to which the cells of count windows can go back.

    Attributes:
        keys, state, cell_keys, cell_panes, before: of the table; what they have of the cells at the cut
            changes only in ways that `aggregates` notes. The last cell of each key, and the number of its
            rows, are found again.
        keys_then, aggregates: the keys, and the state, at the cut.
        left: how many of the cells had been restored, or left by a compaction.
    """

    def __init__(self, table: CountTable, grew: Callable[[], None]) -> None:
        self.keys, self.keys_then = table.keys, table.keys.cut()
        self.state, self.aggregates = table.state, table.state.keep(grew)
        self.cell_keys, self.cell_panes = table.cell_keys, table.cell_panes
        self.before, self.left = table.before, table.left
        self._table: CountTable | None = table

    @property
    def nbytes(self) -> int:
        """Roughly the memory of the old values, and of all if the table has moved its cells since."""
        size = self.aggregates.slots.nbytes
        if self._table is not None and self._table.state is not self.state:
            size += self.state.used_bytes + self.keys.used_bytes
        return size

    def close(self) -> None:
        """Note no more old values."""
        self._table = None
        self.aggregates.slots.close()


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


class CountDelta(CellDelta[CountTable]):
    """The cells of count windows that are not in runs.

    Whether a cell is still needed depends on the number of its key's rows, which only the newest cell of
    the key tells. So merges cannot find finished cells by themselves. The delta, which has all cells of a
    key, deletes those that it has read from runs.
    """

    def __init__(
        self, plan: AggregatePlan, space: AggregateSpace, new_cells: Callable[[], CountTable]
    ) -> None:
        super().__init__(space, new_cells)
        self._plan = plan

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


class SpillingCounts(SpillingCells[CountTable]):
    """The cells of one subtask that do not fit into memory.

    Args:
        plan: keys and aggregates, with `FIRST_ROW` and `ROWS`.
        new_table: makes the tables of cells in memory.
        other_windows: returns the error for cells of windows of another size.
    """

    def __init__(
        self,
        plan: AggregatePlan,
        context: OperatorContext,
        name: str,
        new_table: NewTable,
        other_windows: Callable[[], StateError],
    ) -> None:
        self._plan, self._other_windows = plan, other_windows
        space = AggregateSpace(plan, context, name, FIRST_ROW)
        super().__init__(
            space, lambda: CountDelta(plan, space, lambda: new_table(space.key_hasher))
        )

    def take_over(self, table: CountTable) -> None:
        """Move the cells from memory to here."""
        self.active = True
        cells = table.written()
        state = state_table(self._plan, table.state, cells)
        keys = table.keys.take(table.cell_keys.data[cells])
        self.load(keys, table.cell_panes.data[cells], _numbers(state, ROWS), state)

    def load(self, keys: list[pa.Array], panes: Array, counts: Array, state: pa.Table) -> None:
        """Restore cells of keys that have none here."""
        for rows, part in self._claimed(keys):
            self.cells.load(part, panes[rows], counts[rows], state.take(pa.array(rows)))

    def _load_stored(self, rows: pa.Table) -> None:
        panes = _numbers(rows, FIRST_ROW.name) // self.cells.pane_rows
        counts = _numbers(rows, ROWS)
        self.cells.load(self._space.keys_of(rows), panes, counts, rows, is_stored=True)

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

        return msgspec.structs.replace(cut, collect=collect, tables=tables)

    def restore_files(self, restored: Sequence[RestoredFiles]) -> None:
        runs = []
        for one in restored:
            meta = decoded_meta(one.meta, CountsMeta, META_VERSION, "count window")
            if meta.pane_rows != self.cells.pane_rows:
                raise self._other_windows()
            runs.append(msgspec.structs.replace(one, meta=meta.runs))
        super().restore_files(runs)


def _numbers(rows: pa.Table, column: str) -> Array:
    numbers: Array = plain_column(rows.column(column)).to_numpy()
    return numbers
