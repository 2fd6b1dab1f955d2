"""The aggregates of one keyed state together, and the accumulator that serves each kind of aggregate and
type.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import PlanError
from ..slots.arrays import SlotArray, entries_of
from ..slots.epochs import (
    RESTORED_EPOCH,
    ChangedSlots,
    Field,
    KeptSlots,
    SlotCut,
    TableEpoch,
)
from ..values import (
    EVENT_TIME,
    PARTIAL_ROWS,
    Array,
    Index,
    OrderedValues,
    PartialAverages,
    PartialCounts,
    Values,
    has_order,
    is_text,
    storage_dtype,
)
from .accumulators import (
    Accumulator,
    AvgAccumulator,
    CountAccumulator,
    Extreme,
    FloatSum,
    IntSum,
    MomentsAccumulator,
    ObjectAccumulator,
)
from .collected import CollectAccumulator, DistinctAccumulator, is_internable
from .ordered import ChosenAccumulator, TopAccumulator
from .sketches import ApproxDistinctAccumulator, QuantileAccumulator

_DECIMAL_CONTEXT = decimal.Context(prec=100)
"""Wide enough to add any two decimals exactly."""
MOMENTS: Final = {
    "variance": (True, False),
    "stddev": (True, True),
    "variance_pop": (False, False),
    "stddev_pop": (False, True),
}
"""For each kind: whether it is that of a sample, and whether it is the root."""
COUNTS: Final = frozenset({"count", "count_distinct", "approx_count_distinct"})
"""Kinds whose result is never null."""
BY_TIME: Final = frozenset({"first", "last", "collect"})
"""Kinds in which the times of the records decide which ones count."""
TOP: Final = frozenset({"top_n", "bottom_n"})
"""Kinds that keep several records. The column itself decides which, unless another one is named."""
BY_COLUMN: Final = frozenset({"min_by", "max_by"}) | TOP
"""Kinds in which another column decides which records count."""


class Parameter(msgspec.Struct, frozen=True):
    """The number that a kind takes as a parameter, from `low` to `high`. Without a default it must be
    given.
    """

    name: str
    type: Callable[[Any], float]
    low: float
    high: float
    default: float | None
    fix: str


PARAMETERS: Final = {
    "quantile": Parameter("q", float, 0, 1, None, "write quantile(x, 0.99): a number from 0 to 1"),
    "collect": Parameter(
        "limit", int, 1, 2**31, 10_000, "write collect(x, 100): how many values a list may have"
    ),
    **{
        kind: Parameter("n", int, 1, 1_000, None, f"write {kind}(x, 3): up to 1,000 values")
        for kind in sorted(TOP)
    },
}
"""The parameters by kind."""


def accumulator_for(
    kind: str,
    name: str,
    type_: pa.DataType | None,
    by_type: pa.DataType | None = None,
    number: float | None = None,
) -> Accumulator:
    """Return an accumulator for `kind` of a column of this type (None: of whole rows, for count).

    `by_type` is the type of the column that decides, and `number` the parameter, for kinds that have them.

    Raises:
        PlanError: there is no such aggregate of this type.
    """
    if kind == "count":
        return CountAccumulator(name)
    assert type_ is not None
    if kind in ("min", "max"):
        return _extreme(kind, name, type_)
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if kind in MOMENTS:
        _check_number(kind, name, type_)
        sample, root = MOMENTS[kind]
        return MomentsAccumulator(name, sample=sample, root=root)
    if kind == "quantile":
        assert number is not None
        _check_number(kind, name, type_)
        return QuantileAccumulator(name, number)
    if kind == "collect":
        assert number is not None
        _check_equality(kind, name, type_)
        return CollectAccumulator(name, type_, int(number))
    if kind in BY_TIME:
        return ChosenAccumulator(name, type_, None, largest=kind == "last")
    if kind in BY_COLUMN:
        assert by_type is not None
        by_type = _checked_order(kind, name, by_type)
        if kind in TOP:
            assert number is not None
            return TopAccumulator(name, type_, by_type, int(number), largest=kind == "top_n")
        return ChosenAccumulator(name, type_, by_type, largest=kind == "max_by")
    if kind in COUNTS:
        _check_equality(kind, name, type_)
        distinct = DistinctAccumulator if kind == "count_distinct" else ApproxDistinctAccumulator
        return distinct(name, type_)
    return _total(kind, name, type_)


def _check_equality(kind: str, name: str, type_: pa.DataType) -> None:
    if not is_internable(type_):
        raise PlanError(
            f"cannot take the {kind} of this type column=`{name}` type=`{type_}`",
            fix="numbers, dates, timestamps, decimals, strings and bytes can be told apart",
        )


def _checked_order(kind: str, name: str, type_: pa.DataType) -> pa.DataType:
    """Return the type of a column that decides, without a dictionary."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if not has_order(type_):
        raise PlanError(
            f"the {kind} of a column cannot be by one of this type column=`{name}` type=`{type_}`",
            fix="by= takes a column of numbers, dates or timestamps",
        )
    return type_


