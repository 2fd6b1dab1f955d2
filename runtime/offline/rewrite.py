"""A keyed state as it is, for other subtasks, and for another number of key groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import StateError
from ...state.hashing import key_group_of
from ...state.keygroups import KeyGroupRange
from ...state.runs.cut import hash_range
from ...state.snapshot import KEY_GROUP_COLUMN
from .files import OpenStore
from .keys import is_opaque, key_groups
from .rows import read_rows, schema_of
from .snapshot import StoredState

BLOCK_ROWS: Final = 1 << 20
"""The approximate number of rows that are sorted at a time."""


def rewritten(
    state: StoredState, groups: KeyGroupRange, max_parallelism: int, opened: OpenStore
) -> Iterator[pa.Table]:
    """All columns of the rows that belong to `groups` of `max_parallelism`, sorted by key group.

    Args:
        state: keyed.
        groups: the wanted key groups, of the new number.
        max_parallelism: the new number of key groups.
        opened: the store at the state's root.

    Raises:
        StateError: a file is missing or corrupt; or the number of key groups is another one, and key
            groups do not follow from the columns of the state.
    """
    if max_parallelism == state.max_parallelism:
        yield from read_rows(state, groups, opened)
        return
    if state.identity == (KEY_GROUP_COLUMN,):
        yield _per_group(state, groups, max_parallelism, opened)
        return
    if state.hash_columns is None:
        raise StateError(
            f"rows of this kind cannot go to another max parallelism {state.text} kind=`{state.kind}`",
            fix="remove the state, or keep the max parallelism",
        )
    per_group = max(1, state.rows // max_parallelism)
    step = max(1, BLOCK_ROWS // per_group)
    for first in range(groups.first, groups.last + 1, step):
        some = KeyGroupRange(first, min(first + step - 1, groups.last))
        rows = list(_regrouped(state, some, max_parallelism, opened))
        if rows:
            table = pa.concat_tables(rows)
            order = np.argsort(table.column(KEY_GROUP_COLUMN).to_numpy(), kind="stable")
            yield table.take(pa.array(order))


def _regrouped(
    state: StoredState, groups: KeyGroupRange, max_parallelism: int, opened: OpenStore
) -> Iterator[pa.Table]:
    for table in read_rows(
        state, former_groups(groups, max_parallelism, state.max_parallelism), opened
    ):
        former = table.column(KEY_GROUP_COLUMN).to_numpy()
        if not np.array_equal(_groups(state, table, state.max_parallelism), former):
            raise StateError(
                f"the key groups of the state do not follow from its keys {state.text}",
                fix="keep the max parallelism, and report this",
            )
        now = _groups(state, table, max_parallelism)
        index = table.schema.get_field_index(KEY_GROUP_COLUMN)
        table = table.set_column(index, table.schema.field(index), pa.array(now, pa.int32()))
        yield table.filter(pa.array((now >= groups.first) & (now <= groups.last)))


def _groups(state: StoredState, table: pa.Table, max_parallelism: int) -> npt.NDArray[np.int32]:
    columns = state.hash_columns or ()
    opaque = is_opaque(columns, table.schema)
    return key_groups(table, columns, max_parallelism, opaque=opaque)


def former_groups(groups: KeyGroupRange, max_parallelism: int, before: int) -> KeyGroupRange:
    """The key groups, of `before`, that have all keys of `groups`, of `max_parallelism`."""
    low, high = hash_range(groups.first, groups.last, max_parallelism)
    return KeyGroupRange(key_group_of(low, before), key_group_of(high, before))


def _per_group(
    state: StoredState, groups: KeyGroupRange, max_parallelism: int, opened: OpenStore
) -> pa.Table:
    """Event time per key group: of each new one the least of those that its keys come from.

    They differ only where subtasks were at different times. There, records that would have been late for
    some of the keys are in time once more; with the greatest, records in time would be dropped.
    """
    schema = schema_of(state, opened)
    everything = KeyGroupRange(0, state.max_parallelism - 1)
    parts = [schema.empty_table(), *read_rows(state, everything, opened)]
    table = pa.concat_tables(parts, promote_options="permissive")
    former = table.column(KEY_GROUP_COLUMN).to_numpy()
    wanted = range(groups.first, groups.last + 1)
    rows = []
    for group in wanted:
        of = former_groups(KeyGroupRange(group, group), max_parallelism, state.max_parallelism)
        rows.append((former >= of.first) & (former <= of.last))
    kept = [group for group, mask in zip(wanted, rows, strict=True) if mask.any()]
    columns: list[pa.Array] = []
    for field in schema:
        if field.name == KEY_GROUP_COLUMN:
            columns.append(pa.array(kept, field.type))
            continue
        values = table.column(field.name).to_numpy()
        columns.append(pa.array([values[mask].min() for mask in rows if mask.any()], field.type))
    return pa.Table.from_arrays(columns, schema=schema)
