"""Values of a column as int64, and back: so that whatever keeps numbers can keep them."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

import numpy as np
import pyarrow as pa

from .accumulators import arrow_of
from .orders import Orders, orders_of, values_in_order
from .values import Array, is_text, storage_dtype


def is_internable(type_: pa.DataType) -> bool:
    """True for what can be told apart: numbers, times, decimals, strings and bytes."""
    fixed = pa.types.is_fixed_size_binary(type_)
    return storage_dtype(type_) is not None or is_text(type_) or pa.types.is_decimal(type_) or fixed


class Interned:
    """Equal values have the same number. All NaN are equal, as are 0 and -0.

    Attributes:
        nbytes: memory of strings, bytes and decimals, which are kept once.
    """

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._is_number = storage_dtype(type_) is not None
        self.clear()

    def clear(self) -> None:
        """Forget all values; their numbers mean nothing any more."""
        self._numbers: dict[Any, int] = {}
        self._objects: list[Any] = []
        self.nbytes = 0

    def numbers_of(self, data: Array) -> Orders:
        """The numbers of values that are not null, as `values_of` gives them."""
        if self._is_number:
            return orders_of(data)
        numbers, objects, found = self._numbers, self._objects, []
        for value in data.tolist():
            number = numbers.get(value)
            if number is None:
                number = numbers[value] = len(objects)
                objects.append(value)
                self.nbytes += getsizeof(value)
            found.append(number)
        return np.array(found, np.int64)

    def values_in(self, numbers: Orders) -> pa.Array:
        """The opposite. Runs in any thread."""
        if self._is_number:
            return arrow_of(values_in_order(numbers, self._type), self._type, None)
        objects = self._objects
        return pa.array([objects[number] for number in numbers.tolist()], self._type)