def _total(kind: str, name: str, type_: pa.DataType) -> Accumulator:
    """Return the accumulator of sum or avg."""
    _check_number(kind, name, type_)
    held = name if kind == "sum" else f"{name}__sum"
    total: Accumulator
    if pa.types.is_integer(type_):
        total = IntSum(held)
    elif pa.types.is_floating(type_):
        total = FloatSum(held)
    else:
        wide = pa.decimal128(38, type_.scale)
        if pa.types.is_decimal256(type_):
            wide = pa.decimal256(76, type_.scale)
        total = ObjectAccumulator(held, wide, _DECIMAL_CONTEXT.add)
    return total if kind == "sum" else AvgAccumulator(name, total)


def _check_number(kind: str, name: str, type_: pa.DataType) -> None:
    floats = pa.types.is_float32(type_) or pa.types.is_float64(type_)
    if not (pa.types.is_integer(type_) or floats or pa.types.is_decimal(type_)):
        raise PlanError(
            f"cannot take the {kind} of this type column=`{name}` type=`{type_}`",
            fix="cast it to a number first",
        )


def _extreme(kind: str, name: str, type_: pa.DataType) -> Accumulator:
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    dtype = storage_dtype(type_)
    if dtype is not None:
        return Extreme(name, type_, dtype, kind == "max")
    if pa.types.is_decimal(type_) or is_text(type_):
        return ObjectAccumulator(name, type_, max if kind == "max" else min)
    raise PlanError(
        f"cannot take the {kind} of this type column=`{name}` type=`{type_}`",
        fix="numbers, dates, timestamps, decimals, strings and bytes have an order",
    )


_SLOT_0 = np.zeros(1, np.intp)


