"""Aggregates as numpy arrays: one entry per slot, updated a batch at a time.

Nulls are skipped as in SQL: a sum, min, max or avg of nothing but nulls is null. Among floats NaN is
greater than any number, as in DuckDB, Spark and Postgres: it is the max if there is one, and the min only
where there is nothing else; a sum or avg with a NaN is NaN. Sums and averages of integers are kept in int64
and so do not depend on the order of the records; a sum that leaves int64 (or comes within 0.2 % of its
limits) fails the job. Sums of floats are float64, added in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getsizeof
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import DataError, StateError
from ..slots.arrays import ObjectArray, SlotArray, SlotRanks, entries_of
from ..slots.epochs import Field
from ..values import Array, Index, PartialAverages, PartialCounts, Values, values_of

Mask: TypeAlias = npt.NDArray[np.bool_]

_INT64_LIMIT = 2**63
_SAFE_LIMIT = float(_INT64_LIMIT) * (1 - 2.0**-9)
QUIET: dict[str, Any] = {"invalid": "ignore", "over": "ignore"}
"""Options for `np.errstate`: NaN and infinity are ordinary values, which need no warning."""


class _Seen:
    """The slots that have had a value other than null. It costs nothing until the first null comes."""

    def __init__(self) -> None:
        self.field: SlotArray | None = None

    def reset(self) -> None:
        self.field = None

    def mark(self, valid: Index, nulls: bool, known: int, size: int) -> None:
        """Note a batch: the slots of its values, and whether it held nulls.

        As long as there was no null, each of the `known` earlier slots had a value.
        """
        if self.field is None:
            if not nulls:
                return
            self.field = SlotArray(np.bool_, False)
            self.field.reserve(size)
            self.field.data[:known] = True
        self.field.reserve(size)
        self.field.data[valid] = True

    def mask(self, which: Index | slice) -> Mask | None:
        """Return pyarrow's mask, which is True where the result is null; None if no result is."""
        return None if self.field is None else ~self.field.data[which]


class Accumulator:
    """The state of one aggregate for all slots.

    Attributes:
        type: the Arrow type of the result.
        name: the column of the result.
        adds_partials: True if `add` takes partial results of other accumulators of this kind, and the
            result is exactly that of all their rows, in whatever order.
    """

    type: pa.DataType
    name: str
    adds_partials: bool = False

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        """Add a batch: row i belongs to `slots[i]`. Slots from `known` to `size` are new."""
        raise NotImplementedError

    def add_all(self, values: Values | None, rows: int, known: int) -> None:
        """Add a batch whose rows all belong to slot 0; overridden where a reduction is faster."""
        self.add(np.zeros(rows, np.intp), values, known, 1)

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        """Add the rows of `from_slots[i]` to `into_slots[i]`, as if they had arrived there.

        Slots of `into_slots` may repeat. `from_slots` are other, distinct slots and do not change. Where
        the order of rows counts, those of `from_slots` come later.
        """
        raise NotImplementedError

    def numbers(self, which: Index | slice) -> Array | None:
        """Return a copy of results of int64 or float64; None: they are others, or may be null."""
        return None

    def result(self, which: Index | slice) -> pa.Array:
        """Return the aggregate of these slots."""
        raise NotImplementedError

    def reset(self, size: int) -> None:
        """Forget all slots, which are the first `size`; keeps the memory."""
        raise NotImplementedError

    def fields(self) -> list[Field]:
        """Return the present arrays by slot. New ones are only ever added at the end."""
        raise NotImplementedError

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        """Return the state columns (see `state_fields`) of some entries of `fields`. Runs in any thread."""
        raise NotImplementedError

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        """Take over the state columns of a snapshot, row i into `slots[i]`, all from `known` on.

        Columns that the table lacks because the aggregate is new are taken as if no record had come.
        """
        raise NotImplementedError

    def noted(self) -> Any:
        """Return what it knows beside its fields, for `go_back`."""
        return None

    def go_back(self, noted: Any) -> None:
        """Take over what `noted` returned at an earlier cut, whose values the fields have again.

        Fields that came after the cut are dropped.
        """

    @property
    def object_bytes(self) -> int:
        """The memory of Python objects that the arrays refer to."""
        return 0

    def state_fields(self) -> list[pa.Field]:
        """Return the fields of the columns in a snapshot."""
        return [pa.field(self.name, self.type)]


