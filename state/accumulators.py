"""Aggregates as numpy arrays: one entry per slot, updated a batch at a time.

Nulls are skipped as in SQL: a sum, min, max or avg of nothing but nulls is null. Among floats NaN is
greater than any number, as in DuckDB, Spark and Postgres: it is the max if there is one, and the min only
of nothing else; a sum or avg with a NaN is NaN. Sums and averages of integers are kept in int64 and so do
not depend on the order of records; a sum that leaves int64 (or comes within 0.2 % of its limits) fails
the job. Sums of floats are float64, added in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import JobError, StateError
from .values import Array, Index, Values, values_of

Frozen: TypeAlias = Callable[[], pa.Array]

_INT64_LIMIT = 2**63
_SAFE_LIMIT = float(_INT64_LIMIT) * (1 - 2.0**-9)
_INITIAL_SLOTS = 64
_QUIET: dict[str, Any] = {"invalid": "ignore", "over": "ignore"}
"""NaN and infinity are values like others, not worth a warning."""


class _Field:
    """A growing array with an initial value per slot."""

    def __init__(self, dtype: Any, initial: Any) -> None:
        self.initial = initial
        self.data: Array = np.full(_INITIAL_SLOTS, initial, dtype)

    def reserve(self, size: int) -> None:
        if size > len(self.data):
            larger = np.full(max(size, 2 * len(self.data)), self.initial, self.data.dtype)
            larger[: len(self.data)] = self.data
            self.data = larger

    def reset(self, size: int) -> None:
        self.data[:size] = self.initial


class _Seen:
    """Which slots have had a value that is not null. Costs nothing until the first null comes."""

    def __init__(self) -> None:
        self._field: _Field | None = None

    def reset(self) -> None:
        self._field = None

    def mark(self, valid: Index, nulls: bool, known: int, size: int) -> None:
        """Note a batch: the slots of its values, and whether it held nulls.

        While no null came, each of the `known` slots from before had a value.
        """
        if self._field is None:
            if not nulls:
                return
            self._field = _Field(np.bool_, False)
            self._field.reserve(size)
            self._field.data[:known] = True
        self._field.reserve(size)
        self._field.data[valid] = True

    def mask(self, which: Index | slice) -> npt.NDArray[np.bool_] | None:
        """True where the result is null, in pyarrow's sense; None if nowhere."""
        return None if self._field is None else ~self._field.data[which]


class Accumulator:
    """State of one aggregate for all slots.

    Attributes:
        type: Arrow type of the result.
        name: its column.
    """

    type: pa.DataType
    name: str

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        """Add a batch: row i belongs to `slots[i]`. Slots from `known` to `size` are new."""
        raise NotImplementedError

    def add_all(self, values: Values | None, rows: int, known: int) -> None:
        """Add a batch whose rows all belong to slot 0; overridden where a reduction is faster."""
        self.add(np.zeros(rows, np.intp), values, known, 1)

    def result(self, which: Index | slice) -> pa.Array:
        """The aggregate of these slots."""
        raise NotImplementedError

    def reset(self, size: int) -> None:
        """Forget the first `size` slots, which are all; keeps the memory."""
        raise NotImplementedError

    def freeze(self, size: int) -> dict[str, Frozen]:
        """State columns as they are now; their functions run later, in a thread."""
        raise NotImplementedError

    def load(self, slots: Index, table: pa.Table, size: int) -> None:
        """Take over the state columns of a snapshot, row i into `slots[i]`."""
        raise NotImplementedError

    def state_fields(self) -> list[pa.Field]:
        """The columns of `freeze`."""
        return [pa.field(self.name, self.type)]


class CountAccumulator(Accumulator):
    """count(): all rows; count(column): those not null."""

    def __init__(self, name: str) -> None:
        self.name, self.type = name, pa.int64()
        self._counts = _Field(np.int64, 0)

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        self._counts.reserve(size)
        if values is not None and values.valid is not None:
            slots = slots[values.valid]
        np.add.at(self._counts.data, slots, 1)

    def add_all(self, values: Values | None, rows: int, known: int) -> None:
        if values is not None and values.valid is not None:
            rows = int(np.count_nonzero(values.valid))
        self._counts.data[0] += rows

    def counts(self, which: Index | slice) -> npt.NDArray[np.int64]:
        """The counts as numpy."""
        return self._counts.data[which]

    def result(self, which: Index | slice) -> pa.Array:
        return _owned(self._counts.data[which], self.type, None)

    def reset(self, size: int) -> None:
        self._counts.reset(size)

    def freeze(self, size: int) -> dict[str, Frozen]:
        data = self._counts.data[:size].copy()
        return {self.name: lambda: pa.array(data)}

    def load(self, slots: Index, table: pa.Table, size: int) -> None:
        self._counts.reserve(size)
        self._counts.data[slots] = _state_column(table, self.name, self.type).data


