"""The key group of each row, from its key columns; and lists and maps collected into a row per key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import StateError
from ...state.hashing import hash_columns, hash_keys, key_groups_of
from ...state.keyed.keys import decode_key
from ...state.snapshot import KEY_GROUP_COLUMN

KEY_TEXT: Final = "key_text"
"""Beside a column `key` of bytes: the key for people."""
KEYS_MAX: Final = 10_000
"""The largest number of keys that are asked for by name."""


def is_opaque(columns: Sequence[str], schema: pa.Schema) -> bool:
    """True if the key column holds the bytes of keys of no declared type."""
    return tuple(columns) == ("key",) and KEY_TEXT in schema.names


def key_groups(
    table: pa.Table, columns: Sequence[str], max_parallelism: int, *, opaque: bool
) -> npt.NDArray[np.int32]:
    """The key group of each row.

    Args:
        table: has the key columns.
        columns: of the key; none: all rows have one key.
        max_parallelism: the number of key groups.
        opaque: the key column holds bytes of keys (`is_opaque`).

    Raises:
        StateError: a column is of a type that cannot be a key.
    """
    if not columns:
        return np.zeros(table.num_rows, np.int32)
    if opaque:
        keys = [decode_key(data) for data in table.column(columns[0]).to_pylist()]
        return key_groups_of(hash_keys(keys), max_parallelism)
    arrays = [table.column(name).combine_chunks() for name in columns]
    return key_groups_of(hash_columns(arrays), max_parallelism)


def groups_of_values(
    values: Sequence[Sequence[Any]], types: Sequence[pa.DataType], max_parallelism: int
) -> frozenset[int] | None:
    """The key groups of all keys made of these values of each key column; None: too many to tell.

    Raises:
        StateError: a value does not fit its column.
    """
    count = int(np.prod([len(some) for some in values]))
    if count > KEYS_MAX:
        return None
    lists = list(zip(*product(*values), strict=True)) or [()] * len(types)
    columns = [values_array(column, type_) for column, type_ in zip(lists, types, strict=True)]
    return frozenset(key_groups_of(hash_columns(columns), max_parallelism).tolist())


def values_array(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Values that were asked for as a column. Raises StateError if one does not fit."""
    try:
        return pa.array(list(values), type_)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise StateError(
            f"a value does not fit the column type=`{type_}` values=`{list(values)!r:.200}`"
        ) from error


def collected_type(entry: pa.Field, value: pa.Field) -> pa.DataType:
    """The type of a collected column: a list in the order of `position`, or a map."""
    if entry.name == "position":
        return pa.list_(value.type)
    return pa.map_(entry.type, value.type)


def whole_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The rows of sorted tables, cut so that no key group goes over two of them."""
    held: list[pa.Table] = []
    for table in tables:
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        cut = int(np.searchsorted(groups, groups[-1]))
        if held and held[-1].column(KEY_GROUP_COLUMN)[-1].as_py() != groups[0]:
            yield pa.concat_tables(held)
            held = []
        if cut:
            yield pa.concat_tables([*held, table.slice(0, cut)])
            held = []
        held.append(table.slice(cut))
    if held:
        yield pa.concat_tables(held)


def collect(table: pa.Table, keys: Sequence[str], entry: str, value: str) -> pa.Table:
    """One row per key: the key columns, and `value` as a list or a map of its entries.

    Args:
        table: rows of whole keys, in any order.
        keys: the columns to group by, the key group first.
        entry: `position`, by which a list is ordered, or the column of map keys.
        value: the column to collect.
    """
    import polars as pl  # takes a while, and few reads need it

    frame = pl.from_arrow(table.select([*keys, entry]))
    assert isinstance(frame, pl.DataFrame)
    order = frame.with_row_index("row_").sort([*keys, entry]).get_column("row_").to_numpy()
    rows = table.take(pa.array(order))
    sorted_keys = pl.from_arrow(rows.select(list(keys)))
    assert isinstance(sorted_keys, pl.DataFrame)
    runs = sorted_keys.select(pl.struct(pl.all()).rle_id()).to_series().to_numpy()
    starts = np.flatnonzero(np.diff(runs, prepend=np.int64(-1)))
    offsets = pa.array(np.append(starts, table.num_rows), pa.int32())
    entries = rows.column(entry).combine_chunks()
    values = rows.column(value).combine_chunks()
    if entry == "position":
        joined = pa.ListArray.from_arrays(offsets, values)
    else:
        joined = pa.MapArray.from_arrays(offsets, entries, values)
    firsts = rows.select(list(keys)).take(pa.array(starts))
    kind = collected_type(table.schema.field(entry), table.schema.field(value))
    return firsts.append_column(value, pc.cast(joined, kind))
