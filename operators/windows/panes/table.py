"""The panes of one subtask: one key index for all, and a cell of state per key and pane.

The cells of all panes are in one `AggregateState`, in order of creation; a pane knows its own. So a
batch is looked up once and added once, whatever the number of panes. Cells of expired panes stay
until they are the majority; then the others are moved to new arrays, with their epochs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa

from ....state.aggregates.state import AggregateState
from ....state.slots.arrays import SlotArray
from ....state.slots.epochs import TableEpoch
from ....state.slots.key_index import BatchKeys, KeyCut, KeyHasher, KeyIndex, plain_column
from ....state.values import Array, Index
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedRows, Rows
from ...elements import Timestamps
from .grid import Grid, Numbers, Part, split

DEAD_MIN: Final = 16_384
"""Fewer cells of expired panes than this are not worth a compaction."""
MAP_BYTES_MAX: Final = 1 << 27
"""The most memory of the maps from keys to cells, for all panes; evicted maps are rebuilt on use.
"""
SPARE_BYTES_MAX: Final = 1 << 24
"""The most memory of empty maps that are kept for later panes."""
SPARSE_MAPS: Final = 8
"""From this number of maps on, a pane may take over the map of another one instead of a new one."""
SPARSE_SHARE: Final = 8
"""A pane has few keys if all panes together have more than this number of times as many."""
NO_PANE: Final = -(2**63)
_FIRST_BLOCK: Final = 2_048


class Pane:
    """The cells of one pane."""

    __slots__ = ("_parts", "_sorted", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._parts: list[tuple[Index, Index]] = []
        self._sorted: tuple[Index, Index] | None = None

    def append(self, keys: Index, cells: Index) -> None:
        """Add new cells with their keys."""
        self._parts.append((keys, cells))
        self._sorted = None

    def members(self) -> tuple[Index, Index]:
        """Return the slots of its keys, each once, and their cells."""
        if len(self._parts) > 1:
            keys, cells = zip(*self._parts, strict=True)
            self._parts = [(np.concatenate(keys), np.concatenate(cells))]
        return self._parts[0]

    def renumber(self, keys: Index, cells: Index) -> None:
        """Renumber slots and cells, by arrays indexed by the old numbers."""
        held, mine = self.members()
        self._parts, self._sorted = [(keys[held], cells[mine])], None

    def find(self, keys: Index) -> tuple[Index, Index]:
        """Return the positions in `keys` of those that it has, and their cells."""
        if self._sorted is None:
            members, cells = self.members()
            order = np.argsort(members)
            self._sorted = members[order], cells[order]
        members, cells = self._sorted
        at = np.searchsorted(members, keys)
        found = np.flatnonzero(members.take(at, mode="clip") == keys)
        return found, cells[at[found]]


class KeptPanes:
    """A cut to which panes can go back.

    Attributes:
        keys, state, cell_keys, cell_panes: of the table; what they have of the cells at the cut changes
            only in ways that `state` notes.
        keys_then, aggregates: the keys, and the state, at the cut.
        cells: the number of cells at the cut.
        expired: see `PaneTable`; at the cut.
    """

    def __init__(self, table: PaneTable, grew: Callable[[], None]) -> None:
        self.keys, self.keys_then = table.keys, table.keys.cut()
        self.state, self.aggregates = table.state, table.state.keep(grew)
        self.cell_keys, self.cell_panes = table.cell_keys, table.cell_panes
        self.cells, self.expired = table.state.size, table.expired
        self._table: PaneTable | None = table

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


class PaneTable:
    """The panes, keys and cells.

    Attributes:
        state: the cells.
        cell_keys: the slot of each cell's key.
        cell_panes: the number of each cell's pane.
        expired: panes up to this number have expired.
    """

    def __init__(self, plan: AggregatePlan, hasher: KeyHasher, epoch: TableEpoch) -> None:
        self._plan, self._hasher, self._epoch = plan, hasher, epoch
        self.expired = NO_PANE
        self._spare_maps: list[SlotArray] = []  # without a cell
        self.on_moved: list[Callable[[Index], None]] = []
        """Called with the old numbers of the cells, by new ones, when keys and cells are renumbered."""
        self._renew()

    def _renew(self) -> None:
        self.keys = KeyIndex(self._hasher)
        self.state: AggregateState = self._plan.new_state(self._epoch)
        self.cell_keys, self.cell_panes = SlotArray(np.intp), SlotArray(np.int64)
        self._cells = self._dead = 0
        self._panes: dict[int, Pane] = {}
        self._numbers: list[int] = []  # ascending
        self._maps: OrderedDict[int, SlotArray] = OrderedDict()  # cell by key, -1: none
        self._columns: list[pa.Array] | None = None

    # --- panes ---------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Return the memory in use, bytes."""
        cells = self.cell_keys.nbytes + self.cell_panes.nbytes
        maps = sum(known.nbytes for known in (*self._maps.values(), *self._spare_maps))
        return self.state.nbytes + self.keys.nbytes + self.keys.key_bytes + cells + maps

    @property
    def key_count(self) -> int:
        """Return the number of slots of keys."""
        return self.keys.size if self._plan.keys else 1

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def between(self, first: int, last: int) -> Iterator[Pane]:
        """Yield the panes from `first` to `last`, in order."""
        low = bisect_left(self._numbers, first)
        for number in self._numbers[low : bisect_left(self._numbers, last + 1, low)]:
            yield self._panes[number]

    def numbers(self) -> list[int]:
        """Return the numbers of the panes, ascending."""
        return list(self._numbers)

    def next_from(self, first: int) -> int | None:
        """Return the number of the first pane from `first` on."""
        at = bisect_left(self._numbers, first)
        return self._numbers[at] if at < len(self._numbers) else None

    def key_columns(self, keys: Index) -> list[pa.Array]:
        """Return the keys in these slots."""
        if not self._plan.keys:
            return []
        if self._columns is None or len(self._columns[0]) < self.keys.size:
            self._columns = self.keys.keys()
        if len(keys) == self.keys.size and np.array_equal(keys, np.arange(len(keys))):
            return self._columns
        indices = pa.array(keys)
        return [column.take(indices) for column in self._columns]

    # --- rows ----------------------------------------------------------------------------------

    def place(self, rows: KeyedRows, parts: Sequence[Part]) -> Index:
        """Return the cell of each row; `parts` are the rows of each pane.

        New cells have no state yet.
        """
        if rows.keys is None:
            slots = np.zeros(rows.size, np.intp)
        else:
            slots = self.keys.lookup(rows.keys).astype(np.intp)
        return self._place(slots, parts)

    def _place(self, slots: Index, parts: Sequence[Part]) -> Index:
        if len(parts) == 1:
            return self._cells_of(parts[0][0], slots)
        cells = np.empty(len(slots), np.intp)
        for number, which in parts:
            cells[which] = self._cells_of(number, slots[which])
        return cells

    def first_changes(self, cells: Index) -> tuple[Index, Index]:
        """Return those of these cells of rows that change for the first time since the last cut.

        Those that have no state yet are apart, as second. Call it between `place` and `add`.
        """
        held = self.state.first_changes(cells, self._cells)
        held = held[self.cell_panes.data[held] > self.expired]
        return held, np.arange(self.state.size, self._cells)

    def find_keys(self, columns: list[pa.Array]) -> Index:
        """Return the slot of each of some keys, -1 where it is absent; without columns that of the one."""
        if not columns:
            return np.zeros(1, np.intp)
        return self.keys.find_keys(BatchKeys(self._hasher, columns)).astype(np.intp)

    def cells_of(self, columns: list[pa.Array]) -> Iterator[tuple[Index, Numbers, pa.Table]]:
        """Yield the cells of different keys, in parts: the places of their keys, panes, and states."""
        slots = self.find_keys(columns)
        places = np.flatnonzero(slots >= 0)
        slots = slots[places]
        for number in self._numbers:
            at, cells = self._panes[number].find(slots)
            if len(at):
                panes = np.full(len(at), number)
                yield places[at], panes, state_table(self._plan, self.state, cells)

    def add(self, rows: KeyedRows, cells: Index) -> None:
        """Add rows to their cells."""
        self.state.add(cells, rows.values, self._cells)

    def _cells_of(self, number: int, slots: Index) -> Index:
        """Return the cells of these keys, which may repeat, in a pane."""
        pane = self._panes.get(number)
        if pane is None:
            pane = self._panes[number] = Pane(number)
            insort(self._numbers, number)
        known = self._map(pane)
        cells: Index = known.data.take(slots)
        if int(cells.min()) >= 0:
            return cells
        missing = np.flatnonzero(cells < 0)
        # A block at a time: the rows of a new pane may repeat few keys.
        room = _FIRST_BLOCK
        while missing.size:
            block, missing = missing[:room], missing[room:]
            where = slots[block]
            # Each row claims its key's entry, in reverse, so that the first row of a key has it.
            claims = np.arange(-2, -2 - block.size, -1)
            known.data[where[::-1]] = claims[::-1]
            fresh = where[known.data.take(where) == claims]
            known.data[fresh] = self._new_cells(pane, fresh)
            cells[block] = known.data.take(where)
            if missing.size:
                found = known.data.take(slots[missing])
                cells[missing] = found
                missing = missing[found < 0]
            room *= 4
        return cells

    def _new_cells(self, pane: Pane, keys: Index) -> Index:
        first = self._cells
        self._cells += len(keys)
        cells = np.arange(first, self._cells)
        pane.append(keys, cells)
        for array, values in ((self.cell_keys, keys), (self.cell_panes, pane.number)):
            array.reserve(self._cells)
            array.data[first : self._cells] = values
        return cells

    def _map(self, pane: Pane) -> SlotArray:
        """Return the map from keys to cells of a pane."""
        known = self._maps.get(pane.number)
        if known is None:
            room = MAP_BYTES_MAX // (8 * max(1, self.key_count))
            while len(self._maps) > room:
                self._release_map(next(iter(self._maps)))
            known = self._empty_map()
            self._maps[pane.number] = known
            known.reserve(self.key_count)
            if pane.number in self._panes and pane._parts:
                keys, cells = pane.members()
                known.data[keys] = cells
        else:
            self._maps.move_to_end(pane.number)
            known.reserve(self.key_count)
        return known

    def _empty_map(self) -> SlotArray:
        """Return a map without a cell: a spare one, that of another pane, or a new one.

        To clear the map of another pane, and to build it again, costs as much as that pane has keys, where
        a new map costs as much as there are keys in all panes. There are many panes with few of the keys
        where one watermark ends many of them.
        """
        if not self._spare_maps and len(self._maps) >= SPARSE_MAPS:
            oldest = next(iter(self._maps))
            keys, _ = self._panes[oldest].members()
            if SPARSE_SHARE * len(keys) < self.key_count:
                known = self._maps.pop(oldest)
                known.data[keys] = -1
                return known
        return self._spare_maps.pop() if self._spare_maps else SlotArray(np.intp, -1)

    def _release_map(self, number: int) -> None:
        """Release the map of a pane, whose cells are still known.

        Some are kept for later panes: it costs as much to clear a map as the pane has keys, where a new one
        costs as much as there are keys in all panes.
        """
        known = self._maps.pop(number)
        if (len(self._spare_maps) + 1) * known.nbytes <= SPARE_BYTES_MAX:
            keys, _ = self._panes[number].members()
            known.data[keys] = -1
            self._spare_maps.append(known)

    # --- expired panes ----------------------------------------------------------------------------

    def drop(self, kept: int) -> None:
        """Drop the panes before number `kept`."""
        if kept - 1 <= self.expired:
            return
        self.expired = kept - 1
        upto = bisect_left(self._numbers, kept)
        for number in self._numbers[:upto]:
            if number in self._maps:
                self._release_map(number)
            self._dead += len(self._panes.pop(number).members()[0])
        del self._numbers[:upto]
        if upto and self._dead >= max(DEAD_MIN, self._cells - self._dead):
            self._compact()

    def sealed(self, upto: int) -> None:
        """Release the maps of panes up to this number, for which few rows are still expected."""
        for number in [number for number in self._maps if number <= upto]:
            self._release_map(number)

    def _compact(self) -> None:
        """Move the remaining cells to new arrays; each keeps the epoch of its change."""
        panes, numbers, expired = self._panes, self._numbers, self.expired
        cells = np.flatnonzero(self.cell_panes.data[: self._cells] > expired)
        of_keys, of_panes = self.cell_keys.data[cells], self.cell_panes.data[cells]
        state, epochs = state_table(self._plan, self.state, cells), self.state.epochs_of(cells)
        index, key_ranks = self._alive_keys(of_keys)
        cell_ranks = _ranks(cells, self._cells)
        for number in list(self._maps):
            self._release_map(number)
        self._renew()
        if not cells.size:
            self._moved(cells)
            return
        if index is not None:
            self.keys = index
        self._panes, self._numbers, self._cells = panes, numbers, len(cells)
        for pane in panes.values():
            pane.renumber(key_ranks, cell_ranks)
        for array, values in ((self.cell_keys, key_ranks[of_keys]), (self.cell_panes, of_panes)):
            array.reserve(self._cells)
            array.data[: self._cells] = values
        self.state.load(np.arange(self._cells), state, self._cells, epochs)
        self._moved(cells)

    def _moved(self, cells: Index) -> None:
        for moved in self.on_moved:
            moved(cells)

    def _alive_keys(self, of_cells: Index) -> tuple[KeyIndex | None, Index]:
        """Return the index of the keys of these cells, and the new slot of each by its old one."""
        if not self._plan.keys:
            return None, np.zeros(1, np.intp)
        used = np.zeros(self.keys.size, np.bool_)
        used[of_cells] = True
        alive = np.flatnonzero(used)
        if len(alive) == self.keys.size:
            return self.keys, alive
        index = KeyIndex(self._hasher)
        ranks = np.zeros(self.keys.size, np.intp)
        if len(alive):
            ranks[alive] = index.lookup(BatchKeys(self._hasher, self.keys.take(alive)))
        return index, ranks

    def keep(self, grew: Callable[[], None]) -> KeptPanes:
        """Open a cut to which the panes can go back: that which the table has just counted.

        `grew` is called now and then while old values come.
        """
        return KeptPanes(self, grew)

    def go_back(self, kept: KeptPanes) -> None:
        """Take over the panes of another table, as they were at a cut; only into an empty one."""
        kept.keys.go_back(kept.keys_then)
        kept.state.go_back(kept.aggregates, self._epoch)
        self.keys, self.state = kept.keys, kept.state
        self.cell_keys, self.cell_panes = kept.cell_keys, kept.cell_panes
        self._cells, self.expired = kept.cells, kept.expired
        panes = self.cell_panes.data[: self._cells]
        alive = np.flatnonzero(panes > self.expired)
        for number, which in split(panes[alive]) if alive.size else ():
            pane = self._panes[number] = Pane(number)
            pane.append(self.cell_keys.data[alive[which]], alive[which])
        self._numbers = sorted(self._panes)
        self._dead = self._cells - len(alive)
        self._moved(np.arange(self._cells))

    def load(self, columns: list[pa.Array], panes: Numbers, state: pa.Table, epochs: int) -> None:
        """Restore cells, each of another key and pane; only into an empty table."""
        if self._plan.keys:
            slots = self.keys.lookup(BatchKeys(self._hasher, columns)).astype(np.intp)
        else:
            slots = np.zeros(len(panes), np.intp)
        self._load(slots, panes, state, epochs)

    def _load(self, slots: Index, panes: Numbers, state: pa.Table, epochs: Array | int) -> None:
        cells = self._place(slots, list(split(panes)))
        self._maps.clear()
        self.state.load(cells, state, self._cells, epochs)


