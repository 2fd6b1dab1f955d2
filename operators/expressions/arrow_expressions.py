"""Plain expressions, computed by Arrow and numpy: a plan of Polars for each batch takes much longer.

Only what surely has the same result in both is computed here: comparisons, and `+`, `-`, `*` of columns of
type int64 and float64. Polars orders NaN above all numbers, and Arrow follows IEEE; so a float is compared
with a literal only.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from ...state.values import Array, Values, values_of
from ..lazy_modules import pc
from .sql.tree import SqlNode

Arrays: TypeAlias = Mapping[str, pa.Array]
Condition: TypeAlias = Callable[[Arrays], pa.BooleanArray]
Computation: TypeAlias = Callable[[Arrays], pa.Array]
_Operand: TypeAlias = Callable[[Arrays], Any]

_KERNELS: Final = {  # Arrow loads its functions when the first one is asked for
    "=": "equal",
    "<>": "not_equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
_EQUALITY: Final = ("=", "<>", "!=")
_MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_ARITHMETIC: Final = {"+": np.add, "-": np.subtract, "*": np.multiply}
_INTEGER: Final = re.compile(r"-?\d{1,18}")
_DECIMAL: Final = re.compile(r"-?\d{1,15}\.\d{1,15}")
_TEXT: Final = re.compile(r"'([^']*)'")


class _Number(NamedTuple):
    """A computation of numbers of type int64 or float64; `literal` is the value of a literal."""

    type: pa.DataType
    values: Callable[[Arrays], Values]
    literal: int | float | None = None


# -- conditions ---------------------------------------------------------------------------------------


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
    if node.kind == "column" and pa.types.is_boolean(_type_of(node, schema)):
        return operator.itemgetter(node.text)
    made = _CONDITIONS.get(node.kind)
    return None if made is None else made(node, schema)


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
    if not (plain or type_ == pa.float64()) or node.text not in ("IS NULL", "IS NOT NULL"):
        return None
    kernel = pc.is_null if node.text == "IS NULL" else pc.is_valid
    return lambda arrays: kernel(arrays[name])


def _binary(node: SqlNode, schema: pa.Schema) -> Condition | None:
    left, right = node.parts
    return _comparison(node.text, left, right, schema)


def _comparison(sign: str, left: SqlNode, right: SqlNode, schema: pa.Schema) -> Condition | None:
    if sign not in _KERNELS or (left.is_literal and right.is_literal):
        return None
    kernel = getattr(pc, _KERNELS[sign])
    if pa.types.is_string(_type_of(left, schema)) and sign in _EQUALITY:
        name, text = left.text, _TEXT.fullmatch(right.text) if right.is_literal else None
        if text is None:
            return None
        wanted = pa.scalar(text[1], pa.string())
        return lambda arrays: kernel(arrays[name], wanted)
    first, second = _integers(left, schema), _integers(right, schema)
    if first is not None and second is not None:
        return lambda arrays: kernel(first(arrays), second(arrays))
    if left.is_literal:
        sign, left, right = _MIRRORED.get(sign, sign), right, left
    return _compared_with_literal(sign, left, right, schema)


def _compared_with_literal(
    sign: str, left: SqlNode, right: SqlNode, schema: pa.Schema
) -> Condition | None:
    number, literal = _number(left, schema), _number(right, schema)
    if number is None or literal is None or literal.literal is None or not _fit(number, literal):
        return None
    common = pa.int64() if pa.int64() == number.type == literal.type else pa.float64()
    value = literal.literal if common == pa.int64() else float(literal.literal)
    wanted = pa.scalar(value, common)
    kernel = getattr(pc, _KERNELS[sign])

    def operand(arrays: Arrays) -> pa.Array:
        given = arrays[left.text] if left.kind == "column" else _array(number.values(arrays))
        return given if given.type == common else given.cast(common, safe=False)

    # NaN is greater than any literal: it is not less and not equal, which Arrow says as well.
    opposite = {">": pc.less_equal, ">=": pc.less}.get(sign)
    if common == pa.float64() and opposite is not None:
        return lambda arrays: pc.invert(opposite(operand(arrays), wanted))
    return lambda arrays: kernel(operand(arrays), wanted)


def _between(node: SqlNode, schema: pa.Schema) -> Condition | None:
    subject, low, high = node.parts
    if not (low.is_literal and high.is_literal):
        return None
    above = _comparison(">=", subject, low, schema)
    below = _comparison("<=", subject, high, schema)
    if above is None or below is None:
        return None
    if node.text == "BETWEEN":
        return lambda arrays: pc.and_kleene(above(arrays), below(arrays))
    return lambda arrays: pc.invert(pc.and_kleene(above(arrays), below(arrays)))


def _in(node: SqlNode, schema: pa.Schema) -> Condition | None:
    subject, *values = node.parts
    type_, name = _type_of(subject, schema), subject.text
    is_text = bool(pa.types.is_string(type_))
    if not (is_text or _is_integer(type_)):
        return None
    form = _TEXT if is_text else _INTEGER
    matches = [form.fullmatch(each.text) for each in values if each.is_literal]
    found = [match for match in matches if match is not None]
    if len(found) < len(values):
        return None
    common = pa.string() if is_text else pa.int64()
    wanted = pa.array([match[1] if is_text else int(match[0]) for match in found], common)

    def condition(arrays: Arrays) -> pa.BooleanArray:
        array = arrays[name].cast(common)
        answer = pc.is_in(array, wanted)
        if array.null_count:  # Arrow says False of null, and SQL null
            answer = pc.if_else(pc.is_valid(array), answer, None)
        return pc.invert(answer) if node.text == "NOT IN" else answer

    return condition


_CONDITIONS: Final = {"is": _null_check, "binary": _binary, "between": _between, "in": _in}


def _integers(node: SqlNode, schema: pa.Schema) -> _Operand | None:
    """Return a function for an integer column, a literal, or the remainder of an int64 column."""
    if node.is_literal and _INTEGER.fullmatch(node.text):
        value = pa.scalar(int(node.text), pa.int64())
        return lambda arrays: value
    if _is_integer(_type_of(node, schema)):
        return operator.itemgetter(node.text)
    if node.kind == "binary" and node.text == "%":
        number = _number(node, schema)
        if number is not None:
            return lambda arrays: _array(number.values(arrays))
    return None


# -- numbers ------------------------------------------------------------------------------------------


def arrow_number(node: SqlNode, schema: pa.Schema, type_: pa.DataType) -> Computation | None:
    """Return a function that computes numbers of a type from columns; None if they are left to Polars."""
    number = _number(node, schema)
    if number is None or number.literal is not None or number.type != type_:
        return None

    return lambda arrays: _array(number.values(arrays))


def _number(node: SqlNode, schema: pa.Schema) -> _Number | None:
    """Return the computation of int64 or float64 numbers; None if the node is none."""
    if node.is_literal:
        return _literal(node.text)
    type_ = _type_of(node, schema)
    if type_ in (pa.int64(), pa.float64()):
        name = node.text
        return _Number(type_, lambda arrays: values_of(arrays[name]))
    if node.kind != "binary":
        return None
    left, right = node.parts
    if node.text == "%":
        return _remainder(left, right, schema)
    return _arithmetic(node.text, left, right, schema)


def _fit(one: _Number, other: _Number) -> bool:
    """Return False for two literals, and for an integer with 0.5: that makes a decimal number."""
    if one.literal is not None and other.literal is not None:
        return False
    literal, number = (other, one) if one.literal is None else (one, other)
    return not (isinstance(literal.literal, float) and number.type == pa.int64())


def _literal(text: str) -> _Number | None:
    value: int | float
    if _INTEGER.fullmatch(text):
        type_, value = pa.int64(), int(text)
    elif _DECIMAL.fullmatch(text):
        type_, value = pa.float64(), float(text)
    else:
        return None
    constant = Values(np.asarray(value), None)
    return _Number(type_, lambda arrays: constant, value)


def _remainder(subject: SqlNode, by: SqlNode, schema: pa.Schema) -> _Number | None:
    if _type_of(subject, schema) != pa.int64() or not (by.is_literal and by.text.isdigit()):
        return None
    divisor, name = int(by.text), subject.text
    if not 0 < divisor < 1 << 31:
        return None

    def values(arrays: Arrays) -> Values:
        given = values_of(arrays[name])
        return Values(np.fmod(given.data, divisor), given.valid)  # with the sign of the value

    return _Number(pa.int64(), values)


def _arithmetic(sign: str, left: SqlNode, right: SqlNode, schema: pa.Schema) -> _Number | None:
    kernel, first, second = _ARITHMETIC.get(sign), _number(left, schema), _number(right, schema)
    if kernel is None or first is None or second is None or not _fit(first, second):
        return None
    whole = pa.int64() == first.type == second.type

    def values(arrays: Arrays) -> Values:
        # Integers wrap around and floats become infinite, as in Polars.
        one, other = first.values(arrays), second.values(arrays)
        valid = _both(one.valid, other.valid)
        if whole:
            return Values(kernel(one.data, other.data), valid)
        with np.errstate(all="ignore"):
            return Values(kernel(_floats(one.data), _floats(other.data)), valid)

    return _Number(pa.int64() if whole else pa.float64(), values)


def _floats(data: Array) -> Array:
    return data.astype(np.float64, copy=False)


def _both(one: Any, other: Any) -> Any:
    """Return where both are valid; None: everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _array(values: Values) -> pa.Array:
    return pa.array(values.data, mask=None if values.valid is None else ~values.valid)
