"""Expressions on columns: SQL text or `pl.Expr`, parsed and checked once, when the job is planned.

An expression is about one record. Polars would accept `sum(a) > 3` or `shift` as well, and compute
them per batch, which gives wrong results, since batch boundaries are arbitrary. They are refused
(`row_probe.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import pyarrow as pa

from ...errors import PlanError
from ..lazy_modules import is_expression, pl
from ..schema import unknown_column
from .row_probe import across_rows
from .sql.functions import ACROSS_FIX, AcrossError, ClockError
from .sql.parser import read_sql
from .sql.tokens import SqlError, quoted
from .sql.tree import DEPTH_MAX, OPERATIONS_MAX, SIMPLER, Reading, SqlNode, columns_of
from .sql.types import Types, polars_types
from .sql.writer import write_sql

ExpressionLike: TypeAlias = "str | pl.Expr"

SHOWN_MAX: Final = 400
"""The most characters of an expression one_line in messages and `explain`."""
_WHEN: Final = ".when("
"""The beginning of Polars' text of a conditional expression."""
_SMALLER: Final = (
    "put conditions of one kind into one operation, pl.all_horizontal([...]), pl.any_horizontal([...]) or "
    f".is_in([...]), or {SIMPLER}"
)


class Column(msgspec.Struct, frozen=True):
    """A checked expression: the output column `name`, and its computation.

    `source` is set if it is an input column unchanged, perhaps renamed: then nothing is computed. `tree`
    is that of SQL text; None for an expression of Polars.
    """

    name: str
    expression: pl.Expr
    source: str | None
    reads: frozenset[str]
    tree: SqlNode | None = None


def _read(text: str, step: str, where: str) -> Reading:
    """Parse SQL text into a tree.

    Raises:
        PlanError: not an expression about one record, too large, or one that reads the current
            time.
    """
    try:
        return read_sql(text)
    except SqlError as error:
        raise _refusal(error, text, step, where) from None


def _polars(node: SqlNode, text: str, schema: pa.Schema, step: str, where: str) -> pl.Expr:
    """Return the Polars expression of a tree over records of `schema`."""
    for name in sorted(columns_of(node) - set(schema.names)):
        raise _not_a_column(name, text, schema, step, where)
    try:
        return pl.sql_expr(write_sql(node, Types(schema)))
    except SqlError as error:
        raise _refusal(error, text, step, where) from None
    except Exception as error:
        raise PlanError(
            f"cannot read the expression `{one_line(text)}` in {step}: {_reason(error)}",
            where=where,
        ) from error


def _refusal(error: SqlError, text: str, step: str, where: str) -> PlanError:
    text = one_line(text)
    if isinstance(error, ClockError):
        return PlanError(
            f"`{error.message}` in {step} would be fixed when the job is planned",
            where=where,
            fix="use the record's own time; for the time of processing use map or map_batches",
        )
    if isinstance(error, AcrossError):
        return _across(error.message, text, step, where)
    message = f"cannot read the expression `{text}` in {step}: {error.message}"
    return PlanError(message, where=where, fix=error.fix)


def _not_a_column(name: str, text: str, schema: pa.Schema, step: str, where: str) -> PlanError:
    error = unknown_column(name, schema, step, where)
    if quoted(name) in text:
        error.fix = f"text is written in single quotes: '{name}'; {error.fix}"
    return error


def _expression(
    given: ExpressionLike, schema: pa.Schema, step: str, where: str
) -> tuple[pl.Expr, str | None]:
    """Return the Polars expression for a user's value, and its name if SQL text gives one."""
    if is_expression(given):
        if reason := _too_large(given):
            raise PlanError(
                f"an expression in {step} is too large: {reason}", where=where, fix=_SMALLER
            )
        return given, None
    if not isinstance(given, str):
        raise PlanError(
            f"not an expression in {step} type=`{type(given).__name__}`",
            where=where,
            fix="give SQL text such as \"amount > 0\", or a polars expression such as pl.col('amount') > 0",
        )
    reading = _read(given, step, where)
    return _polars(reading.node, given, schema, step, where), reading.alias


def check_filter(
    predicate: ExpressionLike, schema: pa.Schema, step: str = "filter", where: str = ""
) -> Column:
    """Parse and check a filter's condition against the stream's schema."""
    expression, _ = _expression(predicate, schema, step, where)
    text = show(predicate)
    columns = _resolve(expression, text, schema, step, where)
    (kind,) = columns.values() if len(columns) == 1 else (None,)
    if kind != pl.Boolean:
        raise PlanError(f"`{text}` in {step} is not a condition: its type is {kind}", where=where)
    if not isinstance(predicate, str):
        _refuse_across_rows(expression, text, schema, step, where)
    tree = _read(predicate, step, where).node if isinstance(predicate, str) else None
    return Column("", expression, None, columns_used(expression, schema), tree)