class _NumericAccumulator(Accumulator):
    """What sum, min and max of numbers share: one array, and null where nothing was seen."""

    def __init__(self, name: str, type_: pa.DataType, dtype: Any, initial: Any) -> None:
        self.name, self.type = name, type_
        self._field = _Field(dtype, initial)
        self._seen = _Seen()

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

    def _combine_at(self, slots: Index, data: Array) -> None:
        raise NotImplementedError

    def _combine_all(self, data: Array) -> None:
        raise NotImplementedError

    def result(self, which: Index | slice) -> pa.Array:
        return _owned(self._field.data[which], self.type, self._seen.mask(which))

    def reset(self, size: int) -> None:
        self._field.reset(size)
        self._seen.reset()

    def freeze(self, size: int) -> dict[str, Frozen]:
        data = self._field.data[:size].copy()
        mask = self._seen.mask(slice(0, size))
        return {self.name: lambda: _owned(data, self.type, mask)}

    def load(self, slots: Index, table: pa.Table, size: int) -> None:
        values = _state_column(table, self.name, self.type)
        self._field.reserve(size)
        if values.valid is not None:
            slots = slots[values.valid]
            values = Values(values.data[values.valid], values.valid)
        self._seen.mark(slots, values.valid is not None, 0, size)
        self._field.data[slots] = values.data


class FloatSum(_NumericAccumulator):
    """sum of floats, in float64."""

    def __init__(self, name: str) -> None:
        super().__init__(name, pa.float64(), np.float64, 0.0)

    def _combine_at(self, slots: Index, data: Array) -> None:
        with np.errstate(**_QUIET):
            np.add.at(self._field.data, slots, data.astype(np.float64, copy=False))

    def _combine_all(self, data: Array) -> None:
        with np.errstate(**_QUIET):
            self._field.data[0] += data.sum(dtype=np.float64)


