"""Plain conditions, computed by Arrow: a plan of Polars for each batch costs several times as much.

Only what surely has the same result in both is computed here. So there are no floats, as Polars orders NaN
above all numbers and Arrow follows IEEE, and no arithmetic but the remainder.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...state.values import values_of
from .sql.tree import SqlNode

Arrays: TypeAlias = Mapping[str, pa.Array]
Condition: TypeAlias = Callable[[Arrays], pa.BooleanArray]
_Operand: TypeAlias = Callable[[Arrays], Any]

_KERNELS: Final = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_EQUALITY: Final = ("=", "<>", "!=")
_INTEGER: Final = re.compile(r"-?\d{1,18}")
_TEXT: Final = re.compile(r"'([^']*)'")


def arrow_condition(node: SqlNode, schema: pa.Schema) -> Condition | None:
    """Return a function that computes a condition from columns; None if it is left to Polars."""
    if node.kind in ("all", "any"):
        parts = [arrow_condition(part, schema) for part in node.parts]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        join = pc.and_kleene if node.kind == "all" else pc.or_kleene
        return lambda arrays: reduce(join, (part(arrays) for part in found))
    if node.kind == "not":
        inner = arrow_condition(node.parts[0], schema)
        return None if inner is None else lambda arrays: pc.invert(inner(arrays))
    if node.kind == "is":
        return _null_check(node, schema)
    if node.kind == "column" and pa.types.is_boolean(_type_of(node, schema)):
        return operator.itemgetter(node.text)
    return _comparison(node, schema) if node.kind == "binary" else None


def _type_of(node: SqlNode, schema: pa.Schema) -> pa.DataType:
    """Return the type of a column, null for anything else."""
    known = node.kind == "column" and schema.get_field_index(node.text) >= 0
    return schema.field(node.text).type if known else pa.null()


def _is_integer(type_: pa.DataType) -> bool:
    """Return True for integers that fit int64."""
    return bool(pa.types.is_integer(type_)) and type_ != pa.uint64()


def _null_check(node: SqlNode, schema: pa.Schema) -> Condition | None:
    (subject,) = node.parts
    type_, name = _type_of(subject, schema), subject.text
    plain = pa.types.is_integer(type_) or pa.types.is_boolean(type_) or pa.types.is_string(type_)
    if not plain or node.text not in ("IS NULL", "IS NOT NULL"):
        return None
    kernel = pc.is_null if node.text == "IS NULL" else pc.is_valid
    return lambda arrays: kernel(arrays[name])


def _comparison(node: SqlNode, schema: pa.Schema) -> Condition | None:
    kernel, (left, right) = _KERNELS.get(node.text), node.parts
    if kernel is None or (left.is_literal and right.is_literal):
        return None
    if pa.types.is_string(_type_of(left, schema)) and node.text in _EQUALITY:
        name, text = left.text, _TEXT.fullmatch(right.text) if right.is_literal else None
        if text is None:
            return None
        wanted = pa.scalar(text[1], pa.string())
        return lambda arrays: kernel(arrays[name], wanted)
    first, second = _integers(left, schema), _integers(right, schema)
    if first is None or second is None:
        return None
    return lambda arrays: kernel(first(arrays), second(arrays))


def _integers(node: SqlNode, schema: pa.Schema) -> _Operand | None:
    """Return a function for an integer column, a literal, or the remainder of an int64 column."""
    if node.is_literal and _INTEGER.fullmatch(node.text):
        value = pa.scalar(int(node.text), pa.int64())
        return lambda arrays: value
    if _is_integer(_type_of(node, schema)):
        return operator.itemgetter(node.text)
    if node.kind == "binary" and node.text == "%":
        subject, by = node.parts
        if _type_of(subject, schema) == pa.int64() and by.is_literal and by.text.isdigit():
            divisor, name = int(by.text), subject.text
            if 0 < divisor < 1 << 31:
                return lambda arrays: _remainder(arrays[name], divisor)
    return None


def _remainder(array: pa.Array, divisor: int) -> pa.Array:
    values = values_of(array)
    rest = np.fmod(values.data, divisor)  # with the sign of the value, as in SQL
    return pa.array(rest, mask=None if values.valid is None else ~values.valid)
