"""The changes of a state from one snapshot to another, key by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...state.keyed.canonical import NAMESPACE_COLUMN
from .keys import KEY_TEXT
from .snapshot import StoredState

if TYPE_CHECKING:
    import polars as pl

CHANGE: Final = pa.field("change", pa.string(), False)
BEFORE, AFTER = "_before", "_after"
_ROW = "row_"


def changes_schema(identity: Sequence[str], schema: pa.Schema) -> pa.Schema:
    """`change` (added, changed, removed), the identity, and each other column before and after."""
    kept = [schema.field(name) for name in _shown(identity, schema)]
    fields = []
    for field in schema:
        if field.name not in _shown(identity, schema):
            fields += [field.with_name(field.name + suffix) for suffix in (BEFORE, AFTER)]
    return pa.schema([CHANGE, *kept, *(field.with_nullable(True) for field in fields)])


def check_comparable(
    before: StoredState, after: StoredState, old: pa.Schema, new: pa.Schema
) -> None:
    """Raise StateError unless the rows of two states can be compared key by key."""
    if before.max_parallelism != after.max_parallelism:
        raise StateError(
            f"the snapshots have other key groups {after.text} from=`{before.max_parallelism}` "
            f"to=`{after.max_parallelism}`",
            fix="rewrite one of them to the max parallelism of the other first",
        )
    if before.identity != after.identity or not old.equals(new):
        raise StateError(
            f"the state was of another type in the older snapshot {after.text} "
            f"from=`{_types(old)}` to=`{_types(new)}`",
            fix="read both snapshots, and compare what they have in common",
        )


def changed_rows(before: pa.Table, after: pa.Table, identity: Sequence[str]) -> pa.Table:
    """The rows that are not the same in both; each identity occurs once in each.

    Nulls are equal to nulls, and NaN to NaN.
    """
    import polars as pl  # takes a while, and few reads need it

    target = changes_schema(identity, after.schema)
    pairs = _pairs(before, after, identity)
    left, right = pairs.get_column("left"), pairs.get_column("right")
    there = before.take(left.to_arrow()), after.take(right.to_arrow())
    others = [name for name in after.column_names if name not in _shown(identity, after.schema)]
    differ = np.zeros(len(pairs), bool)
    for name in others:
        old, new = (pl.Series(table.column(name)) for table in there)
        differ |= old.ne_missing(new).to_numpy()
    added, removed = left.is_null().to_numpy(), right.is_null().to_numpy()
    which = pa.array(np.flatnonzero(added | removed | differ))
    words = np.where(added, "added", np.where(removed, "removed", "changed"))
    columns: list[pa.ChunkedArray | pa.Array] = [pa.array(words, pa.string()).take(which)]
    for name in _shown(identity, after.schema):
        old, new = (table.column(name).take(which) for table in there)
        gone = pa.array(removed).take(which)
        columns.append(pa.compute.if_else(gone, old, new))
    for name in others:
        columns += [table.column(name).take(which) for table in there]
    return pa.Table.from_arrays(columns, schema=target)


def _pairs(before: pa.Table, after: pa.Table, identity: Sequence[str]) -> pl.DataFrame:
    """Numbers of rows of equal identity; null where one side has none."""
    import polars as pl

    frames = []
    for table, name in ((before, "left"), (after, "right")):
        frame = pl.from_arrow(table.select(list(identity)))
        assert isinstance(frame, pl.DataFrame)
        frames.append(frame.with_row_index(name))
    return frames[0].join(frames[1], on=list(identity), how="full", nulls_equal=True)


def _shown(identity: Sequence[str], schema: pa.Schema) -> list[str]:
    """The columns that come once: the identity, and what follows from it."""
    derived = ("key_group", KEY_TEXT, NAMESPACE_COLUMN)
    return [name for name in schema.names if name in identity or name in derived]


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
