"""A table of a snapshot with one value for all key groups of a subtask: its progress in event time.

It has a row per key group, because key groups move: after a change of parallelism a subtask may get
those of several subtasks, and uses the least value of them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ..state.keygroups import KeyGroupRange
from ..state.snapshot import KEY_GROUP_COLUMN, RestoredState, StateInfo, TableCut, state_info
from ..state.values import Index

WATERMARK_COLUMN = "watermark"


def times_schema(*columns: str) -> pa.Schema:
    """Return the schema of a table with these times, int64 ms."""
    fields = [pa.field(KEY_GROUP_COLUMN, pa.int32(), False)]
    return pa.schema([*fields, *(pa.field(column, pa.int64(), False) for column in columns)])


def times_info(name: str, kind: str, schema: pa.Schema) -> StateInfo:
    """Return the declaration of such a table."""
    return state_info(name, kind, schema, (KEY_GROUP_COLUMN,))


def times_cut(own: KeyGroupRange, schema: pa.Schema, *values: int | str | Index) -> TableCut:
    """Return the values of the columns after the key group: one for all own key groups, or one for each."""

    def make(_: int | None) -> pa.Table:
        groups = pa.array(range(own.first, own.last + 1), pa.int32())
        types = [field.type for field in schema][1:]
        columns = [
            pa.array(value, kind)
            if isinstance(value, np.ndarray)
            else pa.repeat(pa.scalar(value, kind), len(groups))
            for value, kind in zip(values, types, strict=True)
        ]
        return pa.Table.from_arrays([groups, *columns], schema=schema)

    return TableCut(make, keys=(KEY_GROUP_COLUMN,))


def by_group(table: pa.Table | None, column: str, max_parallelism: int) -> Index:
    """Return the restored value of each key group; the least int64 where there is none."""
    values = np.full(max_parallelism, np.iinfo(np.int64).min)
    if table is not None:
        values[table.column(KEY_GROUP_COLUMN).to_numpy()] = table.column(column).to_numpy()
    return values


def least(state: RestoredState, name: str, column: str = WATERMARK_COLUMN) -> int | None:
    """Return the least value of table `name` among the restored key groups; None if there is none."""
    table = state.tables.get(name)
    if table is None or not table.num_rows:
        return None
    return int(table.column(column).to_numpy().min())
