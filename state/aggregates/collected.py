"""collect and count_distinct: accumulators that keep the values themselves, as lists by slot.

collect keeps all values, in the order of event time, then of arrival. count_distinct keeps each different
value once, and finds values that it has seen in a hash table of the pairs of slot and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof
from typing import Any

import numpy as np
import pyarrow as pa

from ...errors import DataError
from ..hashing import mixed
from ..slots.arrays import SlotLists, entries_of
from ..slots.epochs import Field
from ..slots.table import SlotTable
from ..values import (
    Array,
    Index,
    OrderedValues,
    Orders,
    Values,
    is_text,
    orders_of,
    storage_dtype,
    values_in_order,
    values_of,
)
from .accumulators import Accumulator, arrow_of, list_array, list_column


def is_internable(type_: pa.DataType) -> bool:
    """Return True for types whose values can be compared for equality: numbers, times, decimals, strings,
    bytes.
    """
    fixed = pa.types.is_fixed_size_binary(type_)
    return storage_dtype(type_) is not None or is_text(type_) or pa.types.is_decimal(type_) or fixed


class Interned:
    """Numbers for values, the same for equal values. All NaN are equal, as are 0 and -0.

    Attributes:
        nbytes: the memory of strings, bytes and decimals, each of which is kept once.
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
        """Return the numbers of values from `values_of` that are not null."""
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
        """Return the values with these numbers. Runs in any thread."""
        if self._is_number:
            return arrow_of(values_in_order(numbers, self._type), self._type, None)
        objects = self._objects
        return pa.array([objects[number] for number in numbers.tolist()], self._type)


class CollectAccumulator(Accumulator):
    """Lists of values, without nulls. A list of more than `limit` values fails the job."""

    def __init__(self, name: str, type_: pa.DataType, limit: int) -> None:
        self.name, self.type, self._limit = name, pa.large_list(type_), limit
        self._item_type = type_
        self._times_type = pa.large_list(pa.int64())
        dtype = storage_dtype(type_)
        self._interned = Interned(type_) if dtype is None else None
        self._item = np.dtype([("time", np.int64), ("value", np.int64 if dtype is None else dtype)])
        self._lists = SlotLists(self._item)

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert isinstance(values, OrderedValues)
        self._lists.reserve(size)
        data, valid = values.data, values.valid
        times = np.zeros(len(slots), np.int64) if values.times is None else values.times.data
        if valid is not None:
            slots, data, times = slots[valid], data[valid], times[valid]
        self._add(slots, data, times)

    def _add(self, slots: Index, data: Array, times: Array) -> None:
        items = np.empty(len(slots), self._item)
        items["time"] = times
        items["value"] = data if self._interned is None else self._interned.numbers_of(data)
        self._append(slots, items)

    def _append(self, slots: Index, items: Array) -> None:
        self._lists.append(slots, items)
        if len(slots) and int(self._lists.lengths.data.take(slots).max()) > self._limit:
            raise DataError(
                f"a list has more values than it may column=`{self.name}` limit=`{self._limit}`",
                fix="raise the limit of hg.collect, or collect in smaller windows",
            )

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        lengths, items = self._lists.of(from_slots)
        self._append(np.repeat(into_slots, lengths), items)

    def _sorted(self, starts: Array, lengths: Array) -> tuple[pa.Array, Array]:
        """Return the values and times of lists, one list after the other."""
        items = self._lists.items(starts, lengths)
        times = items["time"].copy()
        order = np.lexsort((times, np.repeat(np.arange(len(lengths)), lengths)))
        values = items["value"][order]
        if self._interned is None:
            return arrow_of(values, self._item_type, None), times[order]
        return self._interned.values_in(values), times[order]

    def result(self, which: Index | slice) -> pa.Array:
        lists = self._lists
        starts, lengths = (entries_of(f.data, which) for f in (lists.starts, lists.lengths))
        return list_array(lengths, self._sorted(starts, lengths)[0])

    def reset(self, size: int) -> None:
        self._lists.reset(size)
        if self._interned is not None:
            self._interned.clear()

    def noted(self) -> Any:
        return self._lists.used

    def go_back(self, noted: Any) -> None:
        self._lists.go_back(noted)

    @property
    def object_bytes(self) -> int:
        return self._lists.nbytes + (0 if self._interned is None else self._interned.nbytes)

    def fields(self) -> list[Field]:
        return list(self._lists.fields())

    def state_fields(self) -> list[pa.Field]:
        times = pa.field(f"{self.name}__time", self._times_type)
        return [pa.field(self.name, self.type), times]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        starts, lengths, _ = values
        items, times = self._sorted(starts, lengths)
        return [list_array(lengths, items), list_array(lengths, pa.array(times))]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._lists.reserve(size)
        items = list_column(table, self.name, self.type)
        times = list_column(table, f"{self.name}__time", self._times_type)
        if items is not None and times is not None and len(items[1]):
            self._add(np.repeat(slots, items[0]), values_of(items[1]).data, times[1].to_numpy())


class DistinctAccumulator(Accumulator):
    """Counts distinct values exactly. NaN is one value. Memory grows with the values."""

    def __init__(self, name: str, type_: pa.DataType) -> None:
        self.name, self.type = name, pa.int64()
        self._state_type = pa.large_list(type_)
        self._lists = SlotLists()
        self._interned = Interned(type_)
        self._pairs = SlotTable()

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert values is not None
        self._lists.reserve(size)
        data, valid = values.data, values.valid
        if valid is not None:
            slots, data = slots[valid], data[valid]
        if slots.size:
            self._add(slots, self._interned.numbers_of(data))

    def _add(self, slots: Index, numbers: Orders) -> None:
        # Both lanes together stand for the pair itself: for a given number the first lane is a bijection
        # of the slots.
        checks = numbers.view(np.uint64)
        hashes = mixed(checks ^ mixed(slots.astype(np.uint64)))
        new = np.sort(self._pairs.lookup(hashes, checks)[1])
        self._lists.append(slots[new], numbers[new])

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        lengths, numbers = self._lists.of(from_slots)
        if numbers.size:
            self._add(np.repeat(into_slots, lengths), numbers)

    def result(self, which: Index | slice) -> pa.Array:
        return pa.array(entries_of(self._lists.lengths.data, which))

    def reset(self, size: int) -> None:
        self._lists.reset(size)
        self._interned.clear()
        self._pairs = SlotTable()

    def noted(self) -> Any:
        return self._lists.used, self._pairs.size

    def go_back(self, noted: Any) -> None:
        used, pairs = noted
        self._lists.go_back(used)
        self._pairs.forget(pairs)

    @property
    def object_bytes(self) -> int:
        return self._lists.nbytes + self._interned.nbytes + self._pairs.nbytes

    def fields(self) -> list[Field]:
        return list(self._lists.fields())

    def state_fields(self) -> list[pa.Field]:
        return [pa.field(self.name, self._state_type)]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        starts, lengths, _ = values
        items = self._interned.values_in(self._lists.items(starts, lengths))
        return [list_array(lengths, items)]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._lists.reserve(size)
        column = list_column(table, self.name, self._state_type)
        if column is not None and len(column[1]):
            lengths, items = column
            self._add(np.repeat(slots, lengths), self._interned.numbers_of(values_of(items).data))
