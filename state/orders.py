"""Values that have an order as int64 that has the same one, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .values import Array, storage_dtype

Orders = npt.NDArray[np.int64]

_SIGN = np.uint64(1 << 63)
_REST = np.int64(2**63 - 1)


def has_order(type_: pa.DataType) -> bool:
    """True for types that `orders_of` takes: what lies in memory as numbers."""
    return storage_dtype(type_) is not None


def orders_of(data: Array) -> Orders:
    """Of numbers as `values_of` gives them. NaN is greater than any number; 0 and -0 are equal."""
    if data.dtype == np.uint64:
        return (data ^ _SIGN).view(np.int64)
    if data.dtype.kind != "f":
        return data.astype(np.int64)
    wide = data.astype(np.float64) + 0.0
    wide[np.isnan(wide)] = np.nan
    return _flipped(wide.view(np.int64))


def values_in_order(orders: Orders, type_: pa.DataType) -> Array:
    """The opposite of `orders_of`, for values of a type."""
    dtype: np.dtype[Any] | None = storage_dtype(type_)
    assert dtype is not None
    if dtype == np.uint64:
        return orders.view(np.uint64) ^ _SIGN
    if dtype.kind == "f":
        return _flipped(orders).view(np.float64).astype(dtype)
    return orders.astype(dtype)


def _flipped(bits: Orders) -> Orders:
    """Floats as integers, or back: among negative ones the order of the bits is the wrong way round."""
    return bits ^ (bits >> np.int64(63) & _REST)