class CountAccumulator(Accumulator):
    """count() counts all rows, count(column) those that are not null."""

    adds_partials = True

    def __init__(self, name: str) -> None:
        self.name, self.type = name, pa.int64()
        self._counts = SlotArray(np.int64)

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        self._counts.reserve(size)
        if isinstance(values, PartialCounts):
            np.add.at(self._counts.data, slots, values.data)
            return
        if values is not None and values.valid is not None:
            slots = slots[values.valid]
        np.add.at(self._counts.data, slots, 1)

    def add_all(self, values: Values | None, rows: int, known: int) -> None:
        if isinstance(values, PartialCounts):
            rows = int(values.data.sum())
        elif values is not None and values.valid is not None:
            rows = int(np.count_nonzero(values.valid))
        self._counts.data[0] += rows

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        np.add.at(self._counts.data, into_slots, self._counts.data.take(from_slots))

    def counts(self, which: Index | slice) -> npt.NDArray[np.int64]:
        """Return the counts as numpy."""
        return self._counts.data[which]

    def numbers(self, which: Index | slice) -> Array | None:
        return entries_of(self._counts.data, which)

    def result(self, which: Index | slice) -> pa.Array:
        return pa.array(entries_of(self._counts.data, which))

    def reset(self, size: int) -> None:
        self._counts.reset(size)

    def fields(self) -> list[Field]:
        return [self._counts]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        return [pa.array(values[0])]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._counts.reserve(size)
        values = state_column(table, self.name, self.type)
        if values is not None:
            self._counts.data[slots] = values.data


class _NumericAccumulator(Accumulator):
    """The base of sum, min and max of numbers: one array, and null where there was no value."""

    def __init__(self, name: str, type_: pa.DataType, dtype: Any, initial: Any) -> None:
        self.name, self.type = name, type_
        self._field = SlotArray(dtype, initial)
        self._seen = _Seen()
        self._plain = type_ in (pa.int64(), pa.float64())

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert values is not None
        data, valid = values.data, values.valid
        if valid is not None:
            slots, data = slots[valid], data[valid]
        self._field.reserve(size)
        self._seen.mark(slots, valid is not None, known, size)
        if slots.size:
            self._combine_at(slots, data)

    def add_all(self, values: Values | None, rows: int, known: int) -> None:
        assert values is not None
        data, valid = values.data, values.valid
        if valid is not None:
            data = data[valid]
        self._seen.mark(np.zeros(min(1, data.size), np.intp), valid is not None, known, 1)
        if data.size:
            self._combine_all(data)

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        if self._seen.field is not None:
            seen = self._seen.field.data.take(from_slots)
            into_slots, from_slots = into_slots[seen], from_slots[seen]
            self._seen.field.data[into_slots] = True
        if from_slots.size:
            self._combine_at(into_slots, self._field.data.take(from_slots))

    def _combine_at(self, slots: Index, data: Array) -> None:
        raise NotImplementedError

    def _combine_all(self, data: Array) -> None:
        raise NotImplementedError

    def numbers(self, which: Index | slice) -> Array | None:
        if self._seen.field is not None or not self._plain:
            return None
        return entries_of(self._field.data, which)

    def result(self, which: Index | slice) -> pa.Array:
        values = entries_of(self._field.data, which)
        return arrow_of(values, self.type, self._seen.mask(which))

    def reset(self, size: int) -> None:
        self._field.reset(size)
        self._seen.reset()

    def fields(self) -> list[Field]:
        return [self._field] if self._seen.field is None else [self._field, self._seen.field]

    def noted(self) -> Any:
        return self._seen.field is not None

    def go_back(self, noted: Any) -> None:
        if not noted:
            self._seen.reset()

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        return [arrow_of(values[0], self.type, ~values[1] if len(values) > 1 else None)]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._field.reserve(size)
        values = state_column(table, self.name, self.type)
        if values is None:
            self._seen.mark(slots[:0], True, known, size)
            return
        valid, data = values.valid, values.data
        if valid is not None:
            slots, data = slots[valid], data[valid]
        # a new slot that gets nothing here has had no value
        self._seen.mark(slots, len(slots) < size - known, known, size)
        self._field.data[slots] = data


