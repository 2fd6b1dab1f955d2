"""Which accumulator serves which aggregate of which type."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ..errors import PlanError
from .accumulators import (
    Accumulator,
    AvgAccumulator,
    CountAccumulator,
    Extreme,
    FloatSum,
    IntSum,
    ObjectAccumulator,
)
from .accumulators_approx_distinct import ApproxDistinctAccumulator
from .accumulators_chosen import ChosenAccumulator
from .accumulators_collected import CollectAccumulator
from .accumulators_distinct import DistinctAccumulator
from .accumulators_moments import MomentsAccumulator
from .accumulators_quantile import QuantileAccumulator
from .accumulators_top import TopAccumulator
from .interned import is_internable
from .orders import has_order
from .values import is_text, storage_dtype

_DECIMAL_CONTEXT = decimal.Context(prec=100)
"""Wide enough to add any two decimals exactly."""
MOMENTS: Final = {
    "variance": (True, False),
    "stddev": (True, True),
    "variance_pop": (False, False),
    "stddev_pop": (False, True),
}
"""By kind: of a sample, and the root."""
COUNTS: Final = frozenset({"count", "count_distinct", "approx_count_distinct"})
"""Kinds whose result is never null."""
BY_TIME: Final = frozenset({"first", "last", "collect"})
"""Kinds in which the times of the records decide."""
TOP: Final = frozenset({"top_n", "bottom_n"})
"""Kinds of several records; the column itself decides, unless another is named."""
BY_COLUMN: Final = frozenset({"min_by", "max_by"}) | TOP
"""Kinds in which another column decides."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The number that a kind takes: from `low` to `high`; without a default it must be given."""

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
"""By kind."""


def accumulator_for(
    kind: str,
    name: str,
    type_: pa.DataType | None,
    by_type: pa.DataType | None = None,
    number: float | None = None,
) -> Accumulator:
    """An accumulator for `kind` of a column of this type (None: of whole rows, for count).

    `by_type` is the type of the column that decides, `number` the parameter, of kinds that have them.

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
    """The type of a column that decides."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if not has_order(type_):
        raise PlanError(
            f"the {kind} of a column cannot be by one of this type column=`{name}` type=`{type_}`",
            fix="by= takes a column of numbers, dates or timestamps",
        )
    return type_


def _total(kind: str, name: str, type_: pa.DataType) -> Accumulator:
    """sum or avg."""
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
