"""Aggregates per key that need not fit into memory: a `KeyedGroup` over sorted runs on local disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...state.aggregates.accumulators import Mask
from ...state.evolution import LAST_USED_COLUMN
from ...state.hashing import Hashes, hash_columns, identity_columns, key_groups_of
from ...state.runs.layout import Records, RowLayout
from ...state.runs.merge import Expired
from ...state.runs.run_file import FilePool
from ...state.runs.spilling_table import Delta, SpillingTable, TableShape
from ...state.settings import MemoryShare, RunSettings
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import BatchKeys, KeyHasher, KeyIndex, plain_column
from ...state.slots.table import Slots
from ...state.snapshot import FilesCut, RestoredFiles
from ...state.values import Array, Index
from ..base import OperatorContext
from ..keyed_backend import lies_in_rocksdb
from ..sizes import parse_size
from .aggregates import AggregatePlan
from .expiring_group import generation_ms
from .keyed_aggregate import KeyedGroup, Loader, identity_seed

_MANAGED_MEMORY: Final = "taskmanager.memory.managed.size"
_IDENTITY_VERSION: Final = 1
RESTORE_ROWS: Final = 1 << 16
"""The rows that are restored at a time."""
_IN_MEMORY: Final = 4
"""State in memory may take one part in this many of the budget before it moves to disk."""
D = TypeVar("D", bound=Delta)


def lies_on_disk(plan: AggregatePlan, context: OperatorContext) -> bool:
    """Return True if the options put this state on disk.

    Without keys there is one row, kept in memory.
    """
    return bool(plan.keys) and lies_in_rocksdb(context.options)


class CellHasher(KeyHasher):
    """Computes the identity of a key together with a number, the last column.

    In runs the first lane is the hash of the key alone: rows of one key lie side by side, and belong to
    its key group. In memory the lanes are exchanged, since the cells of a key would be searched one by
    one if they had the same first lane.
    """

    def __init__(self, types: Sequence[pa.DataType], seed: int) -> None:
        super().__init__([*types, pa.int64()], seed, dense=False)

    def identify(self, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes | None]:
        hashes, checks = self.identify_in_runs(columns)
        return checks, hashes

    def identify_in_runs(self, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes]:
        """Return the lanes of rows in runs."""
        return hash_columns(columns[:-1]), identity_columns(columns, self._seed)


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


class ExpiryBound:
    """The bound of a number in each row, such as a pane or a time: rows up to it have expired.

    Merges ask for it from other threads, while the mailbox moves it.

    Args:
        number: the name of the column.
    """

    def __init__(self, number: str, max_parallelism: int) -> None:
        self._number, self._max_parallelism = number, max_parallelism
        self.limit: int = np.iinfo(np.int64).min
        self._further: Index | None = None

    def move(self, limit: int, further: Index | None = None) -> None:
        """Set the bound.

        Args:
            further: by key group, the later bounds of those that have progressed further; they hold
                until the bound has reached them.
        """
        self.limit = limit
        if further is not None:
            self._further = further
        elif self._further is not None and int(self._further.max()) <= limit:
            self._further = None

    def has_expired(self, hashes: Hashes, numbers: Index) -> Mask:
        """Return which rows with these first lanes and numbers have expired by now."""
        return self._has_expired(hashes, numbers, self.limit, self._further)

    def now(self) -> Expired:
        """Return a function that finds the rows that have expired by now."""
        return partial(self._records_expired, self.limit, self._further)

    def __call__(self, records: Records) -> Mask:
        return self._records_expired(self.limit, self._further, records)

    def _records_expired(self, limit: int, further: Index | None, records: Records) -> Mask:
        numbers = RowLayout.numbers(records, self._number)
        return self._has_expired(records["hash"], numbers, limit, further)

    def _has_expired(
        self, hashes: Hashes, numbers: Index, limit: int, further: Index | None
    ) -> Mask:
        bounds: int | Index = limit
        if further is not None:
            bounds = np.maximum(further[key_groups_of(hashes, self._max_parallelism)], limit)
        expired: Mask = numbers <= bounds
        return expired


class SpillingSpace:
    """The shared parts of the tables of one operator subtask: memory, threads, a directory, and layout.

    Args:
        name: of the tables.
        number: an int64 column that identifies a row together with the key; None if the key alone does.
        others: further columns of a row, between the number and the state.
        expired: finds the rows that merges leave out, beside those whose keys have expired.

    Attributes:
        hasher: computes the identity of rows in memory.
        key_hasher: computes the identity of keys alone.
        identify: computes the lanes of rows in runs.
        share: returns the current bytes of all tables together.
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
        fields = [plan.schema.field(key) for key in plan.keys]
        types, seed = [field.type for field in fields], identity_seed(context.job_name)
        self.plan = plan
        # Keys are looked up on disk by their hashes, so an index without hashes would not work.
        self.hasher = self.key_hasher = KeyHasher(types, seed, dense=False)
        self.identify: Callable[[Sequence[pa.Array]], tuple[Hashes, Hashes | None]]
        self.identify = self.key_hasher.identify
        if number is not None:
            self.hasher = cell_hasher = CellHasher(types, seed)
            self.identify = cell_hasher.identify_in_runs
        self.share = MemoryShare(_managed_memory(context))
        self.threads = ThreadPoolExecutor(2, thread_name_prefix=f"runs-{context.operator_name}")
        self.directory = context.local_directory() / name
        self.directory.mkdir()
        numbers = itertools.count(1)
        self.new_id = lambda: f"{name}-{context.file_token}-{next(numbers)}"
        self.settings = replace(RunSettings(), mapped_bytes=self.share())
        self.pool = FilePool(
            self.directory, self.settings.pool_bytes, self.settings.pool_file_bytes_min
        )
        self.shape = TableShape(
            schema=stored_schema(plan, number, others),
            keys=plan.keys if number is None else (*plan.keys, number.name),
            wide=not self.hasher.exact or fields[0].nullable,
            identity="" if self.hasher.exact else f"{_IDENTITY_VERSION}-{seed:016x}",
            identify=self._identify_rows,
            key_groups=context.key_groups,
            max_parallelism=context.max_parallelism,
            expired=expired if plan.ttl_ms is None else self._expired,
        )
        self._now_ms = context.clock.now_ms
        self._results = plan.new_state(TableEpoch())  # empty, except while `results` runs

    @property
    def room(self) -> int:
        """The bytes that state may take before it moves here from a table in memory."""
        return self.share() // _IN_MEMORY

    def new_table(
        self, new_delta: Callable[[], D], memory_bytes: Callable[[], int] | None = None
    ) -> SpillingTable[D]:
        """Return an empty table; `memory_bytes` is its budget, by default that of the whole space."""
        return SpillingTable(
            self.shape,
            new_delta,
            self.directory,
            self.new_id,
            self.settings,
            self.threads.submit,
            memory_bytes or self.share,
            self.pool,
        )

    def keys_of(self, rows: pa.Table) -> list[pa.Array]:
        """Return the key columns of stored rows."""
        return [plain_column(rows.column(key)) for key in self.plan.keys]

    def key_index(self, keys: Sequence[pa.Array]) -> tuple[KeyIndex, Index]:
        """Return an index of the keys in these columns, and the slot of each row's key."""
        index = KeyIndex(self.key_hasher)
        return index, index.lookup(BatchKeys(self.key_hasher, keys)).astype(np.intp)

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

    def _identify_rows(self, table: pa.Table) -> tuple[Hashes, Hashes | None]:
        return self.identify([plain_column(table.column(key)) for key in self.shape.keys])

    def close(self) -> None:
        """Release memory, threads and unused files; called after the tables."""
        self.pool.close()
        self.threads.shutdown(wait=False)
        self.share.close()


class SpillingGroup:
    """One table: opens, feeds and snapshots it. All methods run in the mailbox, or while it waits.

    Where keys expire, rows on disk that have expired are not loaded, and the delta is written before
    its first rows can have expired.

    `memory_bytes` is its budget; by default that of the whole space.
    """

    def __init__(self, space: SpillingSpace, memory_bytes: Callable[[], int] | None = None) -> None:
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


def _managed_memory(context: OperatorContext) -> int:
    text = context.options.get(_MANAGED_MEMORY)
    return RunSettings().memory_bytes if text is None else parse_size(text, _MANAGED_MEMORY)