class FloatSum(_NumericAccumulator):
    """The sum of floats, in float64."""

    def __init__(self, name: str) -> None:
        super().__init__(name, pa.float64(), np.float64, 0.0)

    def _combine_at(self, slots: Index, data: Array) -> None:
        with np.errstate(**QUIET):
            np.add.at(self._field.data, slots, data.astype(np.float64, copy=False))

    def _combine_all(self, data: Array) -> None:
        with np.errstate(**QUIET):
            self._field.data[0] += data.sum(dtype=np.float64)


class IntSum(_NumericAccumulator):
    """The sum of integers, in int64. It fails rather than wraps.

    No sum exceeds `_bound` in magnitude. While the bound is small, nothing can overflow, and finding that
    out takes one look at the extremes of each batch. Otherwise the sums that a batch changes are checked.
    The bound grows with each batch. It is computed from the sums again once as many rows have come as
    there are sums, so that no batch pays for all of them.
    """

    adds_partials = True

    def __init__(self, name: str) -> None:
        super().__init__(name, pa.int64(), np.int64, 0)
        self._bound = 0
        self._rows = 0  # rows since the bound was computed from the sums
        self._totals = SlotArray(
            np.float64
        )  # scratch by slot; all zeros except while a batch is checked

    def reset(self, size: int) -> None:
        super().reset(size)
        self._bound = self._rows = 0

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        super().load(slots, table, known, size)
        self._bound = max(self._bound, self._magnitude(self._field.data[slots]))

    def noted(self) -> Any:
        return super().noted(), self._bound, self._rows

    def go_back(self, noted: Any) -> None:
        seen, self._bound, self._rows = noted
        super().go_back(seen)

    def _combine_at(self, slots: Index, data: Array) -> None:
        if not self._fits(data):
            self._totals.reserve(self._field.filled)
            totals = self._totals.data
            np.add.at(totals, slots, data.astype(np.float64))
            expected = self._field.data.take(slots) + totals.take(slots)
            totals[slots] = 0
            self._check(expected)
        np.add.at(self._field.data, slots, data.astype(np.int64, copy=False))

    def _combine_all(self, data: Array) -> None:
        if not self._fits(data):
            self._check(self._field.data[:1] + data.sum(dtype=np.float64))
        self._field.data[0] += data.sum(dtype=np.int64)

    def _fits(self, data: Array) -> bool:
        """Return True if these values cannot take any sum out of int64; adds them to the bound."""
        growth = self._magnitude(data) * len(data)
        self._rows += len(data)
        if self._bound + growth >= _INT64_LIMIT and self._rows >= self._field.filled:
            sums = self._field.data[: self._field.filled]
            self._bound, self._rows = self._magnitude(sums), 0
        self._bound = min(self._bound + growth, _INT64_LIMIT)
        return self._bound < _INT64_LIMIT

    def _check(self, expected: Array) -> None:
        """Raise DataError if one of these new sums, in float64, does not fit int64."""
        if np.abs(expected).max() >= _SAFE_LIMIT:
            raise DataError(
                f"a sum left the range of int64 column=`{self.name}`",
                fix="sum a float64 or decimal instead, for example CAST(x AS DOUBLE)",
            )

    @staticmethod
    def _magnitude(data: Array) -> int:
        return max(abs(int(data.min())), abs(int(data.max()))) if len(data) else 0


