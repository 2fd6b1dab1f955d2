"""Rows of values of several types with their keys and times, for tests of aggregates in slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from headgate.operators.elements import ColumnBatch
from headgate.operators.windows import small_windows
from headgate.state.slots import arrays, epochs, key_index
from headgate.state.slots import table as slot_table

VALUES = [
    pa.field("i", pa.int64()),
    pa.field("f", pa.float64()),
    pa.field("d", pa.decimal128(9, 2)),
    pa.field("s", pa.string()),
]


def value_rows(min_size: int, max_size: int) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Return lists of rows: the number of a key, the values, and the time in ms."""
    row = st.tuples(
        st.integers(0, 5),
        st.none() | st.integers(-50, 50),
        st.none() | st.integers(-80, 80).map(lambda n: n / 8),
        st.none() | st.integers(-999, 999).map(lambda n: Decimal(n) / 100),
        st.none() | st.sampled_from(["a", "b", "a longer text"]),
        st.integers(0, 45),
    )
    return st.lists(row, min_size=min_size, max_size=max_size)


def batch_of(
    rows: Sequence[tuple[Any, ...]],
    type_: pa.DataType,
    key_of: Callable[[Any], Any] = lambda number: number,
) -> ColumnBatch:
    """Return rows as a batch with their keys in the column `k`."""
    columns = [pa.array([key_of(row[0]) for row in rows], type_)]
    for at, field in enumerate(VALUES, 1):
        columns.append(pa.array([row[at] for row in rows], field.type))
    data = pa.RecordBatch.from_arrays(columns, names=["k", *(field.name for field in VALUES)])
    return ColumnBatch(data, np.array([row[-1] for row in rows], np.int64))


def tighten(patch: pytest.MonkeyPatch) -> None:
    """Set the bounds of slots so low that a few hundred keys cross them all."""
    for module in (arrays, slot_table):
        patch.setattr(module, "RESERVE_FROM", 64)
        patch.setattr(module, "RESERVED_ENTRIES", 256)
    patch.setattr(arrays, "_FILL_BLOCK", 8)
    patch.setattr(key_index, "PIECE_BYTES_MAX", 128)
    patch.setattr(small_windows, "_DEAD_MIN", 0)
    patch.setattr(small_windows, "KEPT_ROWS_MAX", 6)
    patch.setattr(epochs, "MARK_ALL_FACTOR", 10**9)