def check_select(
    expressions: Sequence[ExpressionLike], schema: pa.Schema, step: str = "select", where: str = ""
) -> list[Column]:
    """Parse and check the expressions of a select; `*` stands for all columns."""
    columns: list[Column] = []
    for given in expressions:
        columns += _select_item(given, schema, step, where)
    if not columns:
        raise PlanError(f"{step} needs at least one column", where=where)
    seen: set[str] = set()
    for column in columns:
        if column.name in seen:
            raise PlanError(
                f"column `{column.name}` is made twice in {step}",
                where=where,
                fix="give one of them another name with AS",
            )
        seen.add(column.name)
    return columns


def check_value(
    given: str, name: str, schema: pa.Schema, step: str, where: str = "", alias_fix: str = ""
) -> Column:
    """Parse and check SQL text whose result is named `name`; the text itself must give no name.

    Args:
        alias_fix: the advice for a text that ends with `AS` and a name.
    """
    reading = _read(given, step, where)
    if reading.alias is not None:
        raise PlanError(f"`{show(given)}` in {step} has a name", where=where, fix=alias_fix)
    return _text_column(reading.node, given, name, schema, step, where)


def _select_item(given: ExpressionLike, schema: pa.Schema, step: str, where: str) -> list[Column]:
    if isinstance(given, str) and given.strip() == "*":
        return [_as_it_stands(name) for name in schema.names]
    if isinstance(given, str) and given in schema.names:
        return [_as_it_stands(given)]
    if isinstance(given, str):
        return [_select_text(given, schema, step, where)]
    expression, _ = _expression(given, schema, step, where)
    text = show(given)
    types = _resolve(expression, text, schema, step, where)
    if expression.meta.is_column_selection():
        return [_as_it_stands(name) for name in types]
    bare = expression.meta.undo_aliases()
    if not bare.meta.eq(expression) and bare.meta.is_column():
        source = bare.meta.output_name()
        return [Column(next(iter(types)), expression, source, columns_used(bare, schema))]
    _refuse_across_rows(expression, text, schema, step, where)
    if len(types) > 1:
        raise PlanError(
            f"`{text}` in {step} makes {len(types)} columns: {', '.join(types)}",
            where=where,
            fix="write one expression for each column",
        )
    return [Column(next(iter(types)), expression, None, columns_used(expression, schema))]


def _select_text(given: str, schema: pa.Schema, step: str, where: str) -> Column:
    reading = _read(given, step, where)
    node = reading.node
    name = reading.alias or (node.text if node.kind == "column" else None)
    if name is None:
        _polars(node, given, schema, step, where)  # report a mistake in the text first
        text = show(given)
        raise PlanError(
            f"`{text}` in {step} has no name",
            where=where,
            fix=f'write "{text} AS name" with a name',
        )
    return _text_column(node, given, name, schema, step, where)


def _text_column(
    node: SqlNode, given: str, name: str, schema: pa.Schema, step: str, where: str
) -> Column:
    """Return the output column `name` of an expression that was parsed from `given`."""
    made = _polars(node, given, schema, step, where)
    if node.kind == "column":
        return Column(name, made.alias(name), node.text, frozenset([node.text]))
    expression = made.alias(name)
    _resolve(expression, show(given), schema, step, where)
    return Column(name, expression, None, columns_used(expression, schema), node)


def _as_it_stands(name: str) -> Column:
    return Column(name, pl.col(name), name, frozenset([name]))


def columns_used(expression: pl.Expr, schema: pa.Schema) -> frozenset[str]:
    """Return the input columns that an expression reads."""
    names = frozenset(expression.meta.root_names())
    # Selectors and patterns name no columns themselves; then all may be read.
    return names if names and names <= set(schema.names) else _selected(expression, schema, names)


def _selected(expression: pl.Expr, schema: pa.Schema, names: frozenset[str]) -> frozenset[str]:
    if not names and not expression.meta.has_multiple_outputs():
        return frozenset()
    return frozenset(schema.names)


def _too_large(expression: pl.Expr) -> str:
    """Return why an expression is too large for Polars; empty if it is not.

    Polars walks expressions by recursion: a chain of many thousand operations overflows its stack,
    which kills the process without a message. This visits one operation after the other, and stops
    at the limits that SQL texts have, too.
    """
    operations = 0
    waiting = [(expression, 1)]
    while waiting:
        one, depth = waiting.pop()
        parts = one.meta.pop()
        if not parts:
            continue  # a column or a literal, which may be a list
        operations += 1
        if depth > DEPTH_MAX:
            return f"more than {DEPTH_MAX} operations depend on each other"
        if operations > OPERATIONS_MAX:
            return f"it has more than {OPERATIONS_MAX:,} operations"
        waiting += [(part, depth + 1) for part in parts]
    return ""


