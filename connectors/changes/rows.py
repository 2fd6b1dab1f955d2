"""Changes of rows on their way into columns, and what a change of a row is for those who read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import pyarrow as pa

from ...errors import StateError
from .source import ChangeSettings

R = TypeVar("R")
T = TypeVar("T")


def effects(
    new: R | None,
    old: R | None,
    *,
    inserted: bool,
    moved: bool,
    is_contained: Callable[[R | None], bool],
) -> Iterator[tuple[str, R | None, R | None]]:
    """Yield what a change does: the operation, the row to return, and the row before it.

    A row whose key changes is deleted and inserted, so that a stream that is partitioned by the key stays
    right.

    Args:
        new: the row after the change; None: it was deleted.
        old: the row before it, as far as it is known.
        inserted: it is a new row.
        moved: it has another key than before.
        is_contained: says of a row whether the part of the table with its key was read with the change.
    """
    if new is None:
        if not is_contained(old):
            yield "delete", old, old
    elif moved:
        if not is_contained(old):
            yield "delete", old, old
        if not is_contained(new):
            yield "insert", new, None
    elif not is_contained(new):
        yield "insert" if inserted else "update", new, old


class ChangedRows(Generic[R, T]):
    """Rows of changes that become one piece. R is a row, and T a transaction.

    Attributes:
        ops: the operations.
        new: the rows after the changes.
        old: the rows before them, as far as they are known.
        transactions: those that have made the changes.
        marks: the places of the changes.
        size_bytes: about what all of it takes.
    """

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.new: list[R] = []
        self.old: list[R | None] = []
        self.transactions: list[T] = []
        self.marks: list[tuple[int, ...]] = []
        self.size_bytes = 0

    def add(self, op: str, new: R, old: R | None, transaction: T, mark: tuple[int, ...]) -> None:
        """Add a row."""
        self.ops.append(op)
        self.new.append(new)
        self.old.append(old)
        self.transactions.append(transaction)
        self.marks.append(mark)


def change_batch(
    schema: pa.Schema,
    settings: ChangeSettings,
    rows: pa.Schema,
    ops: Sequence[str],
    column_of: Callable[[pa.Field, str, bool], pa.Array],
    metadata_of: Callable[[str], pa.Array],
) -> pa.RecordBatch:
    """Return changes as columns.

    Args:
        schema: the columns to return.
        settings: of the source.
        rows: all columns of the table that the user wants.
        ops: the operations.
        column_of: returns a column of the table: the field to fill, the name in the table, and True for
            the rows before the changes.
        metadata_of: returns the metadata of this kind.
    """
    kinds = {column: kind for kind, column in settings.metadata.items()}
    columns: list[pa.Array] = []
    for each in schema:
        if each.name == settings.op:
            columns.append(pa.array(ops, each.type))
        elif each.name in kinds:
            columns.append(metadata_of(kinds[each.name]))
        elif each.name in rows.names:
            columns.append(column_of(each, each.name, False))
        else:
            columns.append(column_of(each, each.name.removeprefix(settings.before or ""), True))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def snapshot_batch(
    schema: pa.Schema,
    settings: ChangeSettings,
    rows: pa.Schema,
    values: Mapping[str, pa.Array],
    count: int,
) -> pa.RecordBatch:
    """Return rows that the table has, as if each was a change.

    Args:
        schema: the columns to return.
        settings: of the source.
        rows: all columns of the table that the user wants.
        values: the columns of the rows, by their names.
        count: of the rows.
    """
    return change_batch(
        schema,
        settings,
        rows,
        ["snapshot"] * count,
        lambda field, name, before: pa.nulls(count, field.type) if before else values[name],
        lambda kind: pa.nulls(count, schema.field(settings.metadata[kind]).type),
    )


def check_end(name: str, stop: int | None, *, bounded: bool, other: str) -> int | None:
    """Return the end of a restored split, which a source without an end does not have any more.

    Args:
        name: of the split, for the error.
        stop: the end that it has.
        bounded: the source ends.
        other: the things that another source needs, for the error.

    Raises:
        StateError: it was begun without an end, and the source has one now.
    """
    if stop is None and bounded:
        raise StateError(
            f"{name} is restored without an end, and the source has stop= now",
            fix=f"leave stop= out; or give the source another {other}",
        )
    return stop if bounded else None
