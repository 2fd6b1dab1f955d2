"""Columns of a batch as numpy arrays, zero copy where Arrow's layout allows it, and as integers in order.

`orders_of` maps values that have an order to int64 numbers of the same order, so that one kind of
comparison serves every type; `values_in_order` maps them back.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

Index: TypeAlias = npt.NDArray[np.intp]
Array: TypeAlias = npt.NDArray[Any]


class Values(msgspec.Struct, frozen=True):
    """One column of a batch. `valid` is False at nulls, where `data` means nothing; None: there are no
    nulls.
    """

    data: Array
    valid: npt.NDArray[np.bool_] | None

    def pick(self, rows: Index | slice) -> Values:
        """Return some of the rows."""
        return Values(self.data[rows], None if self.valid is None else self.valid[rows])


class OrderedValues(Values, frozen=True):
    """A column of a batch with the order of its rows.

    Attributes:
        by: another column that decides the order; None if only the times do.
        times: the times of the records; None without event time, where the order is that of arrival.
    """

    by: Values | None
    times: Values | None

    @classmethod
    def of(cls, values: Values, by: Values | None, times: Values | None) -> OrderedValues:
        """Return `values` with an order."""
        return cls(values.data, values.valid, by, times)


class PartialCounts(Values, frozen=True):
    """The counts of partial results: each is added as it is, instead of 1 for each row."""


class PartialAverages(Values, frozen=True):
    """The sums of partial results, with the number of values in each sum."""

    counts: PartialCounts


EVENT_TIME: Final = ""
"""Stands for a column with the times of the records."""
NOW: Final = " now"
"""Stands for a column with the machine's time in every row, ms."""

PARTIAL_ROWS: Final = " partial rows"
"""The column with the number of records in each partial result; only partial results have it."""


def values_of(array: pa.Array) -> Values:
    """Return a column as numpy, without copying where Arrow's layout allows it."""
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
    """Return only the validity of a column: `data` means nothing."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return Values(np.zeros(len(array), np.bool_), _valid(array))


def _valid(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    if not array.null_count:
        return None
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def storage_dtype(type_: pa.DataType) -> np.dtype[Any] | None:
    """Return the numpy type of a column in memory; None for types that are handled as Python objects."""
    if pa.types.is_boolean(type_):
        return np.dtype(np.uint8)
    if pa.types.is_integer(type_) or pa.types.is_float32(type_) or pa.types.is_float64(type_):
        dtype: np.dtype[Any] = np.dtype(type_.to_pandas_dtype())
        return dtype
    if pa.types.is_temporal(type_) and not pa.types.is_interval(type_):
        return np.dtype(f"int{type_.bit_width}")
    return None


def is_text(type_: pa.DataType) -> bool:
    """Return True for strings and bytes of any layout except fixed size."""
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    return any(test(type_) for test in (*text, pa.types.is_large_binary)) or type_ in (
        pa.string_view(),
        pa.binary_view(),
    )


Orders = npt.NDArray[np.int64]

_SIGN = np.uint64(1 << 63)
_REST = np.int64(2**63 - 1)


def has_order(type_: pa.DataType) -> bool:
    """Return True for types that `orders_of` takes: those that lie in memory as numbers."""
    return storage_dtype(type_) is not None


def orders_of(data: Array) -> Orders:
    """Return int64 numbers in the order of numbers from `values_of`. NaN is greater than any number; 0
    and -0 are equal.
    """
    if data.dtype == np.uint64:
        return (data ^ _SIGN).view(np.int64)
    if data.dtype.kind != "f":
        return data.astype(np.int64)
    wide = data.astype(np.float64) + 0.0
    wide[np.isnan(wide)] = np.nan
    return _flipped(wide.view(np.int64))


def values_in_order(orders: Orders, type_: pa.DataType) -> Array:
    """Return the values of a type that `orders_of` was given."""
    dtype: np.dtype[Any] | None = storage_dtype(type_)
    assert dtype is not None
    if dtype == np.uint64:
        return orders.view(np.uint64) ^ _SIGN
    if dtype.kind == "f":
        return _flipped(orders).view(np.float64).astype(dtype)
    return orders.astype(dtype)


def _flipped(bits: Orders) -> Orders:
    """Turn floats into integers, or back: among negative floats the order of the bits is reversed."""
    return bits ^ (bits >> np.int64(63) & _REST)
