"""Tests whether an expression is about one record only, on twelve rows, as a whole and one by one.

Polars' own flags are not reliable: they call `a > avg(a) over (partition by b)` separable. So the
answer comes from evaluation; the expression's tree and the flags are a second opinion, for
dependencies that only other data would show.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from ..lazy_modules import pl

ROWS: Final = 12
TOLERANCE: Final = 1e-12
"""Floats may differ in the last bit between a batch and a row: Polars divides by reciprocals."""

_ACROSS: Final = {
    "Agg": "it aggregates",
    "Over": "it is a window function",
    "Window": "it is a window function",
    "Rolling": "it is a window function",
    "Len": "it counts rows",
    "Sort": "it sorts",
    "SortBy": "it sorts",
    "Filter": "it filters rows",
    "Slice": "it takes a slice of rows",
    "Gather": "it picks other rows",
    "Explode": "it makes several rows",
}
# Strings that let casts and parsers of user expressions succeed: one profile each.
_TEXTS: Final[tuple[tuple[str, ...], ...]] = (
    ("b", "a", "c", "a", "", "Zz", "b", "x-1", "a", "c,d", "q"),
    ("7", "3", "11", "3", "0", "42", "7", "5", "3", "9", "1"),
    ("2024-05-01", "2023-01-31", "2024-05-01", "2020-02-29", "1999-12-31", "2024-05-02") * 2,
    ("2024-05-01 10:00:00", "2023-01-31 00:00:01", "2024-05-01 10:00:00", "2020-02-29 23:59:59")
    * 3,
    ('{"a":1}', '{"a":2}', '{"a":1}', '{"a":3}') * 3,
)
_NUMBERS: Final = (5, 2, 9, 2, 7, 1, 5, 3, 2, 8, 4)
_START = datetime(2024, 3, 5, 17, 20, 11, tzinfo=UTC)


def across_rows(expression: pl.Expr, schema: pa.Schema) -> str:
    """Return why the expression is not about one record; empty if it is."""
    reasons = [_probe(expression, sample) for sample in _samples(schema)]
    judged = [reason for reason in reasons if reason is not None]
    if worst := next((reason for reason in judged if reason), ""):
        return _tree(expression) or worst
    return _tree(expression) or _flags(expression, judged=bool(judged))


def _probe(expression: pl.Expr, sample: pl.DataFrame) -> str | None:
    """Compare an evaluation of the whole sample with its rows; None if it cannot be evaluated."""
    try:
        whole = sample.select(expression)
    except Exception:
        return None
    if not expression.meta.root_names() and whole.height == 1:
        pass  # a constant, or a count of rows: the comparison tells
    elif whole.height != sample.height:
        return f"it makes {whole.height} values of {sample.height} records"
    try:
        single = [sample.slice(index, 1).select(expression) for index in range(sample.height)]
    except Exception:
        return "it works on several records, but not on one"
    if any(piece.height != 1 for piece in single):
        return "it makes more or less than one value of a record"
    expected = whole.rows() if whole.height == sample.height else whole.rows() * sample.height
    for left, right in zip(expected, (piece.row(0) for piece in single), strict=True):
        if not _equal(left, right):
            return "its value for a record depends on the other records"
    return ""


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) and math.isnan(right)
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    return bool(left == right)


def _tree(expression: pl.Expr) -> str:
    """Return a reason from the expression's own structure; inside list.eval, rows are list elements."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = json.loads(expression.meta.serialize(format="json"))
    except Exception:
        return ""  # e.g. a Python function inside: the evaluation decides
    todo: list[Any] = [tree]
    while todo:
        node = todo.pop()
        if node == "Len":
            return _ACROSS["Len"]
        if isinstance(node, list):
            todo.extend(node)
        elif isinstance(node, dict):
            for kind, content in node.items():
                if kind in _ACROSS and isinstance(content, dict):
                    return _ACROSS[kind]
                if kind == "Eval":
                    todo.append(content.get("expr"))
                elif kind != "Literal":
                    todo.append(content)
    return ""


def _flags(expression: pl.Expr, *, judged: bool) -> str:
    """Return Polars' opinion, if it has one. If nothing could be evaluated, it is the only one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            separable = expression.meta.is_row_separable()
    except Exception:
        return ""
    if separable:
        return ""
    return "Polars says it is not row by row" if not judged else ""


def _samples(schema: pa.Schema) -> list[pl.DataFrame]:
    """Return unsorted rows with repeats and nulls; several samples of different looks if there is text."""
    has_text = any(_is_text(kind) for kind in schema.types)
    profiles = _TEXTS if has_text else _TEXTS[:1]
    return [
        pl.DataFrame(
            [
                pl.Series(field.name, pl.from_arrow(_column(field.type, shift, texts)))
                for shift, field in enumerate(schema)
            ]
        )
        for texts in profiles
    ]


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _column(kind: pa.DataType, shift: int, texts: tuple[str, ...]) -> pa.Array:
    """Return twelve values of a type, one of them null, rotated by `shift` so that columns differ."""
    make = _maker(kind, texts)
    values: list[Any] = [make(index) for index in range(ROWS - 1)]
    values.insert(4, None)
    turn = shift % ROWS
    return pa.array(values[turn:] + values[:turn], kind)


def _maker(kind: pa.DataType, texts: tuple[str, ...]) -> Callable[[int], Any]:
    number = _NUMBERS.__getitem__
    if _is_text(kind):
        return lambda i: texts[i]
    if pa.types.is_boolean(kind):
        return lambda i: number(i) % 3 == 0
    if pa.types.is_floating(kind):
        return lambda i: number(i) * 1.37 - 4
    if pa.types.is_decimal(kind):
        return lambda i: Decimal(number(i) % 10).scaleb(-kind.scale)
    if pa.types.is_timestamp(kind):
        return lambda i: _START + timedelta(hours=37 * number(i))
    if pa.types.is_date(kind):
        return lambda i: date(2024, 3, 5) + timedelta(days=11 * number(i))
    if pa.types.is_time(kind):
        return lambda i: time(number(i), 30)
    if pa.types.is_duration(kind):
        return lambda i: timedelta(minutes=number(i))
    if pa.types.is_dictionary(kind):
        return _maker(kind.value_type, texts)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _maker(kind.value_type, texts)
        return lambda i: [inner(j % (ROWS - 1)) for j in range(i, i + i % 3)]
    if pa.types.is_struct(kind):
        fields = {field.name: _maker(field.type, texts) for field in kind}
        return lambda i: {name: maker(i) for name, maker in fields.items()}
    if pa.types.is_null(kind):
        return lambda i: None
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return lambda i: texts[i].encode()
    return number
