"""Windows that get few rows of a batch at a time share one table, whose keys begin with the window.

A replay can put hundreds of windows into one batch. A table for each would cost more to make than its
rows to add; here such a batch is one lookup and one update, whatever the number of windows. Slots of
windows that are gone are dropped together, once they are the larger part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..state.hashing import hash_columns
from ..state.key_index import BatchKeys, KeyHasher, stored_keys
from ..state.values import Index
from .aggregates import AggregatePlan
from .keyed_aggregate import KeyedGroup, KeyedRows, Rows, plain_column
from .windows import TumblingWindow

SMALL_ROWS = 512
"""A window whose first batch brings fewer rows than this shares the table."""
_DEAD_MIN = 1_024
_Starts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fired:
    """Results of windows: the start of each row's window, key columns, value columns."""

    starts: _Starts
    keys: list[pa.Array]
    values: list[pa.Array]


class SmallWindows:
    """The shared table of one operator."""

    def __init__(self, plan: AggregatePlan, window: TumblingWindow, seed: int) -> None:
        types = [plan.schema.field(key).type for key in plan.keys]
        self._plan, self._window = plan, window
        self._hasher = KeyHasher([pa.int64(), *types], seed)
        self._group = KeyedGroup(plan, self._hasher)
        self._starts: _Starts = np.empty(0, np.int64)  # by slot
        self._alive = np.empty(0, np.bool_)
        self.open: set[int] = set()
        """Starts of the windows that live here."""

    def add(self, rows: KeyedRows, parts: Sequence[tuple[int, Rows]]) -> Index:
        """Add rows of some windows; returns their slots."""
        starts = np.full(rows.size, np.iinfo(np.int64).min)
        for start, which in parts:
            starts[which] = start
        self.open.update(start for start, _ in parts)
        index = np.flatnonzero(starts != np.iinfo(np.int64).min)
        columns, values = rows.key_columns, rows.values
        if len(index) < rows.size:
            starts = starts[index]
            taken = pa.array(index)
            columns = [stored_keys(column).take(taken) for column in columns]
            values = {name: column.pick(index) for name, column in values.items()}
        state = self._group.state
        return self._add(starts, columns, lambda at, size: state.add(at, values, size))

    def _add(
        self, starts: _Starts, columns: list[pa.Array], update: Callable[[Index, int], None]
    ) -> Index:
        keys = BatchKeys(self._hasher, [pa.array(starts), *columns])
        slots = self._group.keys.lookup(keys).astype(np.intp)
        size = self._group.keys.size
        update(slots, size)
        if size > len(self._starts):
            grown = max(size, 2 * len(self._starts), 256)
            self._starts = np.resize(self._starts, grown)
            self._alive = np.concatenate(
                [self._alive, np.zeros(grown - len(self._alive), np.bool_)]
            )
        self._starts[slots] = starts
        self._alive[slots] = True
        return slots

    def fire(self, after: int, last: int) -> Fired | None:
        """Results of the windows that start behind `after`, up to `last`; in order of the windows."""
        size = self._group.keys.size
        starts = self._starts[:size]
        slots = np.flatnonzero(self._alive[:size] & (starts > after) & (starts <= last))
        if not slots.size:
            return None
        slots = slots[np.argsort(starts[slots], kind="stable")]
        return self.results(slots)

    def results(self, slots: Index) -> Fired:
        """Results of some slots."""
        taken = pa.array(slots)
        keys = [column.take(taken) for column in self._group.keys.keys()[1:]]
        return Fired(self._starts[slots], keys, self._group.state.results(slots))

    def starts_of(self, slots: Index) -> _Starts:
        """The window of each slot."""
        return self._starts[slots]

    def drop(self, last: int) -> None:
        """Forget the windows that start at `last` or before."""
        gone = {start for start in self.open if start <= last}
        if not gone:
            return
        self.open -= gone
        size = self._group.keys.size
        alive = self._alive[:size]
        alive &= self._starts[:size] > last
        if not self.open:
            self._group.clear()
        elif size - np.count_nonzero(alive) > max(_DEAD_MIN, size // 2):
            table = self.freeze()()
            self._group = KeyedGroup(self._plan, self._hasher)
            self.load(table)

    def freeze(self) -> Callable[[], pa.Table]:
        """A cut as it is now, like `KeyedGroup.freeze`: hash of the key, keys, window, state."""
        size = self._group.keys.size
        alive = np.flatnonzero(self._alive[:size])
        starts = self._starts[alive]
        keys, state = self._group.keys.freeze(), self._group.state.freeze()
        plan, window = self._plan, self._window

        def make() -> pa.Table:
            if not len(alive):
                return pa.table({})
            taken = pa.array(alive)
            columns = [column.take(taken) for column in keys()[1][1:]]
            hashes = hash_columns(columns) if columns else np.zeros(len(alive), np.uint64)
            edges = [
                pa.array(edge).view(field.type)
                for edge, field in zip((starts, starts + window.size_ms), plan.added, strict=True)
            ]
            held = [column().take(taken) for column in state.values()]
            return pa.Table.from_arrays(
                [pa.array(hashes), *columns, *edges, *held],
                names=["hash", *plan.state_schema.names[1:]],
            )

        return make

    def load(self, table: pa.Table) -> None:
        """Take over rows of a snapshot's table."""
        starts = plain_column(table.column("window_start")).cast(pa.int64()).to_numpy()
        columns = [plain_column(table.column(key)) for key in self._plan.keys]
        state = self._group.state
        self._add(starts, columns, lambda at, size: state.load(at, table, size))
        self.open.update(np.unique(starts).tolist())
