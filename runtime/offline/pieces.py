"""Tables of a new savepoint, one file per state and subtask. Any number of processes write them.

A state that is kept is rewritten for other subtasks, and for another number of key groups.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import StateError
from ...state.hashing import key_group_of
from ...state.keygroups import KeyGroupRange, key_group_range
from ...state.runs.cut import hash_range
from ...state.snapshot import KEY_GROUP_COLUMN, StateHandle
from ..protocol import names
from ..task.parquet_files import encode_tables
from .files import OpenStore
from .keys import is_opaque, key_groups
from .rows import read_rows, schema_of
from .snapshot import StoredState

INLINE_BYTES_MAX: Final = 1 << 20
"""Items up to here lie in the metadata, as in the savepoints of jobs."""
BLOCK_ROWS: Final = 1 << 20
"""The approximate number of rows that are sorted at a time."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The place where a new savepoint is written.

    Attributes:
        root: address of its directory.
        options: what the storage needs.
        max_parallelism: its number of key groups.
    """

    root: str
    options: Mapping[str, str]
    max_parallelism: int


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of a new savepoint: what it is for."""

    operator: str
    subtask: int
    handle: StateHandle


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One state of one subtask to be taken over; plain data, carried out anywhere.

    Attributes:
        goal: where to.
        state: from where.
        options: what the storage of the base needs.
        subtask: of the new savepoint.
        parallelism: of the operator there.
    """

    goal: Goal
    state: StoredState
    options: Mapping[str, str]
    subtask: int
    parallelism: int

    def run(self, attempt: str) -> WrittenFile | None:
        """Write the file; None: no rows. Raises StateError as `rewritten`."""
        groups = key_group_range(self.subtask, self.parallelism, self.goal.max_parallelism)
        with (
            OpenStore(self.state.root, self.options) as base,
            OpenStore(self.goal.root, self.goal.options) as goal,
        ):
            tables = rewritten(self.state, groups, self.goal.max_parallelism, base)
            return write_table(
                goal, self.state.operator, self.subtask, self.state.name,
                self.state.identity, tables, attempt,
            )  # fmt: skip


def write_table(
    opened: OpenStore,
    operator: str,
    subtask: int,
    state: str,
    keys: tuple[str, ...],
    tables: Iterable[pa.Table],
    attempt: str,
) -> WrittenFile | None:
    """Write the rows of one state and subtask; None: there are none.

    Args:
        opened: the store of the new savepoint.
        operator: its name.
        subtask: its index.
        state: its name.
        keys: the columns that identify a row.
        tables: sorted by key group.
        attempt: part of the file's name; unique among all who may write this piece, so that one that
            was given up and goes on all the same changes no file of another.
    """
    with tempfile.TemporaryDirectory(prefix="headgate-") as directory:
        encoded = encode_tables(tables, lambda: Path(directory) / "table")
        if encoded is None:
            return None
        name = names.savepoint_file(operator, subtask, state, "table", attempt)
        opened.run(opened.store.write_file(name, encoded.data))
    handle = StateHandle(
        state=state,
        kind="table",
        size_bytes=encoded.size_bytes,
        checksum=encoded.checksum,
        rows=encoded.rows,
        file=name,
        first_key_group=encoded.first_key_group,
        last_key_group=encoded.last_key_group,
        keys=keys,
        footer=encoded.footer,
    )
    return WrittenFile(operator, subtask, handle)


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
