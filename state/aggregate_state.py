"""The aggregates of one keyed state together, and which accumulator serves which type."""

from __future__ import annotations

import decimal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from ..errors import PlanError
from .accumulators import (
    Accumulator,
    AvgAccumulator,
    CountAccumulator,
    Extreme,
    FloatSum,
    Frozen,
    IntSum,
    ObjectAccumulator,
)
from .values import Index, Values, is_text, storage_dtype

_DECIMAL_CONTEXT = decimal.Context(prec=100)
"""Wide enough to add any two decimals exactly."""


@dataclass(frozen=True, slots=True)
class AggregateSpec:
    """One aggregate: what, of which column, under which name."""

    kind: str
    name: str
    column: str | None
    type: pa.DataType | None
    """Arrow type of `column`."""


class AggregateState:
    """All aggregates of one keyed state, by slot."""

    def __init__(self, specs: Sequence[AggregateSpec]) -> None:
        self._accumulators = [
            (accumulator_for(spec.kind, spec.name, spec.type), spec.column) for spec in specs
        ]
        self.size = 0

    def add(self, slots: Index, columns: Mapping[str, Values], size: int) -> None:
        """Add a batch: row i belongs to `slots[i]`; there are `size` slots now."""
        for accumulator, column in self._accumulators:
            accumulator.add(slots, None if column is None else columns[column], self.size, size)
        self.size = size

    def add_all(self, columns: Mapping[str, Values], rows: int) -> None:
        """Add a batch that belongs to slot 0 as a whole."""
        for accumulator, column in self._accumulators:
            values = None if column is None else columns[column]
            accumulator.add_all(values, rows, self.size)
        self.size = 1

    def results(self, which: Index | slice) -> list[pa.Array]:
        """One column per aggregate, for these slots."""
        return [accumulator.result(which) for accumulator, _ in self._accumulators]

    def reset(self) -> None:
        """Forget everything; keeps the memory."""
        for accumulator, _ in self._accumulators:
            accumulator.reset(self.size)
        self.size = 0

    def freeze(self) -> dict[str, Frozen]:
        """The state columns as they are now."""
        frozen: dict[str, Frozen] = {}
        for accumulator, _ in self._accumulators:
            frozen |= accumulator.freeze(self.size)
        return frozen

    def load(self, slots: Index, table: pa.Table, size: int) -> None:
        """Take over the state columns of a snapshot."""
        for accumulator, _ in self._accumulators:
            accumulator.load(slots, table, size)
        self.size = size


def accumulator_for(kind: str, name: str, type_: pa.DataType | None) -> Accumulator:
    """An accumulator for `kind` of a column of this type (None: of whole rows, for count).

    Raises:
        PlanError: there is no such aggregate of this type.
    """
    if kind == "count":
        return CountAccumulator(name)
    assert type_ is not None
    if kind in ("min", "max"):
        return _extreme(kind, name, type_)
    held = name if kind == "sum" else f"{name}__sum"
    total: Accumulator
    if pa.types.is_integer(type_):
        total = IntSum(held)
    elif pa.types.is_float32(type_) or pa.types.is_float64(type_):
        total = FloatSum(held)
    elif pa.types.is_decimal(type_):
        wide = pa.decimal128(38, type_.scale)
        if pa.types.is_decimal256(type_):
            wide = pa.decimal256(76, type_.scale)
        total = ObjectAccumulator(held, wide, _DECIMAL_CONTEXT.add)
    else:
        raise PlanError(
            f"cannot take the {kind} of this type column=`{name}` type=`{type_}`",
            fix="cast it to a number first",
        )
    return total if kind == "sum" else AvgAccumulator(name, total)


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