class Extreme(_NumericAccumulator):
    """The min or max of anything that lies in memory as a number."""

    adds_partials = True

    def __init__(self, name: str, type_: pa.DataType, dtype: np.dtype[Any], largest: bool) -> None:
        initial: Any
        self._ufunc: Any
        if dtype.kind == "f":
            # fmin ignores NaN, maximum keeps it: NaN is greater than any number.
            initial = -np.inf if largest else np.nan
            self._ufunc = np.maximum if largest else np.fmin
        else:
            limits = np.iinfo(dtype)
            initial = limits.min if largest else limits.max
            self._ufunc = np.maximum if largest else np.minimum
        super().__init__(name, type_, dtype, initial)

    def _combine_at(self, slots: Index, data: Array) -> None:
        with np.errstate(**QUIET):
            self._ufunc.at(self._field.data, slots, data)

    def _combine_all(self, data: Array) -> None:
        held = self._field.data
        with np.errstate(**QUIET):
            held[0] = self._ufunc(held[0], self._ufunc.reduce(data))


class ObjectAccumulator(Accumulator):
    """The sum, min or max of decimals, strings and bytes: Python objects, one step per record."""

    def __init__(self, name: str, type_: pa.DataType, merge: Callable[[Any, Any], Any]) -> None:
        self.name, self.type = name, type_
        self._merge = merge
        self._field = ObjectArray()
        self._object_bytes = 0

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert values is not None
        self._field.reserve(size)
        held, merge, grown = self._field.data, self._merge, 0
        for slot, value in zip(slots.tolist(), values.data.tolist(), strict=True):
            if value is None:
                continue
            before = held[slot]
            if before is None:
                held[slot] = value
                grown += getsizeof(value)
            elif (now := merge(before, value)) is not before:
                held[slot] = now
                grown += getsizeof(now) - getsizeof(before)
        self._object_bytes += grown

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        values = entries_of(self._field.data, from_slots)
        self.add(into_slots, Values(values, None), 0, 0)

    @property
    def object_bytes(self) -> int:
        return self._object_bytes

    def objects(self, which: Index | slice) -> list[Any]:
        """Return the values as Python objects, None where there was no value."""
        held: list[Any] = entries_of(self._field.data, which).tolist()
        return held

    def result(self, which: Index | slice) -> pa.Array:
        return self._to_arrow(self.objects(which))

    def _to_arrow(self, objects: list[Any]) -> pa.Array:
        try:
            return pa.array(objects, self.type)
        except pa.ArrowInvalid as error:
            raise DataError(
                f"a sum has too many digits column=`{self.name}` type=`{self.type}`",
                fix="cast the column to a smaller decimal or to double",
            ) from error

    def reset(self, size: int) -> None:
        self._field.reset(size)
        self._object_bytes = 0

    def noted(self) -> Any:
        return self._object_bytes

    def go_back(self, noted: Any) -> None:
        self._object_bytes = noted

    def fields(self) -> list[Field]:
        return [self._field]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        return [self._to_arrow(values[0].tolist())]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._field.reserve(size)
        values = state_column(table, self.name, self.type)
        if values is not None:
            held, objects = self._field.data, values.data.tolist()
            for slot, value in zip(slots.tolist(), objects, strict=True):
                held[slot] = value
            self._object_bytes += sum(getsizeof(value) for value in objects if value is not None)