class IntSum(_NumericAccumulator):
    """sum of integers, in int64; fails rather than wraps.

    `_bound` is what no sum exceeds in magnitude. While it is small, which costs one look at the
    extremes of each batch to know, nothing can overflow; only then are the sums themselves looked at.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, pa.int64(), np.int64, 0)
        self._bound = 0

    def reset(self, size: int) -> None:
        super().reset(size)
        self._bound = 0

    def load(self, slots: Index, table: pa.Table, size: int) -> None:
        super().load(slots, table, size)
        self._bound = self._magnitude(self._field.data)

    def _combine_at(self, slots: Index, data: Array) -> None:
        sums = self._field.data
        self._check(data, lambda: np.bincount(slots, data.astype(np.float64), len(sums)))
        np.add.at(sums, slots, data.astype(np.int64, copy=False))

    def _combine_all(self, data: Array) -> None:
        self._check(data, lambda: data.sum(dtype=np.float64))
        self._field.data[0] += data.sum(dtype=np.int64)

    def _check(self, data: Array, totals: Callable[[], Any]) -> None:
        """Raise JobError if a sum would leave int64; `totals` adds up the batch in float64."""
        growth = self._magnitude(data) * len(data)
        if self._bound + growth >= _INT64_LIMIT:
            sums = self._field.data
            self._bound = self._magnitude(sums)
            if self._bound + growth >= _INT64_LIMIT:
                expected = np.abs(sums.astype(np.float64) + totals())
                if expected.max() >= _SAFE_LIMIT:
                    raise JobError(
                        f"a sum left the range of int64 column=`{self.name}`",
                        fix="sum a float64 or decimal instead, for example CAST(x AS DOUBLE)",
                    )
                self._bound, growth = int(expected.max()), 0
        self._bound += growth

    @staticmethod
    def _magnitude(data: Array) -> int:
        return max(abs(int(data.min())), abs(int(data.max()))) if len(data) else 0


class Extreme(_NumericAccumulator):
    """min or max of anything that lies in memory as a number."""

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
        with np.errstate(**_QUIET):
            self._ufunc.at(self._field.data, slots, data)

    def _combine_all(self, data: Array) -> None:
        held = self._field.data
        with np.errstate(**_QUIET):
            held[0] = self._ufunc(held[0], self._ufunc.reduce(data))


class ObjectAccumulator(Accumulator):
    """sum, min or max of decimals, strings and bytes: Python objects, one step per record."""

    def __init__(self, name: str, type_: pa.DataType, merge: Callable[[Any, Any], Any]) -> None:
        self.name, self.type = name, type_
        self._merge = merge
        self._field = _Field(object, None)

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert values is not None
        self._field.reserve(size)
        held, merge = self._field.data, self._merge
        for slot, value in zip(slots.tolist(), values.data.tolist(), strict=True):
            if value is not None:
                before = held[slot]
                held[slot] = value if before is None else merge(before, value)

    def objects(self, which: Index | slice) -> list[Any]:
        """The values as Python objects, None where nothing was seen."""
        held: list[Any] = self._field.data[which].tolist()
        return held

    def result(self, which: Index | slice) -> pa.Array:
        return self._to_arrow(self.objects(which))

    def _to_arrow(self, objects: list[Any]) -> pa.Array:
        try:
            return pa.array(objects, self.type)
        except pa.ArrowInvalid as error:
            raise JobError(
                f"a sum has too many digits column=`{self.name}` type=`{self.type}`",
                fix="cast the column to a smaller decimal or to double",
            ) from error

    def reset(self, size: int) -> None:
        self._field.reset(size)

    def freeze(self, size: int) -> dict[str, Frozen]:
        objects = self.objects(slice(0, size))
        return {self.name: lambda: self._to_arrow(objects)}

    def load(self, slots: Index, table: pa.Table, size: int) -> None:
        self._field.reserve(size)
        self._field.data[slots] = _state_column(table, self.name, self.type).data


class AvgAccumulator(Accumulator):
    """avg: a sum and a count."""

    def __init__(self, name: str, total: Accumulator) -> None:
        self.name, self.type = name, pa.float64()
        self._total = total
        self._count = CountAccumulator(f"{name}__count")

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        self._total.add(slots, values, known, size)
        self._count.add(slots, values, known, size)

    def add_all(self, values: Values | None, rows: int, known: int) -> None:
        self._total.add_all(values, rows, known)
        self._count.add_all(values, rows, known)

    def result(self, which: Index | slice) -> pa.Array:
        counts = self._count.counts(which)
        if isinstance(self._total, ObjectAccumulator):
            sums = np.array([float(x or 0) for x in self._total.objects(which)], np.float64)
        else:
            sums = self._total.result(which).fill_null(0).to_numpy()
        averages = np.divide(sums, counts, out=np.zeros(len(counts)), where=counts > 0)
        empty = counts == 0
        return _owned(averages, self.type, empty if empty.any() else None)

    def reset(self, size: int) -> None:
        self._total.reset(size)
        self._count.reset(size)

    def freeze(self, size: int) -> dict[str, Frozen]:
        return self._total.freeze(size) | self._count.freeze(size)

    def load(self, slots: Index, table: pa.Table, size: int) -> None:
        self._total.load(slots, table, size)
        self._count.load(slots, table, size)

    def state_fields(self) -> list[pa.Field]:
        return self._total.state_fields() + self._count.state_fields()


def _owned(data: Array, type_: pa.DataType, mask: npt.NDArray[np.bool_] | None) -> pa.Array:
    """An Arrow array of a numpy one, which may be a view of memory that is reused: it is copied."""
    if pa.types.is_boolean(type_):
        return pa.array(data.view(np.bool_), mask=mask)
    array = pa.array(data.copy(), mask=mask)
    return array if array.type == type_ else array.view(type_)


def _state_column(table: pa.Table, name: str, type_: pa.DataType) -> Values:
    """A column of a snapshot, checked to be what this job expects."""
    if name not in table.column_names or table.schema.field(name).type != type_:
        found = table.schema.field(name).type if name in table.column_names else "nothing"
        raise StateError(
            f"the snapshot does not fit this aggregate column=`{name}` expected=`{type_}` "
            f"found=`{found}`",
            fix="keep aggregates as they were, or give the changed ones a step of a new name",
        )
    column = table.column(name)
    return values_of(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
