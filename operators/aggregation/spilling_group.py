"""Aggregates per key that need not fit into memory: a `KeyedGroup` over sorted runs on local disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...state.evolution import LAST_USED_COLUMN
from ...state.hashing import Hashes
from ...state.runs.layout import Records, RowLayout
from ...state.runs.merge import Expired
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import KeyHasher, plain_column
from ...state.slots.table import Slots, SlotTable
from ...state.snapshot import FilesCut, RestoredFiles
from ...state.values import Array, Index
from ..base import OperatorContext
from ..keyed_backend import lies_in_rocksdb
from ..spilling_space import RESTORE_ROWS, CellHasher, SpillingSpace
from .aggregates import AggregatePlan
from .expiring_group import generation_ms
from .keyed_aggregate import KeyedGroup, Loader


def lies_on_disk(plan: AggregatePlan, context: OperatorContext) -> bool:
    """Return True if the options put this state on disk.

    Without keys there is one row for each pane, session or cell, however many records come. It is kept in
    memory: only a set of distinct values or a list makes it large, and rows are read and written as a
    whole on disk, too.
    """
    return bool(plan.keys) and lies_in_rocksdb(context.options)


class GroupDelta:
    """The rows of a group that are not in runs."""

    def __init__(
        self, plan: AggregatePlan, hasher: KeyHasher, loader: Loader, schema: pa.Schema
    ) -> None:
        self._schema, self._exchanged = schema, isinstance(hasher, CellHasher)
        self.group = KeyedGroup(plan, hasher, TableEpoch(), loader)

    @property
    def size(self) -> int:
        """The number of keys."""
        return self.group.keys.size

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and their state."""
        return self.group.used_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes of the arrays, which remain when they are cleared."""
        return self.group.nbytes - self.group.state.object_bytes

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """Return the identity of each slot's key."""
        first, second = self.group.keys.lanes()
        if self._exchanged and second is not None:
            return second, first
        return first, second

    def find(self, hashes: Hashes, checks: Hashes | None) -> Slots:
        """Return the slot of each identity, -1 where there is none."""
        if self._exchanged and checks is not None:
            return self.group.keys.find(checks, hashes)
        return self.group.keys.find(hashes, checks)

    def table(self, slots: Index) -> pa.Table:
        """Return keys and state of these slots."""
        columns = [*self.group.keys.take(slots), *self.group.state.columns(slots)]
        return pa.Table.from_arrays(columns, schema=self._schema)

    def clear(self) -> None:
        """Forget all keys."""
        self.group.clear()


class AggregateSpace(SpillingSpace):
    """The shared parts of tables of aggregates.

    Args:
        number: an int64 column that identifies a row together with the key; None if the key alone does.
        others: further columns of a row, between the number and the state.
        expired: finds the rows that merges leave out, beside those whose keys have expired.
    """

    def __init__(
        self,
        plan: AggregatePlan,
        context: OperatorContext,
        name: str,
        number: pa.Field | None = None,
        others: Sequence[pa.Field] = (),
        expired: Expired | None = None,
    ) -> None:
        self.plan = plan
        super().__init__(
            context,
            name,
            stored_schema(plan, number, others),
            [plan.schema.field(key) for key in plan.keys],
            None if number is None else number.name,
            expired if plan.ttl_ms is None else self._expired,
        )
        self._now_ms = context.clock.now_ms
        self._results = plan.new_state(TableEpoch())  # empty, except while `results` runs

    def results(
        self, rows: pa.Table, merged: tuple[Index, Index, Index] | None = None
    ) -> list[pa.Array]:
        """Return the results of stored rows.

        Args:
            merged: the rows whose results are returned, and rows that are merged before, with those
                into which they are merged; None: all rows stand for themselves.
        """
        state, count = self._results, rows.num_rows
        try:
            state.load(np.arange(count), rows, count)
            if merged is None:
                return state.results(slice(0, count))
            firsts, others, into = merged
            if others.size:
                state.merge(into, others)
            return state.results(firsts)
        finally:
            state.reset()

    def canonical(self, rows: pa.Table, edges: Sequence[Array]) -> pa.Table:
        """Return rows of a cut with the plan's added columns, whose values are `edges`, as numbers."""
        schema = self.plan.state_schema
        columns = dict(zip(rows.column_names, rows.columns, strict=True))
        for field, edge in zip(self.plan.added, edges, strict=True):
            columns[field.name] = pa.array(edge).view(field.type)
        arrays = [columns[name] for name in schema.names]
        return pa.Table.from_arrays(arrays, names=schema.names).cast(schema)

    def _expired(self, records: Records) -> npt.NDArray[np.bool_]:
        assert self.plan.ttl_ms is not None
        return RowLayout.numbers(records, LAST_USED_COLUMN) <= self._now_ms() - self.plan.ttl_ms