class AvgAccumulator(Accumulator):
    """The avg: a sum and a count."""

    def __init__(self, name: str, total: Accumulator) -> None:
        self.name, self.type = name, pa.float64()
        self._total = total
        self._count = CountAccumulator(f"{name}__count")
        self.adds_partials = total.adds_partials

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        self._total.add(slots, values, known, size)
        self._count.add(slots, _counted(values), known, size)

    def add_all(self, values: Values | None, rows: int, known: int) -> None:
        self._total.add_all(values, rows, known)
        self._count.add_all(_counted(values), rows, known)

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        self._total.merge(into_slots, from_slots)
        self._count.merge(into_slots, from_slots)

    def result(self, which: Index | slice) -> pa.Array:
        counts = self._count.counts(which)
        if isinstance(self._total, ObjectAccumulator):
            sums = np.array([float(x or 0) for x in self._total.objects(which)], np.float64)
        else:
            sums = self._total.result(which).fill_null(0).to_numpy()
        averages = np.divide(sums, counts, out=np.zeros(len(counts)), where=counts > 0)
        empty = counts == 0
        return arrow_of(averages, self.type, empty if empty.any() else None)

    def reset(self, size: int) -> None:
        self._total.reset(size)
        self._count.reset(size)

    def noted(self) -> Any:
        return self._total.noted()

    def go_back(self, noted: Any) -> None:
        self._total.go_back(noted)

    def fields(self) -> list[Field]:
        return [*self._count.fields(), *self._total.fields()]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        return self._total.columns(values[1:]) + self._count.columns(values[:1])

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._total.load(slots, table, known, size)
        self._count.load(slots, table, known, size)

    @property
    def object_bytes(self) -> int:
        return self._total.object_bytes

    def state_fields(self) -> list[pa.Field]:
        return self._total.state_fields() + self._count.state_fields()


def _counted(values: Values | None) -> Values | None:
    """Return what the count of an average counts."""
    return values.counts if isinstance(values, PartialAverages) else values


def arrow_of(data: Array, type_: pa.DataType, mask: Mask | None) -> pa.Array:
    """Return an Arrow array over a numpy array that does not change any more."""
    if pa.types.is_boolean(type_):
        return pa.array(data.view(np.bool_), mask=mask)
    array = pa.array(data, mask=mask)
    return array if array.type == type_ else array.view(type_)


def stored_array(table: pa.Table, name: str, type_: pa.DataType) -> pa.Array | None:
    """Return a column of a snapshot as one array; None if it is not there.

    Raises:
        StateError: the column is not of the type that this job expects.
    """
    if name not in table.column_names:
        return None
    column = table.column(name)
    if column.type != type_:
        raise StateError(
            f"the snapshot does not fit this aggregate column=`{name}` expected=`{type_}` "
            f"found=`{column.type}`",
            fix="keep aggregates as they were, or give the changed ones a new name",
        )
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def state_column(table: pa.Table, name: str, type_: pa.DataType) -> Values | None:
    """Return the values of `stored_array`."""
    array = stored_array(table, name, type_)
    return None if array is None else values_of(array)


def list_column(table: pa.Table, name: str, type_: pa.DataType) -> tuple[Array, pa.Array] | None:
    """Return the lengths and the items of the lists of `stored_array`."""
    lists = stored_array(table, name, type_)
    if lists is None:
        return None
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), lists.flatten()


