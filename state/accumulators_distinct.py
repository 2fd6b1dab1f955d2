"""count_distinct: the values of each slot, each once, and a table of the pairs of slot and value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from .accumulators import Accumulator
from .epochs import Field
from .interned import Interned
from .mixing import mixed
from .orders import Orders
from .reserved import entries_of
from .slot_lists import SlotLists, list_array, list_column
from .slots import SlotTable
from .values import Array, Index, Values, values_of


class DistinctAccumulator(Accumulator):
    """Counts different values, exactly. NaN is one value. Memory grows with the values."""

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
        # Both lanes together are the pair itself: of one number the first is a bijection of slots.
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

    @property
    def object_bytes(self) -> int:
        return self._lists.nbytes + self._interned.nbytes + self._pairs.nbytes

    def fields(self) -> list[Field]:
        return [self._lists.starts, self._lists.lengths]

    def state_fields(self) -> list[pa.Field]:
        return [pa.field(self.name, self._state_type)]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        starts, lengths = values
        items = self._interned.values_in(self._lists.items(starts, lengths))
        return [list_array(lengths, items)]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._lists.reserve(size)
        column = list_column(table, self.name, self._state_type)
        if column is not None and len(column[1]):
            lengths, items = column
            self._add(np.repeat(slots, lengths), self._interned.numbers_of(values_of(items).data))
