"""approx_count_distinct: a HyperLogLog sketch per slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ..errors import StateError
from .accumulators import Accumulator
from .epochs import Field
from .hashing import Hashes, hash_columns
from .hyperloglog import REGISTERS, estimates, places_of
from .mixing import mixed
from .orders import orders_of
from .reserved import SlotArray, entries_of
from .values import Array, Index, Values

_SKETCH = np.dtype(f"V{REGISTERS}")
_STATE_TYPE = pa.binary(REGISTERS)


class ApproxDistinctAccumulator(Accumulator):
    """About how many different values; see `hyperloglog` for the error. Takes 2 KiB per slot."""

    def __init__(self, name: str, type_: pa.DataType) -> None:
        self.name, self.type = name, pa.int64()
        self._value_type = type_
        self._sketches = SlotArray(_SKETCH, np.void(bytes(REGISTERS)))

    def _registers(self) -> Array:
        return _as_registers(self._sketches.data)

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert values is not None
        self._sketches.reserve(size)
        data, valid = values.data, values.valid
        if valid is not None:
            slots, data = slots[valid], data[valid]
        if slots.size:
            registers, ranks = places_of(self._hashes(data))
            np.maximum.at(self._registers().reshape(-1), slots * REGISTERS + registers, ranks)

    def _hashes(self, data: Array) -> Hashes:
        if data.dtype == object:
            return mixed(hash_columns([pa.array(data.tolist(), self._value_type)]))
        return mixed(orders_of(data).view(np.uint64))

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        registers = self._registers()
        np.maximum.at(registers, into_slots, registers[from_slots])

    def result(self, which: Index | slice) -> pa.Array:
        return pa.array(estimates(_as_registers(entries_of(self._sketches.data, which))))

    def reset(self, size: int) -> None:
        self._sketches.reset(size)

    def fields(self) -> list[Field]:
        return [self._sketches]

    def state_fields(self) -> list[pa.Field]:
        return [pa.field(self.name, _STATE_TYPE)]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        data = pa.py_buffer(np.ascontiguousarray(values[0]).view(np.uint8))
        return [pa.Array.from_buffers(_STATE_TYPE, len(values[0]), [None, data])]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._sketches.reserve(size)
        if self.name not in table.column_names:
            return
        column = table.column(self.name)
        if column.type != _STATE_TYPE:
            raise StateError(
                f"the snapshot does not fit this aggregate column=`{self.name}` "
                f"expected=`{_STATE_TYPE}` found=`{column.type}`",
                fix="keep aggregates as they were, or give the changed ones a new name",
            )
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if len(array):
            sketches = np.frombuffer(array.buffers()[1], _SKETCH)
            self._sketches.data[slots] = sketches[array.offset : array.offset + len(array)]


def _as_registers(sketches: Array) -> Array:
    """One row of registers per sketch; of the same memory."""
    return sketches.view(np.uint8).reshape(-1, REGISTERS)
