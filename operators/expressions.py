"""Expressions on columns: SQL text or `pl.Expr`, read and checked once, when the job is planned.

An expression here speaks of one record. Polars would take `sum(a) > 3` or `shift` as well, and compute
them per batch: a silent lie, since batches are cut by chance. They are refused (`row_probe.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import polars as pl
import pyarrow as pa

from ..errors import PlanError
from .row_probe import across_rows
from .schema import unknown_column

ExpressionLike: TypeAlias = str | pl.Expr

_STRING = re.compile(r"'(?:[^']|'')*'")
_CLOCK = re.compile(
    r"\b(now|current_timestamp|current_date|current_time|localtimestamp|localtime)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Column:
    """A checked expression: the output column `name`, and how it is made.

    `source` is set if it is an input column as it stands (perhaps renamed): then nothing is computed.
    """

    name: str
    expression: pl.Expr
    source: str | None
    reads: frozenset[str]


def polars_schema(schema: pa.Schema) -> dict[str, pl.DataType]:
    """The Polars types of an Arrow schema."""
    frame = cast(pl.DataFrame, pl.from_arrow(schema.empty_table()))
    return dict(frame.schema)


def parse(expression: ExpressionLike, step: str, where: str) -> pl.Expr:
    """The Polars expression of SQL text; a `pl.Expr` is itself.

    Raises:
        PlanError: not an expression, or one that asks for the time of day.
    """
    if isinstance(expression, pl.Expr):
        return expression
    if not isinstance(expression, str):
        raise PlanError(
            f"not an expression in {step} type=`{type(expression).__name__}`",
            where=where,
            fix="give SQL text such as \"amount > 0\", or a polars expression such as pl.col('amount') > 0",
        )
    if found := _CLOCK.search(_STRING.sub("''", expression)):
        raise PlanError(
            f"`{found[0]}` in {step} would be fixed when the job is planned",
            where=where,
            fix="use the record's own time; for the time of processing use map or map_batches",
        )
    try:
        return pl.sql_expr(expression)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise PlanError(
            f"cannot read the expression `{expression}` in {step}: {reason}",
            where=where,
            fix='a column whose name is an SQL word stands in double quotes: "user" IS NOT NULL',
        ) from error


def check_filter(
    predicate: ExpressionLike, schema: pa.Schema, step: str = "filter", where: str = ""
) -> Column:
    """Parse and check a filter's condition against the stream's schema."""
    expression = parse(predicate, step, where)
    text = show(predicate)
    columns = _resolve(expression, text, schema, step, where)
    (kind,) = columns.values() if len(columns) == 1 else (None,)
    if kind != pl.Boolean:
        raise PlanError(f"`{text}` in {step} is not a condition: its type is {kind}", where=where)
    _refuse_across_rows(expression, text, schema, step, where)
    return Column("", expression, None, columns_used(expression, schema))


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


def _select_item(given: ExpressionLike, schema: pa.Schema, step: str, where: str) -> list[Column]:
    if isinstance(given, str) and given.strip() == "*":
        return [_as_it_stands(name) for name in schema.names]
    if isinstance(given, str) and given in schema.names:
        return [_as_it_stands(given)]
    expression = parse(given, step, where)
    text = show(given)
    types = _resolve(expression, text, schema, step, where)
    if expression.meta.is_column_selection():
        return [_as_it_stands(name) for name in types]
    bare = expression.meta.undo_aliases()
    renamed = not bare.meta.eq(expression)
    if renamed and bare.meta.is_column():
        return [
            Column(
                next(iter(types)), expression, bare.meta.output_name(), columns_used(bare, schema)
            )
        ]
    if isinstance(given, str) and not renamed:
        raise PlanError(
            f"`{text}` in {step} has no name",
            where=where,
            fix=f'write "{text} AS name" with a name',
        )
    _refuse_across_rows(expression, text, schema, step, where)
    if len(types) > 1:
        raise PlanError(
            f"`{text}` in {step} makes {len(types)} columns: {', '.join(types)}",
            where=where,
            fix="write one expression for each column",
        )
    return [Column(next(iter(types)), expression, None, columns_used(expression, schema))]


def _as_it_stands(name: str) -> Column:
    return Column(name, pl.col(name), name, frozenset([name]))


def columns_used(expression: pl.Expr, schema: pa.Schema) -> frozenset[str]:
    """The input columns that an expression reads."""
    names = frozenset(expression.meta.root_names())
    # Selectors and patterns name no columns by themselves: then all may be read.
    return names if names and names <= set(schema.names) else _selected(expression, schema, names)


def _selected(expression: pl.Expr, schema: pa.Schema, names: frozenset[str]) -> frozenset[str]:
    if not names and not expression.meta.has_multiple_outputs():
        return frozenset()
    return frozenset(schema.names)


def show(expression: ExpressionLike) -> str:
    """The expression as text for messages and `explain`."""
    return " ".join(expression.split()) if isinstance(expression, str) else str(expression)


def arrow_type(kind: pl.DataType) -> pa.DataType:
    """The Arrow type that a computed column gets: plain strings, binaries and lists, not large ones."""
    return plain_type(pl.Series([], dtype=kind).to_arrow().type)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The common form of a type, of those Arrow has several of."""
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
    """The Arrow type of a checked column over a stream of `schema`."""
    if column.source is not None:
        return schema.field(column.source).type
    frame = pl.LazyFrame(schema=polars_schema(schema)).select(column.expression)
    return arrow_type(next(iter(frame.collect_schema().values())))


def _resolve(
    expression: pl.Expr, text: str, schema: pa.Schema, step: str, where: str
) -> dict[str, pl.DataType]:
    """Names and types of what the expression makes; errors tell the user's own names."""
    for name in expression.meta.root_names():
        if name not in schema.names and not name.startswith("^"):
            raise unknown_column(name, schema, step, where)
    try:
        # Evaluated without rows: some wrong types, such as text > 3, only show there.
        return dict(pl.DataFrame(schema=polars_schema(schema)).select(expression).schema)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise PlanError(
            f"`{text}` in {step} does not fit the stream: {reason}", where=where
        ) from error


def _refuse_across_rows(
    expression: pl.Expr, text: str, schema: pa.Schema, step: str, where: str
) -> None:
    if reason := across_rows(expression, schema):
        raise PlanError(
            f"`{text}` in {step} looks at more than one record: {reason}",
            where=where,
            fix="batches are cut by chance; to combine records use key_by(...).window(...).agg(...)",
        )