def show(expression: ExpressionLike) -> str:
    """Return the expression as text for messages and `explain`; a long one is cut."""
    if isinstance(expression, str):
        return one_line(expression)
    return (
        "an expression that is too large" if _too_large(expression) else one_line(str(expression))
    )


def one_line(text: str) -> str:
    """Return a user's text in one line of at most `SHOWN_MAX` characters."""
    line = " ".join(text[: 4 * SHOWN_MAX].split())
    return (
        line if len(text) <= 4 * SHOWN_MAX and len(line) <= SHOWN_MAX else f"{line[:SHOWN_MAX]} …"
    )


def arrow_type(kind: pl.DataType) -> pa.DataType:
    """Return the Arrow type of a computed column: plain strings, binaries and lists, not large ones."""
    return plain_type(pl.Series([], dtype=kind).to_arrow().type)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the common form of a type that Arrow has several variants of."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_large_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in kind])
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    return kind


def result_type(column: Column, schema: pa.Schema) -> pa.DataType:
    """Return the Arrow type of a checked column over a stream of `schema`."""
    if column.source is not None:
        return schema.field(column.source).type
    frame = pl.LazyFrame(schema=polars_types(schema)).select(column.expression)
    return arrow_type(next(iter(frame.collect_schema().values())))


def _resolve(
    expression: pl.Expr, text: str, schema: pa.Schema, step: str, where: str
) -> dict[str, pl.DataType]:
    """Return names and types of the expression's result; errors use the user's own names."""
    for name in expression.meta.root_names():
        if name not in schema.names and not name.startswith("^"):
            raise unknown_column(name, schema, step, where)
    empty = pl.DataFrame(schema=polars_types(schema))
    try:
        # Evaluated without rows: some wrong types, such as text > 3, only show then.
        types = dict(empty.select(expression).schema)
        _evaluate_alone(_branches(expression), empty)
    except (Exception, pl.exceptions.PanicException) as error:
        raise PlanError(
            f"`{text}` in {step} does not fit the stream: {_reason(error)}", where=where
        ) from error
    for kind in types.values():
        _check_type(kind, text, step, where)
    return types


def _check_type(kind: pl.DataType, text: str, step: str, where: str) -> None:
    """Refuse a type that Arrow does not have, such as the 128 bits of `uint64 + int64`."""
    try:
        arrow_type(kind)
    except pa.ArrowException as error:
        raise PlanError(
            f"`{text}` in {step} has the type {kind}, which a stream cannot have",
            where=where,
            fix="CAST an operand, such as CAST(n AS BIGINT)",
        ) from error


def _evaluate_alone(expressions: list[pl.Expr], frame: pl.DataFrame) -> None:
    """Evaluate each of the expressions on its own, those that make one column together."""
    single = [each for each in expressions if not each.meta.has_multiple_outputs()]
    frame.select(each.alias(str(number)) for number, each in enumerate(single))
    for each in expressions:
        if each.meta.has_multiple_outputs():
            frame.select(each)


def _branches(expression: pl.Expr) -> list[pl.Expr]:
    """Return every condition and result of the CASEs in an expression, to be evaluated separately.

    Polars evaluates only the branches that some row of a batch takes, and without rows not all of
    them. A branch with wrong types would otherwise fail for some batches only.
    """
    found: list[pl.Expr] = []
    if _WHEN not in str(expression):
        return found
    waiting = [expression]
    while waiting:
        one = waiting.pop()
        parts = one.meta.pop()
        waiting += parts
        if len(parts) == 3 and _is_case(one):
            condition, *results = parts
            found.append(pl.when(condition).then(1))  # refuses conditions that are not boolean
            found += [result for result in results if not _is_case(result)]
    return [each for each in found if not _depends_on_place(each)]


def _is_case(expression: pl.Expr) -> bool:
    return str(expression).startswith(_WHEN)


def _depends_on_place(expression: pl.Expr) -> bool:
    """Return True for elements of a list and fields of a struct, which have no value on their own."""
    text = str(expression)
    return "element()" in text or "pl.field(" in text


def _reason(error: Exception) -> str:
    return one_line(str(error).partition("\n")[0])


def _refuse_across_rows(
    expression: pl.Expr, text: str, schema: pa.Schema, step: str, where: str
) -> None:
    if reason := across_rows(expression, schema):
        raise _across(reason, text, step, where)


def _across(reason: str, text: str, step: str, where: str) -> PlanError:
    return PlanError(
        f"`{text}` in {step} looks at more than one record: {reason}", where=where, fix=ACROSS_FIX
    )