class SpillingGroup:
    """One table: opens, feeds and snapshots it. All methods run in the mailbox, or while it waits.

    Where keys expire, rows on disk that have expired are not loaded, and the delta is written before
    its first rows can have expired.

    `memory_bytes` is its budget; by default that of the whole space.
    """

    def __init__(
        self, space: AggregateSpace, memory_bytes: Callable[[], int] | None = None
    ) -> None:
        self._space = space
        self.table = space.new_table(
            lambda: GroupDelta(space.plan, space.hasher, self._load, space.shape.schema),
            memory_bytes,
        )
        self._now = 0
        self._delta_since = 0

    @property
    def group(self) -> KeyedGroup:
        """Return the group to which rows are added now."""
        return self.table.delta.group

    def advance(self, now: int) -> None:
        """Note the machine's time (ms) before a batch, where keys expire."""
        ttl_ms = self._space.plan.ttl_ms
        assert ttl_ms is not None
        self._now = now
        if not self.table.delta.size:
            self._delta_since = now
        elif now - self._delta_since >= generation_ms(ttl_ms):
            self.table.flush()
            self._delta_since = now

    def settle(self) -> None:
        """Enforce the memory budget; called after each batch."""
        self.table.settle()

    def snapshot(self) -> FilesCut:
        """Return a cut of the current state."""
        return self.table.snapshot()

    def restore_files(self, restored: Sequence[RestoredFiles]) -> None:
        """Restore runs; only into an empty group."""
        self.table.restore_files(restored)

    def restore_table(self, table: pa.Table) -> None:
        """Restore a canonical table, part by part; only into an empty group."""
        for start in range(0, table.num_rows, RESTORE_ROWS):
            rows = table.slice(start, RESTORE_ROWS)
            self.group.load(self._space.plan, self._space.hasher, rows)
            self.settle()
        if self._space.plan.ttl_ms is not None:
            self.table.flush()

    def results_of(self, columns: list[pa.Array], used_after: int | None) -> list[pa.Array] | None:
        """Return the results of one key, which was used after that time (ms); None: it has none."""
        if self.group.find(columns, None).size:
            slots = self.group.find(columns, used_after)
            return self.group.state.results(slots) if slots.size else None
        found = self.table.lookup(*self._space.identify(columns))
        if found is None:
            return None
        if used_after is not None:
            used = plain_column(found.table.column(LAST_USED_COLUMN)).cast(pa.int64()).to_numpy()
            if used[0] <= used_after:
                return None
        return self._space.results(found.table)

    def keys_now(self) -> tuple[Iterator[list[pa.Array]], Callable[[], None]]:
        """Return the keys that there are now, in pieces, and a function that ends their reading.

        Some may have expired.
        """
        newer, parts = SlotTable(), []
        for delta in self.table.in_memory():
            rows = newer.lookup(*delta.lanes())[1]
            parts.append(delta.group.keys.cut().pieces(np.sort(rows)))
        runs, close = self.table.runs_now(lambda *identity: newer.find(*identity) < 0)
        in_runs = (self._space.keys_of(rows) for rows in runs)
        return chain(*parts, in_runs), close

    def close(self) -> None:
        """Release files and memory."""
        self.table.close()

    def _load(self, columns: list[pa.Array]) -> tuple[Index, pa.Table] | None:
        """Return the state of keys that are new in memory; see `keyed_aggregate.Loader`."""
        if not self.table.spilled:
            return None
        found = self.table.lookup(*self._space.identify(columns))
        if found is None:
            return None
        order, ttl_ms = np.argsort(found.positions), self._space.plan.ttl_ms
        if ttl_ms is not None:
            used = plain_column(found.table.column(LAST_USED_COLUMN)).cast(pa.int64()).to_numpy()
            order = order[used.take(order) > self._now - ttl_ms]
        return found.positions[order], found.table.take(pa.array(order))


def stored_schema(
    plan: AggregatePlan, number: pa.Field | None = None, others: Sequence[pa.Field] = ()
) -> pa.Schema:
    """Return the columns of a run: keys, `number` if there is one, `others`, and state.

    The plan's added columns are the same in all rows of a table, or follow from the columns given here.
    """
    added = {field.name for field in plan.added}
    fields = [field for field in list(plan.state_schema)[1:] if field.name not in added]
    if number is not None:
        fields[len(plan.keys) : len(plan.keys)] = [number, *others]
    return pa.schema([field.remove_metadata() for field in fields])
