"""first, last, min_by, max_by, top_n and bottom_n: the values of the records that come first or last in
an order.

The order is that of another column (min_by, max_by, top_n, bottom_n), then of event time, then of
arrival. Of records that are equal, min_by and first take the first, max_by and last the last one; top_n
keeps the last n records and bottom_n the first n, so that the best one is that of max_by or min_by.
Records are skipped where the value, or the other column, is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from sys import getsizeof
from typing import Any

import numpy as np
import pyarrow as pa

from ..slots.arrays import ObjectArray, SlotArray, SlotRanks, entries_of, ranges
from ..slots.epochs import Field
from ..values import (
    Array,
    Index,
    OrderedValues,
    Orders,
    Values,
    orders_of,
    storage_dtype,
    values_in_order,
    values_of,
)
from .accumulators import Accumulator, Mask, arrow_of, list_array, list_column, state_column


class ChosenAccumulator(Accumulator):
    """A value and its order per slot.

    Args:
        by_type: the type of the other column, which must have an order (`has_order`); None without such a
            column.
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
        """Keep those values that go before the held ones; the rows stand in the order of arrival."""
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
        # among equal rows the one that is written last stays
        rows = rows if self._largest else rows[::-1]
        chosen[rank[rows]] = rows
        wins = self._wins(unique, bests)
        unique, chosen = unique[wins], chosen[wins]
        for held, order in zip(self._orders, orders, strict=True):
            held.data[unique] = order[chosen]
        self._seen.data[unique] = True
        self._set(unique, data[chosen])

    def _wins(self, slots: Index, bests: list[Orders]) -> Mask:
        """Return True where later rows with these orders take the place of the held ones."""
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

    def noted(self) -> Any:
        return self._object_bytes

    def go_back(self, noted: Any) -> None:
        self._object_bytes = noted

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