class AggregateSpec(msgspec.Struct, frozen=True):
    """One aggregate: its kind, its column and its name.

    Attributes:
        type: the Arrow type of `column`.
        by: the column that orders the records, if the aggregate needs one (`min_by(column, by)`);
            `EVENT_TIME` if their times do, where they have any.
        by_type: the Arrow type of that column.
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
        """Return an empty accumulator."""
        return accumulator_for(self.kind, self.name, self.type, self.by_type, self.number)

    def values_in(self, columns: Mapping[str, Values]) -> Values | None:
        """Return the values of these columns for the accumulator; None if it counts rows."""
        if PARTIAL_ROWS in columns:
            return self._partial_in(columns)
        if self.column is None:
            return None
        values = columns[self.column]
        if self.by is None:
            return values
        by = None if self.by == EVENT_TIME else columns[self.by]
        return OrderedValues.of(values, by, columns.get(EVENT_TIME))

    def _partial_in(self, columns: Mapping[str, Values]) -> Values:
        """Return the values of partial results, whose columns are those of `Accumulator.state_fields`."""
        if self.kind == "count":
            return PartialCounts(columns[self.name if self.column else PARTIAL_ROWS].data, None)
        if self.kind != "avg":
            return columns[self.name]
        total, counts = columns[f"{self.name}__sum"], columns[f"{self.name}__count"]
        return PartialAverages(total.data, total.valid, PartialCounts(counts.data, None))


class AggregateState:
    """All aggregates of one keyed state, by slot, with the epochs of their changes."""

    def __init__(self, specs: Sequence[AggregateSpec], table: TableEpoch | None = None) -> None:
        accumulators = [(spec.new(), spec) for spec in specs]
        self._accumulators = accumulators
        # Not a bound method: in a circle of references the arrays would wait for the garbage collector.
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
        """Add the rows of `from_slots[i]` to `into_slots[i]`; see `Accumulator.merge`."""
        self._changed.touch(into_slots, self.size)
        for accumulator, _ in self._accumulators:
            accumulator.merge(into_slots, from_slots)

    def results(self, which: Index | slice) -> list[pa.Array]:
        """Return the results for these slots, one column per aggregate."""
        return [accumulator.result(which) for accumulator, _ in self._accumulators]

    def plain_results(self, which: Index | slice) -> list[Array | pa.Array]:
        """Return `results`, with columns of int64 and float64 that have no null as numpy."""
        found: list[Array | pa.Array] = []
        for accumulator, _ in self._accumulators:
            numbers = accumulator.numbers(which)
            found.append(accumulator.result(which) if numbers is None else numbers)
        return found

    def reset(self) -> None:
        """Forget everything but keep the memory. No cut may be open."""
        assert not self.busy
        for accumulator, _ in self._accumulators:
            accumulator.reset(self.size)
        self.size = 0

    def load(self, slots: Index, table: pa.Table, size: int, epochs: Any = RESTORED_EPOCH) -> None:
        """Take over the state columns of a snapshot, row i into `slots[i]`, which are new.

        There are `size` slots now. New slots that get no row belong to keys without a record. Columns
        that the table lacks belong to new aggregates.
        """
        self._changed.mark(slots, size, epochs)
        for accumulator, _ in self._accumulators:
            accumulator.load(slots, table, self.size, size)
        self.size = size

    # --- cuts ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True until a cut has been read: until then memory must not be used for other keys.

        The content of lists and texts is read after the values of the slots, when the cut itself is
        already closed. A cut is among the readers before it is closed, so the order of the two checks
        matters.
        """
        return bool(self._changed.cuts) or bool(self._readers)

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        arrays = sum(field.nbytes for field in self._fields())
        return self._changed.nbytes + arrays + self.object_bytes

    def memory(self) -> list[Array]:
        """Return the arrays of the state, without those of Python objects."""
        arrays = [field.data for field in self._fields() if isinstance(field, SlotArray)]
        return [self._changed.memory, *arrays]

    @property
    def used_bytes(self) -> int:
        """The memory in use, without room to grow."""
        fields = self._fields()
        entry = sum(f.data.itemsize if isinstance(f, SlotArray) else 8 for f in fields)
        return self.size * (entry + self._changed.entry_bytes) + self.object_bytes

    @property
    def object_bytes(self) -> int:
        """The memory of Python objects: text and decimals."""
        return sum(accumulator.object_bytes for accumulator, _ in self._accumulators)

    def cut(self, epoch: int) -> StateCut:
        """Open cut number `epoch`, which the table has just counted."""
        counts = [len(accumulator.fields()) for accumulator, _ in self._accumulators]
        accumulators = [accumulator for accumulator, _ in self._accumulators]
        return StateCut(self._changed.cut(epoch, self.size), accumulators, counts, self._readers)

    def keep(self, grew: Callable[[], None]) -> KeptAggregates:
        """Open a cut to which they can go back: that which the table has just counted.

        `grew` is called now and then while old values come.
        """
        slots = self._changed.keep(self.size, grew)
        return KeptAggregates(slots, [accumulator.noted() for accumulator, _ in self._accumulators])

    def go_back(self, kept: KeptAggregates, table: TableEpoch) -> None:
        """Be as at a cut. They belong to another table from now on, whose restored state they are."""
        kept.slots.go_back()
        self.size = kept.slots.size
        for (accumulator, _), noted in zip(self._accumulators, kept.noted, strict=True):
            accumulator.go_back(noted)
        self._changed, self._readers = ChangedSlots(table, self._fields), []
        self._changed.mark(slice(0, self.size), self.size, RESTORED_EPOCH)

    def last_numbers(self) -> Array:
        """Return the values of the last aggregate by slot (a view), which is one number of each key."""
        numbers = self._accumulators[-1][0].fields()[0]
        assert isinstance(numbers, SlotArray)
        return numbers.data[: self.size]

    def columns(self, slots: Index) -> list[pa.Array]:
        """Return the state columns of these slots as they are now."""
        columns: list[pa.Array] = []
        for accumulator, _ in self._accumulators:
            values = [entries_of(field.data, slots) for field in accumulator.fields()]
            columns += accumulator.columns(values)
        return columns

    def first_changes(self, slots: Index, size: int) -> Index:
        """Return the slots that change for the first time since the last cut, each once.

        It is called before `add` with the same arguments. New slots are not among them.
        """
        return self._changed.first_changes(slots, size, self.size)

    def epochs_of(self, slots: Index) -> Array:
        """Return the epochs of the last changes of these slots."""
        return self._changed.epochs_of(slots)


class KeptAggregates(msgspec.Struct, frozen=True):
    """A cut to which aggregates can go back.

    Attributes:
        slots: their values at the cut.
        noted: for each accumulator, what it knew beside them.
    """

    slots: KeptSlots
    noted: list[Any]


def _fields_of(accumulators: Sequence[tuple[Accumulator, AggregateSpec]]) -> list[Field]:
    return [field for accumulator, _ in accumulators for field in accumulator.fields()]


class StateCut(msgspec.Struct, frozen=True):
    """The state columns at a cut. Its methods run in any one thread; `close` is called last."""

    _cut: SlotCut
    _accumulators: list[Accumulator]
    _counts: list[int]
    _readers: list[None]
    """It has an entry for each thread that makes columns."""

    @property
    def size(self) -> int:
        """The number of slots at the cut."""
        return self._cut.size

    def slots(self, since: int | None) -> Index | slice:
        """Return the slots that had changed after cut number `since`, ascending; None: all slots."""
        return self._cut.slots(since)

    def columns(self, which: Index | slice) -> list[pa.Array]:
        """Return the state columns of these slots. It closes the cut, so it can be called only once."""
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
        """Close the cut: nothing more will be read."""
        self._cut.close()