@dataclass(frozen=True, slots=True)
class CellKeys(KeyCut):
    """The keys of cells at a cut."""

    _of_cells: Array

    def take(self, which: Rows | slice) -> list[pa.ChunkedArray]:
        """Return the keys of these cells."""
        slots = self._of_cells[which]
        order = np.argsort(slots, kind="stable")
        back = np.empty(len(order), np.intp)
        back[order] = np.arange(len(order))
        indices = pa.array(back)
        # slots=True makes a new class of this one, so super() would not find it
        columns = KeyCut.take(self, slots[order])
        return [pa.chunked_array([plain_column(column).take(indices)]) for column in columns]


def _ranks(of: Index, size: int) -> Index:
    """Return, by number, the place of each number in `of`."""
    ranks = np.zeros(size, np.intp)
    ranks[of] = np.arange(len(of))
    return ranks


def parts_of(grid: Grid, times: Timestamps, earliest: int) -> list[Part]:
    """Return the rows of each pane, earliest first; `earliest` is the least time."""
    first, last = grid.pane_of(earliest), grid.pane_of(int(times.max()))
    if first == last:
        return [(first, slice(0, len(times)))]
    if last - first >= len(times) or not (times[1:] >= times[:-1]).all():
        return list(split(grid.panes_of(times)))
    numbers = range(first, last + 1)
    starts = [grid.pane_bounds(number)[0] for number in numbers]
    cuts = [0, *np.searchsorted(times, starts[1:]).tolist(), len(times)]
    pairs = zip(numbers, pairwise(cuts), strict=True)
    return [(number, slice(low, high)) for number, (low, high) in pairs if low < high]


def state_table(plan: AggregatePlan, state: AggregateState, cells: Index) -> pa.Table:
    """Return the state columns of these cells."""
    return plan.state_table(state.columns(cells))
