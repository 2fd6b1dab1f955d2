"""Windows that get few rows of a batch at a time share one table, whose keys begin with the window.

A replay can put hundreds of windows into one batch. A table for each would cost more to make than
its rows to add; here such a batch is one lookup and one update, whatever the number of windows.
Slots of expired windows are dropped together, once they are the majority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...state.hashing import Hashes, mixed
from ...state.slots.arrays import SlotArray
from ...state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ...state.slots.key_index import BatchKeys, KeyHasher, plain_column, taken_keys
from ...state.values import Array, Index
from ..aggregation.aggregate_tables import CutPart
from ..aggregation.aggregates import AggregatePlan
from ..aggregation.keyed_aggregate import KeptGroup, KeyedGroup, KeyedRows, Rows
from .kinds import TumblingWindow
from .windowed_aggregate import Fired

SMALL_ROWS = 512
"""A window whose first batch brings fewer rows than this shares the table."""
KEPT_ROWS_MAX = 65_536
"""A table that had more rows than this frees its memory when its last window expires."""
_DEAD_MIN = 4_096
"""Up to this many rows of expired windows may stay, as moving the other rows would cost more."""
_NO_WINDOW = np.iinfo(np.int64).min
_Starts = npt.NDArray[np.int64]
_PER_START, _PER_START_AGAIN = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
"""Odd factors of the start of a window in the two lanes of an identity."""


class WindowKeys(BatchKeys):
    """The keys of one batch, each in a window. An identity tells equal keys of two windows apart.

    It is made of the identity of the key. If the hash of a key is exact, it is the second lane, so that
    both lanes together are those of one key in one window only. Without keys the window is the key.
    """

    __slots__ = ()

    def __init__(self, hasher: KeyHasher, starts: _Starts, columns: Sequence[pa.Array]) -> None:
        super().__init__(hasher, columns or [pa.array(starts)])
        self._lanes = _lanes(hasher, starts.view(np.uint64), columns)


def _lanes(hasher: KeyHasher, starts: Hashes, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes]:
    if not columns:
        return mixed(starts), starts
    hashes, checks = hasher.identify(columns)
    if hasher.exact:
        checks = hashes if checks is None else hashes ^ (np.uint64(0) - checks)
    else:
        assert checks is not None
        checks = checks + starts * _PER_START_AGAIN
    return mixed(hashes + starts * _PER_START), checks


class KeptSmallWindows(msgspec.Struct, frozen=True):
    """A cut to which small windows can go back.

    Attributes:
        group: their rows.
        starts: the window of each slot, which never changes.
        open: the starts of those in the table.
        expired: windows that start here or before had expired.
    """

    group: KeptGroup
    starts: SlotArray
    open: frozenset[int]
    expired: int


class SmallWindows:
    """The shared table of one operator. A slot counts while its window starts after `_expired`."""

    def __init__(
        self, plan: AggregatePlan, window: TumblingWindow, seed: int, epoch: TableEpoch
    ) -> None:
        types = [plan.schema.field(key).type for key in plan.keys]
        self._plan, self._window, self._epoch = plan, window, epoch
        self._hasher = KeyHasher(types, seed, dense=False)
        self.open: set[int] = set()
        """The starts of the windows in this table."""
        self._expired = _NO_WINDOW
        self._renew()

    def _renew(self) -> None:
        self._group = KeyedGroup(self._plan, self._hasher, self._epoch)
        self._starts = SlotArray(np.int64)

    def _clear(self) -> None:
        """Forget all rows; the memory is kept if it is small, and no cut reads it."""
        if self._group.busy or self._group.keys.size > KEPT_ROWS_MAX:
            self._renew()
        else:
            self._group.clear()

    def add(
        self,
        rows: KeyedRows,
        parts: Sequence[tuple[int, Rows]],
        keep: Callable[[KeyedGroup, Index, Index], None] | None = None,
    ) -> tuple[Index, Index]:
        """Add rows of some windows; return which rows, and their slots.

        `keep` is called before, with the group, these slots, and those that have no state yet.
        """
        starts = np.full(rows.size, _NO_WINDOW)
        for start, which in parts:
            starts[which] = start
        self.open.update(start for start, _ in parts)
        index = np.flatnonzero(starts != _NO_WINDOW)
        columns, values = rows.key_columns, rows.values
        if len(index) < rows.size:
            starts = starts[index]
            columns = [taken_keys(column, index) for column in columns]
            values = {name: column.pick(index) for name, column in values.items()}
        group = self._group

        def update(slots: Index, size: int) -> None:
            if keep is not None:
                keep(group, slots, np.arange(group.state.size, size))
            group.state.add(slots, values, size)

        return index, self._add(starts, columns, update)

    def _add(
        self, starts: _Starts, columns: list[pa.Array], update: Callable[[Index, int], None]
    ) -> Index:
        slots = self._group.slots_of(WindowKeys(self._hasher, starts, columns))
        size = self._group.keys.size
        self._starts.reserve(size)
        self._starts.data[slots] = starts
        update(slots, size)
        return slots

    def _keys_of(self, slots: Index) -> list[pa.Array]:
        """Return the key columns of some slots."""
        return self._group.keys.take(slots)[: len(self._plan.keys)]

    def fire(self, after: int, last: int) -> Fired | None:
        """Return results of the windows that start after `after`, up to `last`, in order of the windows."""
        if not any(after < start <= last for start in self.open):
            return None
        starts = self._starts.data[: self._group.keys.size]
        slots = np.flatnonzero((starts > max(after, self._expired)) & (starts <= last))
        slots = slots[np.argsort(starts[slots], kind="stable")]
        return self._fired(slots, self._keys_of(slots))

    def find(self, columns: list[pa.Array]) -> Fired:
        """Return the results of some keys, in all windows of this table; nothing changes.

        The keys of the results are their places in `columns`.
        """
        starts = np.array(sorted(self.open), np.int64)
        count = len(columns[0]) if columns else 1
        places = np.tile(np.arange(count), len(starts))
        keys = [column.take(pa.array(places)) for column in columns]
        wanted = WindowKeys(self._hasher, np.repeat(starts, count), keys)
        slots = self._group.keys.find_keys(wanted).astype(np.intp)
        held = np.flatnonzero(slots >= 0)
        return self._fired(slots[held], places[held])

    def keys_now(self) -> Iterator[list[pa.Array]]:
        """Return the keys that there are now, in pieces, once for each of their windows."""
        count = len(self._plan.keys)
        return (columns[:count] for columns in self._group.keys.cut().pieces())

    def results(self, slots: Index, keys: list[pa.Array]) -> Fired:
        """Return results of some slots, whose keys are given."""
        return self._fired(slots, keys)

    def _fired(self, slots: Index, keys: list[pa.Array] | Index) -> Fired:
        starts = self._starts.data[slots]
        return Fired(starts, starts + self._window.size_ms, keys, self._group.state.results(slots))

    def of_open(self, slots: Index) -> Index:
        """Return those of these slots whose windows have not expired."""
        return slots[self._starts.data[slots] > self._expired]

    def starts_of(self, slots: Index) -> _Starts:
        """Return the window of each slot."""
        return self._starts.data[slots]

    def drop(self, last: int) -> None:
        """Forget the windows that start at `last` or before."""
        expired = {start for start in self.open if start <= last}
        if not expired:
            return
        self.open -= expired
        self._expired = last
        size = self._group.keys.size
        if not self.open:
            self._clear()
            return
        alive = np.flatnonzero(self._starts.data[:size] > last)
        if size - len(alive) > max(_DEAD_MIN, size // 2):
            self._compact(alive)

    def _compact(self, alive: Index) -> None:
        """Move these slots to a new group; each row keeps the epoch of its last change."""
        starts, epochs = self._starts.data[alive], self._group.state.epochs_of(alive)
        hashes, checks = self._group.keys.lanes()
        hashes, checks = hashes[alive], None if checks is None else checks[alive]
        keys, state = (
            self._group.keys.take(alive),
            self._plan.state_table(self._group.state.columns(alive)),
        )
        self._clear()
        if len(alive):
            self._group.keys.fill(keys, hashes, checks)
            self._group.state.load(np.arange(len(alive)), state, len(alive), epochs)
            self._starts.reserve(len(alive))
            self._starts.data[: len(alive)] = starts

    # --- windows that move out -----------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes that the rows take."""
        return self._group.used_bytes

    def take_largest(self, nbytes: int) -> list[tuple[int, pa.Table]]:
        """Remove windows, those with the most rows first, until this many bytes are free.

        Return the start and the rows (keys and state) of each. Windows of fewer than `SMALL_ROWS`
        rows stay: a table of its own would take more than it saves.
        """
        starts = self._starts.data[: self._group.keys.size]
        alive = np.flatnonzero(starts > self._expired)
        windows, counts = np.unique(starts[alive], return_counts=True)
        largest = np.argsort(-counts, kind="stable")
        largest = largest[counts[largest] >= SMALL_ROWS]
        wanted = len(starts) * nbytes // max(1, self.nbytes)
        upto = int(np.searchsorted(np.cumsum(counts[largest]), wanted)) + 1
        chosen = windows[largest[:upto]]
        if not len(chosen):
            return []
        taken = []
        for start in chosen.tolist():
            slots = np.flatnonzero(starts == start)
            columns = dict(zip(self._plan.keys, self._keys_of(slots), strict=True))
            state = self._plan.state_table(self._group.state.columns(slots))
            taken.append(
                (
                    start,
                    pa.table(
                        {**columns, **dict(zip(state.column_names, state.columns, strict=True))}
                    ),
                )
            )
        self.open -= set(chosen.tolist())
        self._compact(alive[~np.isin(starts[alive], chosen)])
        return taken

    # --- snapshots -----------------------------------------------------------------------------

    def cut(self, epoch: int) -> CutPart:
        """Return the part of the table's cut number `epoch` that is stored here."""
        # Only slots that the cut knows are read, and a slot's window never changes.
        starts, expired, size_ms = self._starts.data, self._expired, self._window.size_ms

        def alive(which: Rows) -> Rows:
            held = starts[which]
            if not held.size or int(held.min()) > expired:
                return which
            offset = np.flatnonzero(held > expired)
            return offset if isinstance(which, slice) else which[offset]

        def edges(which: Rows) -> list[Array]:
            return [starts[which].copy(), starts[which] + size_ms]

        return CutPart(self._group.cut(epoch), edges, alive)

    def keep(self, grew: Callable[[], None]) -> KeptSmallWindows:
        """Open a cut to which the windows can go back: that which the table has just counted.

        `grew` is called now and then while old values come.
        """
        return KeptSmallWindows(
            self._group.keep(grew), self._starts, frozenset(self.open), self._expired
        )

    def has(self, group: KeyedGroup) -> bool:
        """Return True if the rows are in this group."""
        return self._group is group

    def go_back(self, kept: KeptSmallWindows) -> None:
        """Take over the windows of another table, as they were at a cut; only into an empty one."""
        self._group, self._starts = kept.group.go_back(self._epoch), kept.starts
        self.open, self._expired = set(kept.open), kept.expired

    def load(self, table: pa.Table) -> None:
        """Restore rows of a snapshot's table."""
        starts = plain_column(table.column("window_start")).cast(pa.int64()).to_numpy()
        columns = [plain_column(table.column(key)) for key in self._plan.keys]
        state = self._group.state
        self._add(starts, columns, lambda at, size: state.load(at, table, size, RESTORED_EPOCH))
        self.open.update(np.unique(starts).tolist())
