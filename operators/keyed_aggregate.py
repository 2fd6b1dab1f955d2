"""What windowed and running aggregates share: reading a batch, and snapshot tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from ..errors import PlanError, StateError
from ..state.accumulators import Frozen
from ..state.aggregate_state import AggregateState
from ..state.hashing import key_groups_of
from ..state.key_index import BatchKeys, KeyHasher, KeyIndex, stored_keys
from ..state.values import Index, values_of
from .aggregates import AggregatePlan
from .elements import Batch, ColumnBatch

Rows = slice | Index


class KeyedRows:
    """The rows of one batch as the aggregates need them: keys and values."""

    __slots__ = ("key_columns", "keys", "size", "values")

    def __init__(self, plan: AggregatePlan, hasher: KeyHasher, data: pa.RecordBatch) -> None:
        self.size: int = data.num_rows
        self.key_columns = [data.column(key) for key in plan.keys]
        self.keys = BatchKeys(hasher, self.key_columns) if plan.keys else None
        read = {spec.column for spec in plan.specs if spec.column is not None}
        self.values = {name: values_of(data.column(name)) for name in read}

    def keys_at(self, rows: Index) -> list[pa.Array]:
        """The keys of some rows, as they are emitted."""
        indices = pa.array(rows)
        return [stored_keys(column).take(indices) for column in self.key_columns]


class KeyedGroup:
    """The keys and aggregates of one window, or of a running aggregate."""

    def __init__(self, plan: AggregatePlan, hasher: KeyHasher) -> None:
        self.keys = KeyIndex(hasher)
        self.state: AggregateState = plan.new_state()

    def add(self, rows: KeyedRows, which: Rows | None) -> Index | None:
        """Add some rows (None: all); returns the slot of each, None if all go to the one group."""
        values = rows.values
        if which is not None:
            values = {name: column.pick(which) for name, column in values.items()}
        if rows.keys is None:
            self.state.add_all(values, rows.size if which is None else row_count(which))
            return None
        slots = self.keys.lookup(rows.keys, which).astype(np.intp)
        self.state.add(slots, values, self.keys.size)
        return slots

    def clear(self) -> None:
        """Forget everything; keeps the memory."""
        self.keys.clear()
        self.state.reset()

    def freeze(self, plan: AggregatePlan, added: Sequence[int]) -> Callable[[], pa.Table]:
        """A cut as it is now: a function that makes its table, without key groups and unsorted.

        The first column holds the hashes. `added` are the values of the plan's added columns.
        """
        keys = self.keys.freeze() if plan.keys else None
        state: dict[str, Frozen] = self.state.freeze()
        size = self.state.size

        def make() -> pa.Table:
            if not size:
                return pa.table({})
            hashes, key_columns = keys() if keys is not None else (np.zeros(size, np.uint64), [])
            constants = [
                pa.array(np.full(size, value)).cast(field.type)
                for value, field in zip(added, plan.added, strict=True)
            ]
            columns = [*key_columns, *constants, *(column() for column in state.values())]
            return pa.Table.from_arrays(
                [pa.array(hashes), *columns], names=["hash", *plan.state_schema.names[1:]]
            )

        return make

    def load(self, plan: AggregatePlan, hasher: KeyHasher, table: pa.Table) -> None:
        """Take over the rows of a snapshot; only once, into an empty group."""
        if not plan.keys:
            self.state.load(np.zeros(1, np.intp), table.slice(0, 1), 1)
            return
        columns = [table.column(key).combine_chunks() for key in plan.keys]
        columns = [plain_column(column) for column in columns]
        slots = self.keys.lookup(BatchKeys(hasher, columns)).astype(np.intp)
        self.state.load(slots, table, self.keys.size)


def snapshot_table(
    plan: AggregatePlan, makers: Sequence[Callable[[], pa.Table]], max_parallelism: int
) -> pa.Table:
    """The tables of `KeyedGroup.freeze` together, with key groups, sorted by them."""
    schema: pa.Schema = plan.state_schema
    tables = [table for table in (make() for make in makers) if table.num_rows]
    if not tables:
        return schema.empty_table()
    table = pa.concat_tables(tables).combine_chunks()
    hashes = table.column(0).chunk(0).to_numpy()
    groups = key_groups_of(hashes, max_parallelism)
    table = table.set_column(0, schema.field(0), pa.array(groups)).cast(schema)
    return table.take(pa.array(np.argsort(groups, kind="stable")))


def check_state_table(plan: AggregatePlan, table: pa.Table) -> None:
    """Raise StateError unless the keys of a snapshot's table are those of this job."""
    for field in [*plan.key_fields, *plan.added]:
        found: Any = None
        if field.name in table.column_names:
            found = table.schema.field(field.name).type
        if found != field.type:
            raise StateError(
                f"the snapshot has other keys column=`{field.name}` expected=`{field.type}` "
                f"found=`{found}`",
                fix="keep the keys as they were, or start the step under a new name",
            )


def columns_of(batch: Batch, step: str) -> pa.RecordBatch:
    """The columns of a batch.

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
    """The seed of the second lane of key identities: another one for each job."""
    return xxhash.xxh3_64_intdigest(job_name.encode())


def plain_column(column: Any) -> pa.Array:
    """The one array of a combined column."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def row_count(rows: Rows) -> int:
    """How many rows are meant."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
