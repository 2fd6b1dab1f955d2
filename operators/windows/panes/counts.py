"""Aggregates over the last records of each key, after a fixed number of records: count windows.

A result is emitted with the record that completes its window, and has its event time. Time plays no
other role, so nothing is late. As in Flink, the first results of a key cover fewer records if
windows overlap.

The rows of a key are numbered. A pane is `gcd(size, every)` rows, so a result covers the key's last
panes, and is always due with the last row of one. A key without cells that are still needed is
forgotten, and its numbers restart: where one window ends another begins. A snapshot has the number
of rows of each cell as one more aggregate, which makes it complete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
import pyarrow as pa

from ....errors import StateError
from ....state.aggregates.state import AggregateState
from ....state.slots.arrays import SlotArray
from ....state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ....state.slots.key_index import BatchKeys, KeyHasher, KeyIndex, plain_column
from ....state.snapshot import RestoredState, StateInfo, StateSnapshot
from ....state.values import Array, Index
from ...aggregation.aggregate_tables import CutPart, aggregate_info, restored_rows, table_cut
from ...aggregation.aggregates import Aggregate, AggregatePlan
from ...aggregation.keyed_aggregate import GroupCut, KeyedRows, Rows, columns_of, identity_seed
from ...base import Operator, OperatorContext
from ...elements import Batch, ColumnBatch
from ..kinds import CountWindow
from .table import CellKeys, state_table
from .totals import copied

DEAD_MIN: Final = 16_384
"""Fewer finished cells than this are not worth a compaction."""
_ENTRIES_MAX: Final = 1 << 18
"""The number of copied cells merged at a time."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """The rows of a batch by key, in order of arrival; `order` maps them to their places in the batch."""

    order: Index
    slots: Index
    first: Index
    numbers: Array


class CountTable:
    """The keys and cells of one subtask.

    Attributes:
        state: the cells.
        cell_keys: the slot of each cell's key.
        cell_panes: the number of each cell's pane.
        pane_rows: the number of rows of a pane.
    """

    def __init__(
        self, window: CountWindow, plan: AggregatePlan, hasher: KeyHasher, epoch: TableEpoch
    ) -> None:
        self._size, self._every = window.size, window.every
        self.pane_rows = gcd(window.size, window.every)
        self._plan, self._hasher, self._epoch = plan, hasher, epoch
        self._kept = 0  # cells after the last compaction
        self._results = plan.new_state(TableEpoch())  # scratch
        self._renew(KeyIndex(hasher))

    def _renew(self, keys: KeyIndex) -> None:
        self.keys = keys
        self.state: AggregateState = self._plan.new_state(self._epoch)
        self.cell_keys, self.cell_panes = SlotArray(np.intp), SlotArray(np.int64)
        self._before = SlotArray(np.int64)  # by cell: that of the key's pane before + 1
        self._rows = SlotArray(np.int64)  # by key
        self._latest = SlotArray(np.int64)  # by key: its last cell + 1
        self._cells = self._keys = 0

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
        if self._cells - self._kept >= max(DEAD_MIN, self._kept):
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
        for array in (self.cell_keys, self.cell_panes, self._before):
            array.reserve(self._cells)
        self.cell_keys.data[new] = slots[fresh]
        self.cell_panes.data[new] = numbers[fresh] // self.pane_rows
        again = fresh > first[fresh]
        before = np.where(again, cells[fresh - 1] + 1, self._latest.data[slots[fresh]])
        self._before.data[new] = before
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
            before = self._before.data[at] - 1
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

    # --- finished cells
    # ----------------------------------------------------------------------------

    def _alive(self) -> Index:
        """Return the cells of windows to come, and the last ones of keys between two results."""
        keys, panes = self.cell_keys.data[: self._cells], self.cell_panes.data[: self._cells]
        rows = self._rows.data[: self._keys]
        needed = (rows // self._every + 1) * self._every - self._size
        alive = (panes + 1) * self.pane_rows > needed[keys]
        # the last cell of a key tells the distance to the next result
        alive |= (panes == (rows[keys] - 1) // self.pane_rows) & (rows[keys] % self._every != 0)
        return np.flatnonzero(alive)

    def _compact(self) -> None:
        cells = self._alive()
        of_keys, of_panes = self.cell_keys.data[cells], self.cell_panes.data[cells]
        state, epochs = state_table(self._plan, self.state, cells), self.state.epochs_of(cells)
        alive, of_keys = np.unique(of_keys, return_inverse=True)
        rows = self._rows.data[alive]
        columns = self.keys.take(alive) if self._plan.keys and len(alive) else []
        self._renew(KeyIndex(self._hasher))
        slots = np.arange(len(alive))
        if columns:
            slots = self.keys.lookup(BatchKeys(self._hasher, columns)).astype(np.intp)
        self._fill(slots[of_keys], of_panes, state, epochs)
        self._rows.data[slots] = rows

    def load(self, columns: list[pa.Array], panes: Array, counts: Array, state: pa.Table) -> None:
        """Restore cells with their numbers of rows; only into an empty table."""
        slots = np.zeros(len(panes), np.intp)
        if self._plan.keys:
            slots = self.keys.lookup(BatchKeys(self._hasher, columns)).astype(np.intp)
        self._fill(slots, panes, state, RESTORED_EPOCH)
        np.maximum.at(self._rows.data, slots, panes * self.pane_rows + counts)
        if len(self._alive()) < self._cells:
            self._compact()

    def _fill(self, slots: Index, panes: Array, state: pa.Table, epochs: Array | int) -> None:
        self._cells = self._kept = len(slots)
        self._keys = int(slots.max()) + 1 if len(slots) else 0
        self._rows.reserve(self._keys)
        self._latest.reserve(self._keys)
        self._rows.data[: self._keys] = 0
        for array in (self.cell_keys, self.cell_panes, self._before):
            array.reserve(self._cells)
        self.cell_keys.data[: self._cells] = slots
        self.cell_panes.data[: self._cells] = panes
        order = np.lexsort((panes, slots))
        same = np.flatnonzero(slots[order][1:] == slots[order][:-1])
        self._before.data[: self._cells] = 0
        self._before.data[order[same + 1]] = order[same] + 1
        self._latest.data[slots[order]] = order + 1
        self.state.load(np.arange(self._cells), state, self._cells, epochs)


_COUNTS: Final = "counts"
_FIRST = pa.field("__first_row", pa.int64(), False)
_ROWS: Final = "__rows"


class CountAggregate(Operator):
    """Aggregates over windows of a number of records, per key, or without keys over all records."""

    def __init__(self, window: CountWindow, plan: AggregatePlan, step: str = "window") -> None:
        assert not plan.added
        self._window, self._step = window, step
        self._result_schema = plan.result_schema
        aggregates = {**plan.aggregates, _ROWS: Aggregate("count")}
        self._plan = AggregatePlan(plan.keys, aggregates, plan.schema, (_FIRST,), plan.where)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._table = CountTable(self._window, self._plan, self._hasher, self._epoch)

    def process(self, batch: Batch, input_index: int) -> None:
        data = columns_of(batch, self._step)
        if not data.num_rows:
            return
        rows = KeyedRows(self._plan, self._hasher, data, batch.timestamps)
        last, results = self._table.add(rows)
        if not last.size:
            return
        columns = [*rows.keys_at(last), *results[:-1]]
        found = pa.RecordBatch.from_arrays(columns, schema=self._result_schema)
        times = None if batch.timestamps is None else batch.timestamps[last]
        self.output.emit(ColumnBatch(found, times))

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `counts`: one row per key and pane, always all of them."""
        epoch, table = self._epoch.cut(), self._table
        keys = table.keys.cut()
        pane, panes = table.pane_rows, table.cell_panes.data

        def first_rows(which: Rows) -> list[Array]:
            return [panes[which] * pane]

        cells = CellKeys(keys._pieces, keys.size, table.cell_keys.data)
        parts = [CutPart(GroupCut(cells, table.state.cut(epoch)), first_rows)]
        cut = table_cut(self._plan, epoch, parts, self.context.max_parallelism)
        cut.epoch = 0  # a delta could not tell which cells were dropped
        return StateSnapshot(tables={_COUNTS: cut})

    def states(self) -> Sequence[StateInfo]:
        """Return the declaration of table `counts`."""
        return [aggregate_info(self._plan, _COUNTS, "window")]

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the panes."""
        self._epoch.restored()
        table = state.tables.get(_COUNTS)
        if table is None or not table.num_rows:
            return None
        rows = restored_rows(self._plan, table, state.states.get(_COUNTS), self._step)
        first = plain_column(rows.column(_FIRST.name)).to_numpy()
        counts = plain_column(rows.column(_ROWS)).to_numpy()
        pane = self._table.pane_rows
        if (first % pane != 0).any() or int(counts.max()) > pane:
            raise StateError(
                f"the snapshot has other windows new=`{self._window.describe()}`",
                where=self._step,
                fix="keep size and slide of the window, or give the step another name",
            )
        columns = [plain_column(rows.column(key)) for key in self._plan.keys]
        self._table.load(columns, np.asarray(first // pane), counts, rows)
        return None
