"""Aggregates per key that need not fit into memory: a `KeyedGroup` over sorted runs on local disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...state.evolution import LAST_USED_COLUMN
from ...state.hashing import Hashes, hash_columns, identity_columns
from ...state.runs.layout import Records, RowLayout
from ...state.runs.merge import Expired
from ...state.runs.run_file import FilePool
from ...state.runs.spilling_table import SpillingTable, TableShape
from ...state.settings import MemoryShare, RunSettings
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import KeyHasher, plain_column
from ...state.slots.table import Slots
from ...state.snapshot import FilesCut, RestoredFiles
from ...state.values import Index
from ..base import OperatorContext
from ..keyed_backend import lies_in_rocksdb
from ..sizes import parse_size
from .aggregates import AggregatePlan
from .expiring_group import generation_ms
from .keyed_aggregate import KeyedGroup, Loader, identity_seed

_MANAGED_MEMORY: Final = "taskmanager.memory.managed.size"
_IDENTITY_VERSION: Final = 1
_RESTORE_ROWS: Final = 1 << 16


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


class SpillingSpace:
    """The shared parts of the tables of one operator subtask: memory, threads, a directory, and layout.

    Args:
        name: of the tables.
        number: an int64 column that identifies a row together with the key; None if the key alone does.
        expired: finds the rows that merges leave out, beside those whose keys have expired.
    """

    def __init__(
        self,
        plan: AggregatePlan,
        context: OperatorContext,
        name: str,
        number: pa.Field | None = None,
        expired: Expired | None = None,
    ) -> None:
        fields = [plan.schema.field(key) for key in plan.keys]
        types, seed = [field.type for field in fields], identity_seed(context.job_name)
        self.plan = plan
        self.identify: Callable[[Sequence[pa.Array]], tuple[Hashes, Hashes | None]]
        """Computes the lanes of rows in runs."""
        self.hasher: KeyHasher
        if number is None:
            # Keys are looked up on disk by their hashes, so an index without hashes would not work.
            self.hasher = KeyHasher(types, seed, dense=False)
            self.identify = self.hasher.identify
        else:
            self.hasher = cell_hasher = CellHasher(types, seed)
            self.identify = cell_hasher.identify_in_runs
        self.share = MemoryShare(_managed_memory(context))
        """The current bytes of all tables together."""
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
            schema=stored_schema(plan, number),
            keys=plan.keys if number is None else (*plan.keys, number.name),
            wide=not self.hasher.exact or fields[0].nullable,
            identity="" if self.hasher.exact else f"{_IDENTITY_VERSION}-{seed:016x}",
            identify=self._identify_rows,
            key_groups=context.key_groups,
            max_parallelism=context.max_parallelism,
            expired=expired if plan.ttl_ms is None else self._expired,
        )
        self._now_ms = context.clock.now_ms

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
        self.table = SpillingTable(
            space.shape,
            lambda: GroupDelta(space.plan, space.hasher, self._load, space.shape.schema),
            space.directory,
            space.new_id,
            space.settings,
            space.threads.submit,
            memory_bytes or space.share,
            space.pool,
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
        for start in range(0, table.num_rows, _RESTORE_ROWS):
            rows = table.slice(start, _RESTORE_ROWS)
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


def stored_schema(plan: AggregatePlan, number: pa.Field | None = None) -> pa.Schema:
    """Return the columns of a run: keys, `number` if there is one, and state.

    Added columns are the same in all rows of a table, or follow from `number`.
    """
    added = {field.name for field in plan.added}
    fields = [field for field in list(plan.state_schema)[1:] if field.name not in added]
    if number is not None:
        fields.insert(len(plan.keys), number)
    return pa.schema([field.remove_metadata() for field in fields])


def _managed_memory(context: OperatorContext) -> int:
    text = context.options.get(_MANAGED_MEMORY)
    return RunSettings().memory_bytes if text is None else parse_size(text, _MANAGED_MEMORY)
