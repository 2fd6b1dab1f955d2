"""The columns of a join: those buffered of each side, and those of the result."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa

from ...errors import PlanError
from ...state.slots.key_index import stored_key_type
from ...state.snapshot import DELETED_COLUMN, KEY_GROUP_COLUMN
from ..origin import Origin

LEFT, RIGHT = 0, 1
ROW_COLUMN, TIME_COLUMN, MATCHED_COLUMN = "_row", "_time", "_matched"
RESERVED = (KEY_GROUP_COLUMN, DELETED_COLUMN, ROW_COLUMN, TIME_COLUMN, MATCHED_COLUMN)
"""The names that the tables of a snapshot use for their own columns."""


class JoinColumns(msgspec.Struct, frozen=True):
    """The mapping from the columns of both sides to the result. Picklable.

    Attributes:
        sides: the columns of each side as they are buffered: without dictionaries and views.
        keys: the key columns of each side, in the same order.
        result: all columns of the left side, then those of the right one, without keys that have
            the same name on both sides.
        picks: the place of each result column in the left and in the right side, or None; both for
            a key that appears once.
    """

    sides: tuple[pa.Schema, pa.Schema]
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    result: pa.Schema
    picks: tuple[tuple[int | None, int | None], ...]

    def compose(
        self,
        left: Sequence[pa.Array] | None,
        right: Sequence[pa.Array] | None,
        keys_of: int,
        rows: int,
    ) -> pa.RecordBatch:
        """Compose rows of the result from the columns of both sides; None stands for nulls.

        Shared keys come from the side `keys_of`, which must be complete.
        """
        arrays = []
        for (at_left, at_right), field in zip(self.picks, self.result, strict=True):
            side, at = (left, at_left) if at_right is None else (right, at_right)
            if at_left is not None and at_right is not None and keys_of == LEFT:
                side, at = left, at_left
            if side is None or at is None:
                arrays.append(pa.nulls(rows, field.type))
            else:
                arrays.append(side[at])
        return pa.RecordBatch.from_arrays(arrays, schema=self.result)

    def key_columns(self, side: int, data: pa.RecordBatch) -> list[pa.Array]:
        """Return the key columns of a batch."""
        return [data.column(name) for name in self.keys[side]]


def join_columns(
    schemas: tuple[pa.Schema, pa.Schema],
    keys: tuple[tuple[str, ...], tuple[str, ...]],
    nullable: tuple[bool, bool],
    suffix: str | None,
    names: tuple[str, str],
    origin: Origin,
) -> JoinColumns:
    """Return the columns of a join of streams with these schemas.

    Args:
        schemas: of the left and the right stream.
        keys: their key columns.
        nullable: the sides of which the result may lack a row.
        suffix: appended to columns of the right side whose names are taken.
        names: of the streams, for errors.
        origin: the user's line.

    Raises:
        PlanError: the keys differ, names clash, or snapshots reserve a name.
    """
    left, right = (plain_schema(schema) for schema in schemas)
    _check_keys((left, right), keys, names, origin)
    for schema, name in zip((left, right), names, strict=True):
        for column in RESERVED:
            if column in schema.names:
                raise PlanError(
                    f"`{name}` has a column `{column}`, a name that the state of joins needs",
                    where=str(origin),
                    fix="give it another name with select",
                )
    shared = {b: a for a, b in zip(*keys, strict=True) if a == b}
    fields = [
        field.with_nullable(field.nullable or (nullable[LEFT] and field.name not in shared))
        for field in left
    ]
    picks: list[tuple[int | None, int | None]] = [
        (at, right.get_field_index(field.name) if field.name in shared else None)
        for at, field in enumerate(left)
    ]
    for at, field in enumerate(right):
        if field.name in shared:
            continue
        name = free_name(field.name, [f.name for f in fields], right.names, suffix, names, origin)
        fields.append(pa.field(name, field.type, field.nullable or nullable[RIGHT]))
        picks.append((None, at))
    return JoinColumns((left, right), keys, pa.schema(fields), tuple(picks))


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema under which columns are buffered."""
    return pa.schema([field.with_type(stored_key_type(field.type)) for field in schema])


def plain_rows(data: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert the rows of a batch to `schema`, which is its `plain_schema`."""
    if data.schema.names == schema.names and data.schema.types == schema.types:
        return pa.RecordBatch.from_arrays(data.columns, schema=schema)
    columns = [data.column(field.name) for field in schema]
    arrays = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def free_name(
    name: str,
    taken: Sequence[str],
    own: Sequence[str],
    suffix: str | None,
    names: tuple[str, str],
    origin: Origin,
) -> str:
    """Return the name of a column of the second side in the result.

    `own` holds all names of that side, and `taken` those that the result already has.

    Raises:
        PlanError: the name clashes.
    """
    if name not in taken:
        return name
    if suffix is None:
        raise PlanError(
            f"`{names[LEFT]}` and `{names[RIGHT]}` both have a column `{name}`",
            where=str(origin),
            fix=f'add suffix="_right", which makes the second `{name}_right`, or rename it with select',
        )
    renamed = name + suffix
    if renamed in taken or renamed in own:
        raise PlanError(
            f"with suffix `{suffix}` column `{name}` of `{names[RIGHT]}` becomes `{renamed}`, which "
            "already exists",
            where=str(origin),
            fix="choose another suffix",
        )
    return renamed


def _check_keys(
    schemas: tuple[pa.Schema, pa.Schema],
    keys: tuple[tuple[str, ...], tuple[str, ...]],
    names: tuple[str, str],
    origin: Origin,
) -> None:
    """Raise PlanError unless the keys of both sides have equal types and so can match."""
    fields = [[schema.field(key) for key in own] for schema, own in zip(schemas, keys, strict=True)]
    if [field.type for field in fields[LEFT]] != [field.type for field in fields[RIGHT]]:
        shown = [", ".join(f"{field.name}: {field.type}" for field in own) for own in fields]
        raise PlanError(
            f"`{names[LEFT]}` has the key ({shown[LEFT]}), `{names[RIGHT]}` has ({shown[RIGHT]}): "
            "equal keys would not match",
            where=str(origin),
            fix="key both by columns of the same number and types; CAST in select makes them alike",
        )
