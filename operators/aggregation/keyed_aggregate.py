"""Shared parts of windowed and running aggregates: reading a batch, and the keyed state of a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from ...errors import PlanError
from ...state.aggregates.state import AggregateState, KeptAggregates, StateCut
from ...state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ...state.slots.key_index import (
    BatchKeys,
    KeyCut,
    KeyHasher,
    KeyIndex,
    plain_column,
    taken_keys,
)
from ...state.values import EVENT_TIME, Array, Index, Values, validity_of, values_of
from ..elements import Batch, ColumnBatch, Timestamps
from .aggregates import AggregatePlan
from .partials import are_partial, partial_values

Rows = slice | Index

Keeper = Callable[[BatchKeys | None, Index, Index], None]
"""Looks at rows before they are added.

It takes the keys of the batch, the slot of each row, and the slots, ascending, of keys that have no
state yet. Without keys the rows are one, in the one slot.
"""

Loader = Callable[[list[pa.Array]], tuple[Index, pa.Table] | None]
"""Finds state that is stored elsewhere.

It takes the key columns of keys that are new to a group, and returns which of them it knows,
ascending, with the table of their state columns; None if it knows none.
"""


class KeyedRows:
    """The rows of one batch as the aggregates need them: keys, values, and times (ms) if there are any."""

    __slots__ = ("key_columns", "keys", "size", "values")

    def __init__(
        self,
        plan: AggregatePlan,
        hasher: KeyHasher,
        data: pa.RecordBatch,
        times: Timestamps | None = None,
    ) -> None:
        self.size: int = data.num_rows
        self.key_columns = [data.column(key) for key in plan.keys]
        self.keys = BatchKeys(hasher, self.key_columns) if plan.keys else None
        if are_partial(data):
            self.values = partial_values(plan, data)
            return
        made = plan.compute(data)
        computed = made.schema.names if made.num_columns else ()
        self.values = {
            name: (values_of if is_read else validity_of)(
                (made if name in computed else data).column(name)
            )
            for name, is_read in plan.value_columns.items()
        }
        if times is not None and any(one.by is not None for one in plan.specs):
            self.values[EVENT_TIME] = Values(times, None)

    def keys_at(self, rows: Index) -> list[pa.Array]:
        """Return the keys of some rows, as they are emitted."""
        return [taken_keys(column, rows) for column in self.key_columns]


class KeyedGroup:
    """The keys and aggregates of one window, or of a running aggregate.

    Args:
        plan: the aggregates.
        hasher: of the keys.
        epoch: of the table whose rows these are; all groups of a table share it.
        loader: asked for the state of keys that are new here, before their rows are added.
    """

    def __init__(
        self,
        plan: AggregatePlan,
        hasher: KeyHasher,
        epoch: TableEpoch,
        loader: Loader | None = None,
    ) -> None:
        self.keys = KeyIndex(hasher)
        self._hasher = hasher
        self.state: AggregateState = plan.new_state(epoch)
        self._loader = loader

    def add(
        self, rows: KeyedRows, which: Rows | None, keeper: Keeper | None = None
    ) -> Index | None:
        """Add some rows (None: all); return the slot of each, None if all go to the one group."""
        values = rows.values
        if which is not None:
            values = {name: column.pick(which) for name, column in values.items()}
        if rows.keys is None:
            if keeper is not None:
                keeper(None, np.zeros(1, np.intp), np.arange(self.state.size, 1))
            self.state.add_all(values, rows.size if which is None else row_count(which))
            return None
        slots, fresh = self.slots_and_new(rows.keys, which)
        if keeper is not None:
            keeper(rows.keys, slots, fresh)
        self.state.add(slots, values, self.keys.size)
        return slots

    def ask(self, loader: Loader | None) -> None:
        """Ask another loader from now on."""
        self._loader = loader

    def slots_of(self, keys: BatchKeys, which: Rows | None = None) -> Index:
        """Return the slot of each key; the state of new keys is loaded, if it is stored elsewhere."""
        return self.slots_and_new(keys, which)[0]

    def slots_and_new(self, keys: BatchKeys, which: Rows | None = None) -> tuple[Index, Index]:
        """Return the slot of each key, and the slots of keys that have no state yet."""
        before = self.keys.size
        slots, new = self.keys.lookup_new(keys, which)
        fresh = np.arange(before, self.keys.size)
        if new and self._loader is not None:
            found = self._loader(new)
            if found is not None:
                self.state.load(before + found[0], found[1], self.keys.size)
                fresh = np.delete(fresh, found[0])
        return slots.astype(np.intp), fresh

    def find_many(self, columns: list[pa.Array]) -> Index:
        """Return the slot of each of some keys, -1 where it is absent; nothing changes.

        Without columns there is one key.
        """
        if not columns:
            return np.arange(1) - (self.state.size == 0)
        return self.find_keys(BatchKeys(self._hasher, columns))

    def find_keys(self, keys: BatchKeys) -> Index:
        """Return the slot of each of some keys, as `find_many` does."""
        return self.keys.find_keys(keys).astype(np.intp)

    def find(self, columns: list[pa.Array], used_after: int | None) -> Index:
        """Return the slot of one key, if it is here; nothing changes.

        Args:
            columns: the key columns, of one row.
            used_after: keys that were last used up to then (ms) have expired; None: none expire.
        """
        slots = self.find_many(columns)
        slots = slots[slots >= 0]
        if used_after is not None:
            slots = slots[self.state.last_numbers().take(slots) > used_after]
        return slots

    @property
    def busy(self) -> bool:
        """True while a cut is open: then the memory must not be reused for other keys."""
        return self.state.busy

    @property
    def nbytes(self) -> int:
        """The memory of the index and the state, bytes."""
        return self.keys.nbytes + self.state.nbytes

    @property
    def used_bytes(self) -> int:
        """The bytes that the keys and their state take, without room to grow; 0 if there are none."""
        return self.keys.used_bytes + self.state.used_bytes

    def memory(self) -> list[Array]:
        """Return the arrays of the group, so that a caller can free them piece by piece."""
        return self.keys.memory() + self.state.memory()

    def clear(self) -> None:
        """Forget everything; keeps the memory. Not while `busy`."""
        self.keys.clear()
        self.state.reset()

    def cut(self, epoch: int) -> GroupCut:
        """Open cut number `epoch`, which the table has just counted."""
        return GroupCut(self.keys.cut(), self.state.cut(epoch))

    def keep(self, grew: Callable[[], None]) -> KeptGroup:
        """Open a cut to which the group can go back: that which the table has just counted.

        `grew` is called now and then while old values come.
        """
        return KeptGroup(self, self.keys.cut(), self.state.keep(grew))

    def load(
        self,
        plan: AggregatePlan,
        hasher: KeyHasher,
        table: pa.Table,
        epochs: Any = RESTORED_EPOCH,
    ) -> None:
        """Restore the rows of a snapshot; only into an empty group. `epochs`: of all or of each."""
        if not plan.keys:
            self.state.load(np.zeros(1, np.intp), table.slice(0, 1), 1, epochs)
            return
        columns = [plain_column(table.column(key)) for key in plan.keys]
        slots = self.keys.lookup(BatchKeys(hasher, columns)).astype(np.intp)
        self.state.load(slots, table, self.keys.size, epochs)


class GroupCut(msgspec.Struct, frozen=True):
    """A cut of one group; call `slots`, then `columns`, in any one thread."""

    _keys: KeyCut
    _state: StateCut

    def slots(self, since: int | None) -> Rows:
        """Return the slots that had changed after cut number `since`, ascending; None: all."""
        return self._state.slots(since)

    def columns(self, which: Rows) -> tuple[list[pa.ChunkedArray], list[pa.Array]]:
        """Return key columns and state columns of these slots, and close the cut."""
        state = self._state.columns(which)
        return self._keys.take(which), state

    def close(self) -> None:
        """Close the cut."""
        self._state.close()


class KeptGroup(msgspec.Struct, frozen=True):
    """A cut to which a group can go back."""

    group: KeyedGroup
    _keys: KeyCut
    _state: KeptAggregates

    @property
    def nbytes(self) -> int:
        """Roughly the memory of the old values."""
        return self._state.slots.nbytes

    def close(self) -> None:
        """Note no more old values."""
        self._state.slots.close()

    def go_back(self, epoch: TableEpoch, loader: Loader | None = None) -> KeyedGroup:
        """Return the group as it was, as a part of another table, which has been restored."""
        self.group.keys.go_back(self._keys)
        self.group.state.go_back(self._state, epoch)
        self.group.ask(loader)
        return self.group


class KeptGroups:
    """A cut to which a table of several groups can go back.

    Args:
        groups: the groups at the cut.
        has: returns whether the table has a group still. One that it has dropped is kept as a whole.
    """

    def __init__(
        self, groups: dict[int, KeptGroup], has: Callable[[int, KeyedGroup], bool]
    ) -> None:
        self.groups = groups
        self._has: Callable[[int, KeyedGroup], bool] | None = has

    @property
    def nbytes(self) -> int:
        """Roughly the memory of old values and of groups that only this cut has."""
        size = sum(kept.nbytes for kept in self.groups.values())
        if self._has is not None:
            for number, kept in self.groups.items():
                if not self._has(number, kept.group):
                    size += kept.group.used_bytes
        return size

    def close(self) -> None:
        """Note no more old values."""
        self._has = None
        for kept in self.groups.values():
            kept.close()


def columns_of(batch: Batch, step: str) -> pa.RecordBatch:
    """Return the columns of a batch.

    Raises:
        PlanError: a stream of Python objects.
    """
    if isinstance(batch, ColumnBatch):
        return batch.data
    raise PlanError(
        f"`{step}` aggregates columns, but its input are Python objects",
        fix="make columns of them first: .map(fn, into=SomeStruct)",
    )


def identity_seed(job_name: str) -> int:
    """Return the seed of the second lane of key identities, which differs between jobs."""
    return xxhash.xxh3_64_intdigest(job_name.encode())


def row_count(rows: Rows) -> int:
    """Return how many rows are selected."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
