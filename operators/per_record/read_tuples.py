"""A function that only puts columns and constants into a tuple, such as `lambda bid: (bid.user, 1)`.

Many keyed streams of Python objects begin with one. It is not called, and no record is made for it: its
results are made of the columns. Where these are numbers, the results stay arrays until they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..elements import ColumnBatch, ObjectBatch
from ..functions.bytecode import Constant, Read, direct_tuple
from ..functions.key_function import is_watched
from ..rows import column_list
from .base import UserFunction

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


@final
class ReadTuples:
    """The results of such a function."""

    def __init__(self, places: Sequence[Read | Constant]) -> None:
        """`places` are the columns and constants, in the order of the tuple."""
        self._places = places

    @classmethod
    def of(cls, user: UserFunction) -> ReadTuples | None:
        """Return the results of a function; None: it has to be called."""
        if user.into is not None or user.reader.columns is None or is_watched():
            return None
        places = direct_tuple(user.function)
        return cls(places) if places else None

    def __call__(self, batch: ColumnBatch) -> ObjectBatch:
        """Return the result for each row."""
        data, rows = batch.data, len(batch)
        if rows < ObjectBatch.NUMBERS_MIN:
            return self._objects(batch)
        numbers: list[npt.NDArray[Any]] = []
        for place in self._places:
            array = (
                _repeated(place.value, rows)
                if isinstance(place, Constant)
                else _numbers(data.column(place.name))
            )
            if array is None:
                return self._objects(batch)
            numbers.append(array)
        return ObjectBatch.of_numbers(tuple(numbers), batch.timestamps, batch.positions)

    def _objects(self, batch: ColumnBatch) -> ObjectBatch:
        data, rows = batch.data, len(batch)
        values = [
            repeat(place.value, rows)
            if isinstance(place, Constant)
            else column_list(data.column(place.name), place.name)
            for place in self._places
        ]
        return ObjectBatch(list(zip(*values, strict=True)), batch.timestamps, batch.positions)


def _numbers(column: pa.Array) -> npt.NDArray[Any] | None:
    """Return a column as the numbers that Python has for its values; None if it has others."""
    kind = column.type
    if column.null_count:
        return None
    if pa.types.is_boolean(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return np.asarray(column.to_numpy()).astype(np.int64, copy=False)
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return np.asarray(column.to_numpy()).astype(np.float64, copy=False)
    return None


def _repeated(value: Any, rows: int) -> npt.NDArray[Any] | None:
    """Return a constant for each row; None if it is no number."""
    kind = type(value)
    is_number = kind in (float, bool) or (kind is int and _INT64_MIN <= value <= _INT64_MAX)
    return np.full(rows, value) if is_number else None
