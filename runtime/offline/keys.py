"""The key group of each row, from its key columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import StateError
from ...state.hashing import hash_columns, hash_keys, key_groups_of
from ...state.keyed.keys import decode_key

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
