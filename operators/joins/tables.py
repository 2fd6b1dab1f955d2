"""The tables of joins in snapshots: the rows of each side, and the times up to which they were released.

A row is identified by its key group and a number that its subtask gives it. Deltas carry no marks
of released rows, because event time tells which these are: table `time` has, per key group, the
time before which the rows of each side were released at the cut. A restore leaves out older rows of
the base or of earlier deltas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import StateError
from ...state.aggregates.accumulators import Mask
from ...state.evolution import is_widening, with_meaning
from ...state.hashing import hash_columns, key_groups_of
from ...state.slots.key_index import plain_column, too_much_text
from ...state.snapshot import KEY_GROUP_COLUMN, RestoredState, StateInfo, TableCut, state_info
from ...state.values import Index
from ..time_progress import WATERMARK_COLUMN, KeyGroupTable, TimeProgress
from .columns import LEFT, MATCHED_COLUMN, RIGHT, ROW_COLUMN, TIME_COLUMN, JoinColumns

SIDES: Final = ("left", "right")
"""The tables of rows."""
ROW_KEYS: Final = (KEY_GROUP_COLUMN, ROW_COLUMN)


def row_schema(columns: pa.Schema, *, marks: bool) -> pa.Schema:
    """Return the schema of the table of one side."""
    fields = [
        pa.field(KEY_GROUP_COLUMN, pa.int32(), False),
        pa.field(ROW_COLUMN, pa.int64(), False),
        pa.field(TIME_COLUMN, pa.int64(), False),
    ]
    if marks:
        fields.append(pa.field(MATCHED_COLUMN, pa.bool_(), False))
    return pa.schema([*fields, *columns])


def join_infos(
    columns: JoinColumns, marks: Sequence[bool], kind: str, window: str = ""
) -> list[StateInfo]:
    """Return the declarations of all tables; `window` is set if rows wait for a window that must
    not change."""
    infos = []
    for side in (LEFT, RIGHT):
        meaning = {f"the key of the {SIDES[side]} stream": ", ".join(columns.keys[side])}
        if window:
            meaning["the window"] = window
        schema = with_meaning(row_schema(columns.sides[side], marks=marks[side]), meaning)
        infos.append(state_info(SIDES[side], kind, schema, ROW_KEYS))
    return [*infos, progress_table(kind).info()]


def progress_table(kind: str) -> KeyGroupTable:
    """Return the table of the progress of event time.

    Its expiry bounds are the times before which rows of each side are released.
    """
    bounds = [f"{side}_gone_before" for side in SIDES]
    return KeyGroupTable.of_times("time", kind, WATERMARK_COLUMN, *bounds)


# --- cuts ---------------------------------------------------------------------------------------


class RowsCut(Protocol):
    """A cut of the rows of one side in memory. Call `rows` or `close` once, in any thread."""

    @property
    def epoch(self) -> int:
        """The number of the cut."""
        ...

    def rows(self, since: int | None) -> tuple[pa.Table, Index, Index, Mask | None]:
        """Return the rows added or marked after cut `since`, or all for None: rows, ids, times and
        marks, if they have marks.
        """
        ...

    def close(self) -> None:
        """Close the cut without reading it."""
        ...


def rows_cut(cut: RowsCut, columns: JoinColumns, side: int, max_parallelism: int) -> TableCut:
    """Return the table of one side."""

    def make(since: int | None) -> pa.Table:
        rows, ids, times, matched = cut.rows(since)
        added = [(ROW_COLUMN, pa.array(ids)), (TIME_COLUMN, pa.array(times))]
        if matched is not None:
            added.append((MATCHED_COLUMN, pa.array(matched)))
        return _by_key_group(rows, added, columns.keys[side], max_parallelism)

    return TableCut(make, keys=ROW_KEYS, epoch=cut.epoch, discard=cut.close)


def _by_key_group(
    rows: pa.Table,
    added: Sequence[tuple[str, pa.Array]],
    keys: Sequence[str],
    max_parallelism: int,
) -> pa.Table:
    """Return rows with their key group and further columns in front, sorted by key group."""
    hashes = [hash_columns([batch.column(key) for key in keys]) for batch in rows.to_batches()]
    groups = key_groups_of(
        np.concatenate(hashes) if hashes else np.zeros(0, np.uint64), max_parallelism
    )
    fields = [pa.field(KEY_GROUP_COLUMN, pa.int32(), False)]
    fields += [pa.field(name, array.type, False) for name, array in added]
    arrays = [pa.array(groups), *(array for _, array in added), *rows.columns]
    table = pa.Table.from_arrays(arrays, schema=pa.schema([*fields, *rows.schema]))
    # uint16 sorts by radix; there are at most 32,768 key groups
    order = np.argsort(groups.astype(np.uint16), kind="stable")
    try:
        return table.take(pa.array(order))
    except pa.ArrowInvalid as error:
        raise too_much_text(error) from error


# --- restoring ----------------------------------------------------------------------------------


class RestoredRows:
    """The rows of one side of a restored snapshot.

    Attributes:
        rows: under today's schema.
        groups: the key group of each.
        ids: their numbers.
        times: their event times, ms.
        matched: their marks; None if they have none.
    """

    def __init__(self, table: pa.Table, schema: pa.Schema, step: str, *, marks: bool) -> None:
        if marks and MATCHED_COLUMN not in table.column_names:
            raise StateError(
                "the snapshot does not say which rows have matched: its join had another `how`",
                where=step,
                fix="keep `how` as it was, or start the join under a new name",
            )
        self.groups = _numbers(table, KEY_GROUP_COLUMN)
        self.ids, self.times = _numbers(table, ROW_COLUMN), _numbers(table, TIME_COLUMN)
        self.matched: npt.NDArray[np.bool_] | None = (
            table.column(MATCHED_COLUMN).to_numpy() if marks else None
        )
        columns = [_fitted(table, field, step) for field in schema]
        self.rows = pa.RecordBatch.from_arrays(columns, schema=schema)

    def picked(self, which: Index) -> RestoredRows:
        """Return some of the rows."""
        found = object.__new__(RestoredRows)
        found.rows = self.rows.take(pa.array(which))
        found.groups, found.ids, found.times = (
            each[which] for each in (self.groups, self.ids, self.times)
        )
        found.matched = None if self.matched is None else self.matched[which]
        return found


def restored_rows(
    state: RestoredState,
    side: int,
    schema: pa.Schema,
    step: str,
    progress: TimeProgress,
    *,
    marks: bool,
) -> RestoredRows | None:
    """Return the rows of one side that wait, in order of arrival; None if there are none.

    Rows that were released at the cut are left out. Each subtask of the snapshot numbered its rows
    on its own, and deltas put rows that were marked since behind the others, hence the order.

    Raises:
        StateError: they do not fit today's join.
    """
    table = state.tables.get(SIDES[side])
    if table is None or not table.num_rows:
        return None
    found = RestoredRows(table, schema, step, marks=marks)
    waits = np.flatnonzero(found.times >= progress.expired(found.groups, side))
    found = found.picked(waits[np.argsort(found.ids[waits], kind="stable")])
    return found if found.rows.num_rows else None


def _numbers(table: pa.Table, column: str) -> Any:
    return table.column(column).to_numpy()


def _fitted(table: pa.Table, field: pa.Field, step: str) -> pa.Array:
    """Return one column of a restored table as it is buffered today."""
    if field.name not in table.column_names:
        if field.nullable:
            return pa.nulls(table.num_rows, field.type)
        problem = "is not in the snapshot"
    else:
        column = plain_column(table.column(field.name))
        if column.type == field.type:
            return column
        if is_widening(column.type, field.type):
            return column.cast(field.type)
        problem = f"was {column.type} and is now {field.type}"
    raise StateError(
        f"waiting rows cannot be restored: column `{field.name}` {problem}",
        where=step,
        fix="keep the columns of the input as they were, or start the join under a new name",
    )
