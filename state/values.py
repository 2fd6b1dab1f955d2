"""Columns of a batch as numpy arrays, zero copy where Arrow's layout allows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Index: TypeAlias = npt.NDArray[np.intp]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Values:
    """One column of a batch: `data` without nulls' meaning, `valid` False at nulls (None: no null)."""

    data: Array
    valid: npt.NDArray[np.bool_] | None

    def pick(self, rows: Index | slice) -> Values:
        """Some of the rows."""
        return Values(self.data[rows], None if self.valid is None else self.valid[rows])


@dataclass(frozen=True, slots=True)
class OrderedValues(Values):
    """A column of a batch, and what orders its rows.

    Attributes:
        by: another column; None if only the times count.
        times: of the records; None without event time: then their order is that of arrival.
    """

    by: Values | None
    times: Values | None

    @classmethod
    def of(cls, values: Values, by: Values | None, times: Values | None) -> OrderedValues:
        """`values` with an order."""
        return cls(values.data, values.valid, by, times)


EVENT_TIME: Final = ""
"""Stands for a column: the times of the records."""


def values_of(array: pa.Array) -> Values:
    """A column as numpy, without copying where Arrow's layout allows it."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    dtype = storage_dtype(array.type)
    if dtype is None:
        data = np.empty(len(array), object)
        data[:] = array.to_pylist()
    elif pa.types.is_boolean(array.type):
        data = array.fill_null(False).to_numpy(zero_copy_only=False).view(np.uint8)
    else:
        buffer = np.frombuffer(array.buffers()[1] or b"", dtype)
        data = buffer[array.offset : array.offset + len(array)]
    return Values(data, _valid(array))


def validity_of(array: pa.Array) -> Values:
    """The same of a column whose values nobody reads: `data` means nothing."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return Values(np.zeros(len(array), np.bool_), _valid(array))


def _valid(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    if not array.null_count:
        return None
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def storage_dtype(type_: pa.DataType) -> np.dtype[Any] | None:
    """How a column lies in memory, None for what is handled as Python objects."""
    if pa.types.is_boolean(type_):
        return np.dtype(np.uint8)
    if pa.types.is_integer(type_) or pa.types.is_float32(type_) or pa.types.is_float64(type_):
        dtype: np.dtype[Any] = np.dtype(type_.to_pandas_dtype())
        return dtype
    if pa.types.is_temporal(type_) and not pa.types.is_interval(type_):
        return np.dtype(f"int{type_.bit_width}")
    return None


def is_text(type_: pa.DataType) -> bool:
    """True for strings and bytes of any layout but fixed size."""
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    return any(test(type_) for test in (*text, pa.types.is_large_binary)) or type_ in (
        pa.string_view(),
        pa.binary_view(),
    )