def list_array(lengths: Array, items: pa.Array) -> pa.Array:
    """Return lists of these lengths over items that stand one after the other."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets), items)


class MomentsAccumulator(Accumulator):
    """The variance, or its root, in float64, from count, mean and sum of squared deviations per slot.

    Batches, and slots that are merged, are combined as in Chan, Golub, LeVeque: Updating Formulae and a
    Pairwise Algorithm for Computing Sample Variances (1979). The mean is kept in two float64 (Dekker), the
    second of which is what the first rounds away. So deviations from it are as exact as the values, the sum
    has only terms that are not negative, and the way in which rows are cut into batches shows in the last
    bits alone, even where the mean is large and the deviations are small.

    Args:
        sample: divide by count - 1, so that a single value gives null; otherwise by count.
        root: return the root, which is the standard deviation.
    """

    def __init__(self, name: str, *, sample: bool, root: bool) -> None:
        self.name, self.type = name, pa.float64()
        self._sample, self._root = sample, root
        self._counts = SlotArray(np.int64)
        self._means, self._lows = SlotArray(np.float64), SlotArray(np.float64)
        self._squares = SlotArray(np.float64)
        self._ranks = SlotRanks()

    def _parts(self) -> list[SlotArray]:
        return [self._counts, self._means, self._lows, self._squares]

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert values is not None
        for part in self._parts():
            part.reserve(size)
        data, valid = values.data, values.valid
        if valid is not None:
            slots, data = slots[valid], data[valid]
        if not slots.size:
            return
        if data.dtype == object:  # decimals
            data = np.array([float(value) for value in data.tolist()])
        zeros = np.zeros(len(slots))
        data = data.astype(np.float64, copy=False)
        self._combine(slots, np.ones(len(slots), np.int64), data, zeros, zeros)

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        some = self._counts.data.take(from_slots) > 0
        into_slots, from_slots = into_slots[some], from_slots[some]
        if into_slots.size:
            self._combine(into_slots, *(part.data.take(from_slots) for part in self._parts()))

    def _combine(
        self, slots: Index, counts: Array, means: Array, lows: Array, squares: Array
    ) -> None:
        """Add groups of values to slots, each given by its count, its mean in two parts, and its
        squares.
        """
        unique, rank = self._ranks.of(slots, self._counts.filled)
        groups = len(unique)
        held = self._counts.data.take(unique)
        base, base_low = self._means.data.take(unique), self._lows.data.take(unique)
        first = np.empty(groups, np.intp)
        first[rank[::-1]] = np.arange(len(rank))[::-1]
        fresh = held == 0
        base[fresh], base_low[fresh] = means[first[fresh]], lows[first[fresh]]
        with np.errstate(**QUIET):
            from_base = (means - base[rank]) + (lows - base_low[rank])
            added: Array = np.bincount(rank, counts, groups)
            shift: Array = np.bincount(rank, counts * from_base, groups) / added
            deviations = from_base - shift[rank]
            rounding = np.bincount(rank, counts * deviations, groups) / added
            within: Array = np.bincount(rank, squares + counts * deviations * deviations, groups)
            within = within - added * rounding * rounding
            shift = shift + rounding
            total = held + added
            self._squares.data[unique] += within + shift * shift * (held * added / total)
            step = base_low + shift * (added / total)
            mean = base + step
            moved = mean - base
            self._lows.data[unique] = (base - (mean - moved)) + (step - moved)
        self._means.data[unique] = mean
        self._counts.data[unique] = total.astype(np.int64)

    def result(self, which: Index | slice) -> pa.Array:
        divisors = entries_of(self._counts.data, which) - self._sample
        squares = np.maximum(entries_of(self._squares.data, which), 0.0)
        nothing = divisors <= 0
        found = np.divide(squares, divisors, out=np.zeros(len(squares)), where=~nothing)
        if self._root:
            found = np.sqrt(found)
        return arrow_of(found, self.type, nothing if nothing.any() else None)

    def reset(self, size: int) -> None:
        for part in self._parts():
            part.reset(size)

    def fields(self) -> list[Field]:
        return list(self._parts())

    def state_fields(self) -> list[pa.Field]:
        kinds = ("count", pa.int64()), ("mean", self.type), ("mean_low", self.type)
        return [pa.field(f"{self.name}__{n}", t) for n, t in (*kinds, ("squares", self.type))]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        return [pa.array(part) for part in values]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        for part, field in zip(self._parts(), self.state_fields(), strict=True):
            part.reserve(size)
            values = state_column(table, field.name, field.type)
            if values is not None:
                part.data[slots] = values.data
