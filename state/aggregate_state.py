"""The aggregates of one keyed state together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from .accumulator_kinds import accumulator_for
from .accumulators import Accumulator
from .epochs import RESTORED_EPOCH, ChangedSlots, Field, SlotCut, TableEpoch
from .reserved import SlotArray, entries_of
from .values import EVENT_TIME, Array, Index, OrderedValues, Values

_SLOT_0 = np.zeros(1, np.intp)


@dataclass(frozen=True, slots=True)
class AggregateSpec:
    """One aggregate: what, of which column, under which name.

    Attributes:
        type: Arrow type of `column`.
        by: the column that orders the records, if the aggregate needs one (`min_by(column, by)`);
            `EVENT_TIME`: their times do, if they have some.
        by_type: its Arrow type.
        number: the parameter, if the aggregate has one.
    """

    kind: str
    name: str
    column: str | None
    type: pa.DataType | None
    by: str | None = None
    by_type: pa.DataType | None = None
    number: float | None = None

    def new(self) -> Accumulator:
        """An empty accumulator."""
        return accumulator_for(self.kind, self.name, self.type, self.by_type, self.number)

    def values_in(self, columns: Mapping[str, Values]) -> Values | None:
        """The values of these columns for the accumulator; None if it counts rows."""
        if self.column is None:
            return None
        values = columns[self.column]
        if self.by is None:
            return values
        by = None if self.by == EVENT_TIME else columns[self.by]
        return OrderedValues.of(values, by, columns.get(EVENT_TIME))


class AggregateState:
    """All aggregates of one keyed state, by slot, with the epochs of their changes."""

    def __init__(self, specs: Sequence[AggregateSpec], table: TableEpoch | None = None) -> None:
        accumulators = [(spec.new(), spec) for spec in specs]
        self._accumulators = accumulators
        # Not a method: in a circle of references, the arrays would wait for the garbage collector.
        self._fields = partial(_fields_of, accumulators)
        self._changed = ChangedSlots(table or TableEpoch(), self._fields)
        self._readers: list[None] = []
        self.size = 0

    def add(self, slots: Index, columns: Mapping[str, Values], size: int) -> None:
        """Add a batch: row i belongs to `slots[i]`; there are `size` slots now."""
        self._changed.touch(slots, size)
        for accumulator, spec in self._accumulators:
            accumulator.add(slots, spec.values_in(columns), self.size, size)
        self.size = size

    def add_all(self, columns: Mapping[str, Values], rows: int) -> None:
        """Add a batch that belongs to slot 0 as a whole."""
        self._changed.touch(_SLOT_0, 1)
        for accumulator, spec in self._accumulators:
            accumulator.add_all(spec.values_in(columns), rows, self.size)
        self.size = 1

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        """Add what `from_slots[i]` has seen to `into_slots[i]`; see `Accumulator.merge`."""
        self._changed.touch(into_slots, self.size)
        for accumulator, _ in self._accumulators:
            accumulator.merge(into_slots, from_slots)

    def results(self, which: Index | slice) -> list[pa.Array]:
        """One column per aggregate, for these slots."""
        return [accumulator.result(which) for accumulator, _ in self._accumulators]

    def reset(self) -> None:
        """Forget everything; keeps the memory. Not while a cut is open."""
        assert not self.busy
        for accumulator, _ in self._accumulators:
            accumulator.reset(self.size)
        self.size = 0

    def load(self, slots: Index, table: pa.Table, size: int, epochs: Any = RESTORED_EPOCH) -> None:
        """Take over the state columns of a snapshot, row i into `slots[i]`, which are new.

        There are `size` slots now. New slots that get no row are those of keys without a record. Columns
        the table does not have are those of new aggregates.
        """
        self._changed.mark(slots, size, epochs)
        for accumulator, _ in self._accumulators:
            accumulator.load(slots, table, self.size, size)
        self.size = size

    # --- cuts ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True until a cut has been read: until then memory must not be used for other keys.

        What lists and texts consist of is read behind the values of the slots, when the cut itself is
        closed already. In this order: a cut is among the readers before it is closed.
        """
        return bool(self._changed.cuts) or bool(self._readers)

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        arrays = sum(field.nbytes for field in self._fields())
        return self._changed.nbytes + arrays + self.object_bytes

    def memory(self) -> list[Array]:
        """The arrays this consists of; those of Python objects are left out."""
        arrays = [field.data for field in self._fields() if isinstance(field, SlotArray)]
        return [self._changed.memory, *arrays]

    @property
    def used_bytes(self) -> int:
        """The same without room to grow."""
        fields = self._fields()
        entry = sum(f.data.itemsize if isinstance(f, SlotArray) else 8 for f in fields)
        return self.size * (entry + self._changed.entry_bytes) + self.object_bytes

    @property
    def object_bytes(self) -> int:
        """The part of it that is Python objects: text and decimals."""
        return sum(accumulator.object_bytes for accumulator, _ in self._accumulators)

    def cut(self, epoch: int) -> StateCut:
        """Open cut number `epoch`, which the table has just counted."""
        counts = [len(accumulator.fields()) for accumulator, _ in self._accumulators]
        accumulators = [accumulator for accumulator, _ in self._accumulators]
        return StateCut(self._changed.cut(epoch, self.size), accumulators, counts, self._readers)

    def columns(self, slots: Index) -> list[pa.Array]:
        """The state columns of these slots as they are now."""
        columns: list[pa.Array] = []
        for accumulator, _ in self._accumulators:
            values = [entries_of(field.data, slots) for field in accumulator.fields()]
            columns += accumulator.columns(values)
        return columns

    def epochs_of(self, slots: Index) -> Array:
        """The epochs of the last changes of these slots."""
        return self._changed.epochs_of(slots)


def _fields_of(accumulators: Sequence[tuple[Accumulator, AggregateSpec]]) -> list[Field]:
    return [field for accumulator, _ in accumulators for field in accumulator.fields()]


@dataclass(frozen=True, slots=True)
class StateCut:
    """The state columns at a cut. Its methods run in any one thread; `close` is called at last."""

    _cut: SlotCut
    _accumulators: list[Accumulator]
    _counts: list[int]
    _readers: list[None]
    """An entry for each thread that makes columns."""

    @property
    def size(self) -> int:
        """The number of slots that there were."""
        return self._cut.size

    def slots(self, since: int | None) -> Index | slice:
        """The slots that had changed after cut number `since`, ascending; None: all."""
        return self._cut.slots(since)

    def columns(self, which: Index | slice) -> list[pa.Array]:
        """The state columns of these slots. Closes the cut, so call it once."""
        self._readers.append(None)
        try:
            values = self._cut.values(which)
            columns: list[pa.Array] = []
            for accumulator, count in zip(self._accumulators, self._counts, strict=True):
                columns += accumulator.columns(values[:count])
                values = values[count:]
            return columns
        finally:
            self._readers.pop()

    def close(self) -> None:
        """Nothing will be read any more."""
        self._cut.close()
