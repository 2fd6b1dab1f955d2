"""collect: all values of each slot, in the order of event time, then of arrival."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ..errors import DataError
from .accumulators import Accumulator, arrow_of
from .epochs import Field
from .interned import Interned
from .reserved import entries_of
from .slot_lists import SlotLists, list_array, list_column
from .values import Array, Index, OrderedValues, Values, storage_dtype, values_of


class CollectAccumulator(Accumulator):
    """Lists of values, without nulls; a list with more than `limit` fails the job."""

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
        """Values and times of lists, one after the other."""
        items = self._lists.items(starts, lengths)
        times = items["time"].copy()
        order = np.lexsort((times, np.repeat(np.arange(len(lengths)), lengths)))
        values = items["value"][order]
        if self._interned is None:
            return arrow_of(values, self._item_type, None), times[order]
        return self._interned.values_in(values), times[order]

    def result(self, which: Index | slice) -> pa.Array:
        starts, lengths = (entries_of(field.data, which) for field in self.fields())
        return list_array(lengths, self._sorted(starts, lengths)[0])

    def reset(self, size: int) -> None:
        self._lists.reset(size)
        if self._interned is not None:
            self._interned.clear()

    @property
    def object_bytes(self) -> int:
        return self._lists.nbytes + (0 if self._interned is None else self._interned.nbytes)

    def fields(self) -> list[Field]:
        return [self._lists.starts, self._lists.lengths]

    def state_fields(self) -> list[pa.Field]:
        times = pa.field(f"{self.name}__time", self._times_type)
        return [pa.field(self.name, self.type), times]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        starts, lengths = values
        items, times = self._sorted(starts, lengths)
        return [list_array(lengths, items), list_array(lengths, pa.array(times))]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._lists.reserve(size)
        items = list_column(table, self.name, self.type)
        times = list_column(table, f"{self.name}__time", self._times_type)
        if items is not None and times is not None and len(items[1]):
            self._add(np.repeat(slots, items[0]), values_of(items[1]).data, times[1].to_numpy())
