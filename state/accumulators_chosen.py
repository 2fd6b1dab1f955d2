"""first, last, min_by and max_by: the value of one record per slot, that with the least or greatest order.

The order is that of another column (min_by, max_by), then of event time, then of arrival: of records that
are equal min_by and first take the first, max_by and last the last one. Records are skipped where the
value, or the other column, is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof

import numpy as np
import pyarrow as pa

from .accumulators import Accumulator, Mask, arrow_of, state_column
from .epochs import Field
from .orders import Orders, orders_of, values_in_order
from .reserved import ObjectArray, SlotArray, entries_of
from .slot_ranks import SlotRanks
from .values import Array, Index, OrderedValues, Values, storage_dtype


class ChosenAccumulator(Accumulator):
    """A value and its order per slot.

    Args:
        by_type: of the other column, one that `has_order`; None if there is none.
        largest: take the greatest order.
    """

    def __init__(
        self, name: str, type_: pa.DataType, by_type: pa.DataType | None, *, largest: bool
    ) -> None:
        self.name, self.type, self._largest = name, type_, largest
        self._by = [pa.field(f"{name}__time", pa.int64())]
        if by_type is not None:
            self._by.insert(0, pa.field(f"{name}__by", by_type))
        dtype = storage_dtype(type_)
        self._values: Field = ObjectArray() if dtype is None else SlotArray(dtype)
        self._orders = [SlotArray(np.int64) for _ in self._by]
        self._seen = SlotArray(np.bool_, False)
        self._ranks = SlotRanks()
        self._object_bytes = 0

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert isinstance(values, OrderedValues)
        self._reserve(size)
        data, valid, by, times = values.data, values.valid, values.by, values.times
        orders = [np.zeros(len(slots), np.int64) if times is None else times.data]
        if by is not None:
            orders.insert(0, orders_of(by.data))
            if by.valid is not None:
                valid = by.valid if valid is None else valid & by.valid
        if valid is not None:
            slots, data, orders = slots[valid], data[valid], [each[valid] for each in orders]
        self._choose(slots, data, orders)

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        some = self._seen.data.take(from_slots)
        into_slots, from_slots = into_slots[some], from_slots[some]
        data = entries_of(self._values.data, from_slots)
        orders = [each.data.take(from_slots) for each in self._orders]
        self._choose(into_slots, data, orders)

    def _reserve(self, size: int) -> None:
        for field in self.fields():
            field.reserve(size)

    def _choose(self, slots: Index, data: Array, orders: list[Orders]) -> None:
        """Take over the values that go before those held; rows stand in the order of arrival."""
        if not slots.size:
            return
        unique, rank = self._ranks.of(slots, self._seen.filled)
        limits = np.iinfo(np.int64)
        rows = np.arange(len(slots))
        bests: list[Orders] = []
        for order in orders:
            best = np.full(len(unique), limits.min if self._largest else limits.max)
            extreme = np.maximum if self._largest else np.minimum
            extreme.at(best, rank[rows], order[rows])
            rows = rows[order[rows] == best[rank[rows]]]
            bests.append(best)
        chosen = np.empty(len(unique), np.intp)
        # of equal rows the one written last stays
        rows = rows if self._largest else rows[::-1]
        chosen[rank[rows]] = rows
        wins = self._wins(unique, bests)
        unique, chosen = unique[wins], chosen[wins]
        for held, order in zip(self._orders, orders, strict=True):
            held.data[unique] = order[chosen]
        self._seen.data[unique] = True
        self._set(unique, data[chosen])

    def _wins(self, slots: Index, bests: list[Orders]) -> Mask:
        """Where rows that came later, of these orders, take the place of what is held."""
        wins = np.full(len(slots), self._largest)
        for order, best in zip(reversed(self._orders), reversed(bests), strict=True):
            held = order.data.take(slots)
            wins &= best == held
            wins |= best > held if self._largest else best < held
        return wins | ~self._seen.data.take(slots)

    def _set(self, slots: Index, data: Array) -> None:
        if isinstance(self._values, SlotArray):
            self._values.data[slots] = data
            return
        held, grown = self._values.data, 0
        for slot, value in zip(slots.tolist(), data.tolist(), strict=True):
            grown += getsizeof(value) - (0 if held[slot] is None else getsizeof(held[slot]))
            held[slot] = value
        self._object_bytes += grown

    @property
    def object_bytes(self) -> int:
        return self._object_bytes

    def result(self, which: Index | slice) -> pa.Array:
        return self._to_arrow(
            entries_of(self._values.data, which), entries_of(self._seen.data, which)
        )

    def _to_arrow(self, data: Array, seen: Array) -> pa.Array:
        if isinstance(self._values, ObjectArray):
            return pa.array(data.tolist(), self.type)
        return arrow_of(data, self.type, None if seen.all() else ~seen)

    def reset(self, size: int) -> None:
        for field in self.fields():
            field.reset(size)
        self._object_bytes = 0

    def fields(self) -> list[Field]:
        return [self._values, self._seen, *self._orders]

    def state_fields(self) -> list[pa.Field]:
        return [pa.field(self.name, self.type), *self._by]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        data, seen, *orders = values
        nothing = None if seen.all() else ~seen
        by = [
            arrow_of(values_in_order(order, field.type), field.type, nothing)
            for order, field in zip(orders, self._by, strict=True)
        ]
        return [self._to_arrow(data, seen), *by]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._reserve(size)
        values = state_column(table, self.name, self.type)
        by = [state_column(table, field.name, field.type) for field in self._by]
        if values is None:
            return
        data, seen = values.data, None
        for order, column in zip(self._orders, by, strict=True):
            if column is None:
                return
            seen = column.valid
            order.data[slots] = orders_of(column.data)
        if seen is not None:
            slots, data = slots[seen], data[seen]
        self._seen.data[slots] = True
        self._set(slots, data)
