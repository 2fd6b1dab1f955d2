"""The cells of count windows of one subtask, in memory.

The rows of a key are numbered. A pane is `gcd(size, every)` rows, so a result covers the key's last
panes, and is always due with the last row of one. A key without cells that are still needed is
forgotten, and its numbers restart: where one window ends another begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
import pyarrow as pa

from ....state.aggregates.accumulators import Mask
from ....state.aggregates.state import AggregateState
from ....state.slots.arrays import SlotArray
from ....state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ....state.slots.key_index import BatchKeys, KeyHasher, KeyIndex
from ....state.values import Array, Index
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedRows
from ..kinds import CountWindow
from ..panes.table import state_table
from ..panes.totals import copied

DEAD_MIN: Final = 16_384
"""Fewer finished cells than this are not worth a compaction."""
_ENTRIES_MAX: Final = 1 << 18
"""The number of copied cells merged at a time."""
_CELL_BYTES: Final = 8 + 8 + 8 + 1
_KEY_BYTES: Final = 8 + 8


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
        self._before = SlotArray(np.int64)  # by cell: that of the key's pane before + 1
        self._rows = SlotArray(np.int64)  # by key
        self._latest = SlotArray(np.int64)  # by key: its last cell + 1
        self.is_stored = SlotArray(np.bool_)
        self._cells = self._keys = 0
        self._kept = 0  # cells that were restored, or left by the last compaction

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
        for array in (self.cell_keys, self.cell_panes, self._before, self.is_stored):
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
        self._kept += len(slots)
        if len(slots):
            self._keys = max(self._keys, int(slots.max()) + 1)
        self._rows.reserve(self._keys)
        self._latest.reserve(self._keys)
        for array in (self.cell_keys, self.cell_panes, self._before, self.is_stored):
            array.reserve(self._cells)
        self.cell_keys.data[first : self._cells] = slots
        self.cell_panes.data[first : self._cells] = panes
        order = np.lexsort((panes, slots))
        same = np.flatnonzero(slots[order][1:] == slots[order][:-1])
        self._before.data[first : self._cells] = 0
        self._before.data[first + order[same + 1]] = first + order[same] + 1
        self._latest.data[slots[order]] = first + order + 1
        self.state.load(np.arange(first, self._cells), state, self._cells, epochs)