class TopAccumulator(Accumulator):
    """Up to `n` records per slot, in ascending order: their orders, and their values.

    Values that are not numbers are kept as one tuple per slot. All room of a slot is taken at once.

    Args:
        by_type: the type of the other column, which must have an order (`has_order`).
        largest: hold the last `n` records instead of the first.
    """

    def __init__(
        self, name: str, type_: pa.DataType, by_type: pa.DataType, n: int, *, largest: bool
    ) -> None:
        self.name, self.type = name, pa.large_list(type_)
        self._item_type, self._by_type = type_, by_type
        self._n, self._largest = n, largest
        dtype = storage_dtype(type_)
        value = [] if dtype is None else [("value", dtype)]
        self._item = np.dtype([("by", np.int64), ("time", np.int64), *value])
        size = n * self._item.itemsize
        self._items = SlotArray(np.dtype(f"V{size}"), np.void(bytes(size)))
        self._counts = SlotArray(np.int32)
        self._objects = ObjectArray() if dtype is None else None
        self._object_bytes = 0
        self._ranks = SlotRanks()

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert isinstance(values, OrderedValues)
        assert values.by is not None
        self._reserve(size)
        items = np.zeros(len(slots), self._item)
        items["by"] = orders_of(values.by.data)
        if values.times is not None:
            items["time"] = values.times.data
        data, valid, ranked = values.data, values.valid, values.by.valid
        if ranked is not None:
            valid = ranked if valid is None else valid & ranked
        if valid is not None:
            slots, items, data = slots[valid], items[valid], data[valid]
        self._hold(slots, items, data)

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        counts = self._counts.data.take(from_slots)
        items = self._held()[self._places(from_slots, counts)]
        self._hold(np.repeat(into_slots, counts), items, self._values_of(from_slots, items))

    def _reserve(self, size: int) -> None:
        for field in self.fields():
            field.reserve(size)

    def _held(self) -> Array:
        """Return a view with `n` items per slot, of which the first are in use, as many as its count."""
        return self._items.data.view(self._item)

    def _places(self, slots: Index, counts: Array) -> Index:
        """Return the positions of the items of these slots in `_held`."""
        return ranges(slots * self._n, counts)

    def _values_of(self, slots: Index, items: Array) -> Array:
        """Return the values that belong to `items`, which must be all the items of these slots."""
        if self._objects is None:
            return items["value"]
        return _chained(entries_of(self._objects.data, slots))

    def _hold(self, slots: Index, items: Array, values: Array) -> None:
        """Keep those records that are among the best; the records stand in the order of arrival."""
        better = self._is_better(slots, items)
        if not better.any():
            return
        slots, items, values = slots[better], items[better], values[better]
        unique, rank = self._ranks.of(slots, self._counts.filled)
        counts = self._counts.data.take(unique)
        held = self._held()[self._places(unique, counts)]
        values = np.concatenate([self._values_of(unique, held), values])
        items = np.concatenate([held, items])
        rank = np.concatenate([np.repeat(np.arange(len(unique)), counts), rank])
        order = np.lexsort((items["time"], items["by"], rank))
        candidates = np.bincount(rank, minlength=len(unique))
        counts = np.minimum(candidates, self._n)
        ends = np.cumsum(candidates)
        chosen = order[ranges(ends - (counts if self._largest else candidates), counts)]
        self._set(unique, counts, items[chosen], values[chosen])

    def _is_better(self, slots: Index, items: Array) -> Mask:
        """Return True where a record goes before the worst held one, or there is room for it."""
        counts = self._counts.data.take(slots)
        worst = self._held()[slots * self._n + (0 if self._largest else counts - 1)]
        by, time = items["by"], items["time"]
        if self._largest:
            beyond, later = by > worst["by"], time >= worst["time"]
        else:
            beyond, later = by < worst["by"], time < worst["time"]
        better: Mask = beyond | (by == worst["by"]) & later | (counts < self._n)
        return better

    def _set(self, slots: Index, counts: Array, items: Array, values: Array) -> None:
        if self._objects is None:
            items["value"] = values
        else:
            self._set_objects(self._objects.data, slots, counts, values)
        self._held()[self._places(slots, counts)] = items
        self._counts.data[slots] = counts

    def _set_objects(self, held: list[Any], slots: Index, counts: Array, values: Array) -> None:
        ends, grown = np.cumsum(counts), 0
        for slot, low, high in zip(slots.tolist(), ends - counts, ends, strict=True):
            grown -= _bytes_of(held[slot])
            held[slot] = tuple(values[low:high].tolist())
            grown += _bytes_of(held[slot])
        self._object_bytes += grown

    @property
    def object_bytes(self) -> int:
        return self._object_bytes

    def result(self, which: Index | slice) -> pa.Array:
        entries = [entries_of(field.data, which) for field in self.fields()]
        counts, _, values = self._parts(entries)
        if self._largest:
            ends = np.cumsum(counts)
            values = values[np.repeat(2 * ends - counts, counts) - np.arange(len(values)) - 1]
        return list_array(counts, self._to_arrow(values))

    def _parts(self, entries: Sequence[Array]) -> tuple[Array, Array, Array]:
        """Return, for some entries of `fields`, the count of each, then all items and all values."""
        counts = entries[1].astype(np.int64)
        items = entries[0].view(self._item)[self._places(np.arange(len(counts)), counts)]
        return counts, items, items["value"] if self._objects is None else _chained(entries[2])

    def _to_arrow(self, values: Array) -> pa.Array:
        if self._objects is None:
            return arrow_of(np.ascontiguousarray(values), self._item_type, None)
        return pa.array(values.tolist(), self._item_type)

    def reset(self, size: int) -> None:
        for field in self.fields():
            field.reset(size)
        self._object_bytes = 0

    def noted(self) -> Any:
        return self._object_bytes

    def go_back(self, noted: Any) -> None:
        self._object_bytes = noted

    def fields(self) -> list[Field]:
        fields: list[Field] = [self._items, self._counts]
        return fields if self._objects is None else [*fields, self._objects]

    def state_fields(self) -> list[pa.Field]:
        return [
            pa.field(self.name, self.type),
            pa.field(f"{self.name}__by", pa.large_list(self._by_type)),
            pa.field(f"{self.name}__time", pa.large_list(pa.int64())),
        ]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        counts, items, held = self._parts(values)
        by = values_in_order(np.ascontiguousarray(items["by"]), self._by_type)
        times = pa.array(np.ascontiguousarray(items["time"]))
        of_items = [self._to_arrow(held), arrow_of(by, self._by_type, None), times]
        return [list_array(counts, each) for each in of_items]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._reserve(size)
        found = [list_column(table, field.name, field.type) for field in self.state_fields()]
        columns = [column for column in found if column is not None]
        if len(columns) < len(found):
            return
        counts, values = columns[0]
        items = np.zeros(len(values), self._item)
        items["by"] = orders_of(values_of(columns[1][1]).data)
        items["time"] = columns[2][1].to_numpy()
        self._hold(np.repeat(slots, counts), items, values_of(values).data)


def _chained(tuples: Array) -> Array:
    """Return the values of tuples as one array of objects; None stands for an empty tuple."""
    values = list(chain.from_iterable(each or () for each in tuples.tolist()))
    found: Array = np.empty(len(values), object)
    found[:] = values
    return found


def _bytes_of(values: tuple[Any, ...] | None) -> int:
    return 0 if values is None else getsizeof(values) + sum(map(getsizeof, values))
