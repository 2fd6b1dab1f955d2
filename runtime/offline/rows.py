"""The rows of keyed state by ranges of key groups, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import StateError
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import DELETED_COLUMN, KEY_GROUP_COLUMN, StateHandle
from ..task.parquet_files import own_rows
from .files import OpenStore
from .native import native_tables
from .snapshot import StatePiece, StoredState

BATCH_ROWS: Final = 65_536
OnRead = Callable[[str, int, tuple[str, ...]], None]
"""(file, row groups, columns): told what of a file is read."""


def schema_of(state: StoredState, opened: OpenStore) -> pa.Schema:
    """The columns of a keyed state's table, without `deleted`.

    Raises:
        StateError: nothing says what they are.
    """
    if state.schema is not None:
        return state.schema
    for piece in state.pieces:
        for handle in reversed(piece.handles):
            if handle.kind in ("table", "delta"):
                with opened.parquet(handle) as file:
                    names = [name for name in file.schema_arrow.names if name != DELETED_COLUMN]
                    return pa.schema([file.schema_arrow.field(name) for name in names])
    raise StateError(
        f"nothing says which columns the state has {state.text}",
        fix="take a canonical savepoint, and read that",
    )


def read_rows(
    state: StoredState,
    groups: KeyGroupRange,
    opened: OpenStore,
    columns: Sequence[str] | None = None,
    on_read: OnRead | None = None,
) -> Iterator[pa.Table]:
    """The rows with these key groups, of each key the newest, sorted by key group within a subtask.

    Args:
        state: keyed.
        groups: which key groups.
        opened: the store at the state's root.
        columns: which columns, in this order; None: all.
        on_read: for tests and statistics.

    Yields:
        tables of about a row group, or of a million rows where deltas are merged.

    Raises:
        StateError: a file is missing or corrupt, or of a format that cannot be read here.
    """
    schema = schema_of(state, opened)
    wanted = tuple(schema.names if columns is None else columns)
    target = pa.schema([schema.field(name) for name in wanted])
    note = on_read or (lambda *_: None)
    for piece in state.pieces:
        if not piece.overlaps(groups):
            continue
        if piece.native:
            tables = native_tables(state, piece, groups, schema, opened)
        elif len(piece.handles) == 1 and piece.handles[0].kind == "table":
            tables = _one_file(piece.handles[0], groups, wanted, opened, note)
        else:
            tables = _chain(state, piece, groups, wanted, opened, note)
        for table in tables:
            if table.num_rows:
                yield _shaped(table, target)


def _one_file(
    handle: StateHandle,
    groups: KeyGroupRange,
    wanted: Sequence[str],
    opened: OpenStore,
    note: OnRead,
) -> Iterator[pa.Table]:
    with opened.parquet(handle) as file:
        for number, inside in _row_groups(file, groups):
            names = _stored(file, wanted if inside else (KEY_GROUP_COLUMN, *wanted))
            note(handle.file or "", 1, names)
            opened.verify_row_group(handle, file, number)
            table = file.read_row_group(number, columns=list(names), use_threads=False)
            yield table if inside else own_rows(table, groups)


def _row_groups(file: pq.ParquetFile, groups: KeyGroupRange) -> Iterator[tuple[int, bool]]:
    """Row groups with rows of `groups`, and whether all of theirs are."""
    column = file.schema_arrow.names.index(KEY_GROUP_COLUMN)
    for number in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(number).column(column).statistics
        if KeyGroupRange(statistics.min, statistics.max).overlaps(groups):
            yield number, statistics.min in groups and statistics.max in groups


def _chain(
    state: StoredState,
    piece: StatePiece,
    groups: KeyGroupRange,
    wanted: Sequence[str],
    opened: OpenStore,
    note: OnRead,
) -> Iterator[pa.Table]:
    """A base and its deltas, merged: as many key groups at a time as make about a block of rows."""
    from ..task.state_restore import (  # polars, which takes a while to import
        BLOCK_ROWS,
        merge_chain,
    )

    handles = [handle for handle in piece.handles if handle.kind in ("table", "delta")]
    keys = state.identity
    needed = list(dict.fromkeys((KEY_GROUP_COLUMN, *keys, *wanted, DELETED_COLUMN)))
    low = max(groups.first, min(handle.first_key_group for handle in handles))
    high = min(groups.last, max(handle.last_key_group for handle in handles))
    rows = sum(handle.rows for handle in handles)
    step = max(1, (high - low + 1) * BLOCK_ROWS // max(rows, 1))
    for first in range(low, high + 1, step):
        some = KeyGroupRange(first, min(first + step - 1, high))
        parts = []
        for handle in handles:
            if KeyGroupRange(handle.first_key_group, handle.last_key_group).overlaps(some):
                tables = list(_one_file(handle, some, needed, opened, note))
                parts += [pa.concat_tables(tables)] if tables else []
        if parts:
            yield merge_chain(parts, keys)


def _stored(file: pq.ParquetFile, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of `wanted` that the file has: older files may lack some."""
    present = frozenset(file.schema_arrow.names)
    return tuple(name for name in dict.fromkeys(wanted) if name in present)


def _shaped(table: pa.Table, target: pa.Schema) -> pa.Table:
    """The columns of `target`, null where the table has none."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in target
    ]
    nullable = [field.with_nullable(True) for field in target]
    return pa.Table.from_arrays(columns, schema=pa.schema(nullable))
