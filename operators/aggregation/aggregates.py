"""Descriptions of aggregates: `hg.count()`, `hg.sum("amount * 2")`, or their text in a manifest.

The input of an aggregate is a column of the records, or an expression over them. An expression is
computed where the values of a batch are read for the aggregates (`AggregatePlan.computed`), and is
named by its text: equal ones share it, and no record has an extra column, whether it is late,
emitted or stored.

Nulls are skipped as in SQL. Result types: counts int64; sum int64 of integers, float64 of floats,
the widest decimal of decimals; min and max as the column; avg, variance and stddev float64; first,
last, min_by and max_by as the column; collect, top_n and bottom_n lists of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from ...errors import DataError, PlanError, StateError
from ...state.aggregates.state import (
    BY_COLUMN,
    BY_TIME,
    COUNTS,
    MOMENTS,
    PARAMETERS,
    TOP,
    AggregateSpec,
    AggregateState,
)
from ...state.evolution import AGGREGATE, LAST_USED_COLUMN, LAST_USED_TYPE, with_meaning
from ...state.hashing import check_key_type
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import stored_key_type
from ...state.snapshot import KEY_GROUP_COLUMN
from ...state.values import EVENT_TIME, NOW, PARTIAL_ROWS
from ..elements import ColumnBatch
from ..expressions.expression_steps import ExpressionSteps, SelectStep, columns_read
from ..expressions.expressions import Column, check_value, one_line, result_type, show
from ..expressions.sql.tokens import SqlError, arguments, canonical
from ..schema import unknown_column
from ..suggestions import suggest

_PLAIN_NAME = re.compile(r"[^\W\d]\w*")
_WORDS = re.compile(r"[\w\s]+")


def check_texts(texts: Iterable[object], kind: str, where: str = "") -> None:
    """Raise PlanError if one of the inputs of an aggregate of `kind` is no text."""
    for text in texts:
        if not isinstance(text, str):
            raise PlanError(
                f"{kind} takes the name of a column or SQL text, got `{type(text).__name__}`",
                where=where,
                fix=f'such as hg.{kind}("amount * 2"); make a polars expression a column first: '
                '.select("*", expression.alias("x"))',
            )


def computed_input(text: str, kind: str, written: str, schema: pa.Schema, where: str) -> Column:
    """Return the column that computes the input `text` of an aggregate of `kind`, under that name.

    Args:
        text: SQL text; it is no column of `schema`.
        written: the whole aggregate, for errors about names.

    Raises:
        PlanError: the name of a column that does not exist, or no expression that fits.
    """
    if _PLAIN_NAME.fullmatch(text):
        raise unknown_column(text, schema, written, where)
    fix = f'leave AS out: agg gives the result its name, as in total=hg.{kind}("amount * 2")'
    try:
        column = check_value(text, text, schema, kind, where, fix)
    except PlanError:
        if _WORDS.fullmatch(text) and get_close_matches(text, schema.names, n=1):
            raise unknown_column(text, schema, kind, where) from None  # a misspelt name with spaces
        raise
    if kind == "count" and pa.types.is_boolean(result_type(column, schema)):
        raise PlanError(
            f"`{show(text)}` in count is a condition, and count counts the records where it is true and "
            "where it is false",
            where=where,
            fix=f"to count where it is true, write sum(CASE WHEN {show(text)} THEN 1 ELSE 0 END)",
        )
    return column


def with_computed(schema: pa.Schema, computed: Mapping[str, Column]) -> pa.Schema:
    """Return the schema with a column for each computed input."""
    made = [pa.field(name, result_type(column, schema)) for name, column in computed.items()]
    return pa.schema([*schema, *made])


def meant(text: str | None, schema: pa.Schema) -> str | None:
    """Return a text that is equal for equivalent inputs: the name of a column, or normalised SQL."""
    if text is None or text in schema.names:
        return text
    try:
        form = canonical(text)
    except SqlError:  # the check would have refused it
        return text
    name = form[1:-1].replace('""', '"')
    return name if form[:1] == '"' and name in schema.names else form


KINDS = (
    *sorted(COUNTS),
    "sum",
    "min",
    "max",
    "avg",
    *MOMENTS,
    *sorted(BY_TIME | BY_COLUMN),
    "quantile",
)

_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)
_NAME = re.compile(r"(\w+)|\"([^\"]+)\"|`([^`]+)`")
_NUMBER = re.compile(r"\d[\d.]*(?:e-?\d+)?|\.\d+")
_BY = re.compile(r"by\s*=(.*)", re.DOTALL)
_FIX_BY = "min_by(x, by=y), max_by(x, by=y), top_n(x, 3, by=y), bottom_n(x, 3, by=y) have a `by`"
_NO_COLUMNS: Final = pa.RecordBatch.from_arrays([], names=[])
_FIX = (
    'write count(), count(x), sum(x), min(x), max(x) or avg(x); quote odd names: sum("my column")'
)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One aggregate: `kind` of `column`, or of whole rows (`count()`).

    Attributes:
        column: the name of a column or, if the records have no such column, SQL text about one record.
        number: the parameter, for kinds that have one, such as the `q` of `quantile`.
        by: the column or SQL text to order by, for kinds that have one.
    """

    kind: str
    column: str | None = None
    number: float | None = None
    by: str | None = None

    def __str__(self) -> str:
        if self.column is None:
            return f"{self.kind}()"
        number = "" if self.number is None else f", {self.number!r}"
        by = "" if self.by is None else f", by={_quoted(self.by)}"
        return f"{self.kind}({_quoted(self.column)}{number}{by})"

    def kept(self, schema: pa.Schema) -> str:
        """Return the description of its state over records of `schema`: all but the number, which
        may change."""
        return str(Aggregate(self.kind, meant(self.column, schema), None, meant(self.by, schema)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns it reads, and the SQL texts."""
        return tuple(name for name in (self.column, self.by) if name is not None)

    def computed(self, schema: pa.Schema, where: str = "") -> dict[str, Column]:
        """Return how those of `columns` that are no columns of `schema` are computed.

        Raises:
            PlanError: no such column, or no expression over one record of `schema`.
        """
        check_texts(self.columns, self.kind, where)
        return {
            text: computed_input(text, self.kind, str(self), schema, where)
            for text in self.columns
            if text not in schema.names
        }

    def output_type(self, schema: pa.Schema, where: str = "") -> pa.DataType:
        """Return the type of the result on records of `schema`.

        Raises:
            PlanError: no such column or no expression that fits, or its type has no such aggregate.
        """
        schema = with_computed(schema, self.computed(schema, where))
        try:
            return self.spec(self.column or "", schema).new().type
        except PlanError as error:
            raise PlanError(error.message, where=where, fix=error.fix) from None

    def spec(self, name: str, schema: pa.Schema) -> AggregateSpec:
        """Return the aggregate, named `name`, for the state layer; `schema` has all its columns."""
        by, by_type = self.by, None
        if self.kind in BY_TIME:
            by = EVENT_TIME
        elif by is not None:
            by_type = schema.field(by).type
        type_ = None if self.column is None else schema.field(self.column).type
        return AggregateSpec(self.kind, name, self.column, type_, by, by_type, self.number)


def _quoted(column: str) -> str:
    """Quote the name or SQL text for `parse_aggregate`; text that contains quotes can only be SQL."""
    return column if re.fullmatch(r"\w+", column) or '"' in column else f'"{column}"'


def parse_aggregate(text: str) -> Aggregate:
    """Parse an aggregate written as `sum(amount)`; the inverse of `str`.

    Raises:
        PlanError: not an aggregate.
    """
    call = _CALL.fullmatch(text)
    if call is None:
        raise PlanError(f"not an aggregate text=`{text}`", fix=_FIX)
    kind = call[1].lower()
    if kind not in KINDS:
        raise PlanError(
            f"unknown aggregate `{call[1]}` text=`{text}`", fix=suggest(kind, KINDS, "aggregates")
        )
    try:
        column, *options = arguments(call[2])
    except SqlError as error:
        raise PlanError(f"not an aggregate: {error.message} text=`{text}`", fix=_FIX) from None
    by = _BY.fullmatch(options[-1]) if options else None
    numbers = options[:-1] if by else options
    if len(numbers) > 1 or not all(map(_NUMBER.fullmatch, numbers)) or (options and not column):
        raise PlanError(f"not an aggregate text=`{text}`", fix=_FIX)
    if column in ("", "*") and kind != "count":
        raise PlanError(f"{kind} needs a column text=`{text}`", fix=_FIX)
    return _checked(
        kind,
        None if column in ("", "*") else _unquoted(column),
        numbers[0] if numbers else None,
        _unquoted(by[1].strip()) if by else None,
    )


def _unquoted(text: str) -> str:
    """Return the name of a column without its quotes; any other text unchanged."""
    name = _NAME.fullmatch(text)
    return text if name is None else name[1] or name[2] or name[3]


def _checked(kind: str, column: str | None, number: Any, by: str | None) -> Aggregate:
    """Return an aggregate with the parameters that its kind has, and no others."""
    parameter = PARAMETERS.get(kind)
    if kind in TOP:
        by = by or column
    if (by is None) == (kind in BY_COLUMN):
        what = "needs a column that decides" if by is None else "has no such parameter"
        raise PlanError(f"{kind} {what} parameter=`by`", fix=_FIX_BY)
    if parameter is None:
        if number is not None:
            raise PlanError(f"{kind} has no parameter number=`{number}`", fix="leave it out")
        return Aggregate(kind, column, None, by)
    if number is None:
        number = parameter.default
    if number is None:
        raise PlanError(f"{kind} needs a number column=`{column}`", fix=parameter.fix)
    try:
        value = parameter.type(number)
    except (TypeError, ValueError, OverflowError):  # OverflowError: infinity as a whole number
        value = None
    if value is None or value != float(number) or not parameter.low <= value <= parameter.high:
        raise PlanError(
            f"the number of {kind} is out of range column=`{column}` {parameter.name}=`{number}`",
            fix=parameter.fix,
        )
    return Aggregate(kind, column, value, by)


def count(column: str | None = None) -> Aggregate:
    """Count records; with a column, only those that have a value there."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """Sum a column of numbers; null if it has no value."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """Return the least value of a column; null if it has none."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """Return the greatest value of a column; null if it has none."""
    return Aggregate("max", column)


def avg(column: str) -> Aggregate:
    """Return the mean of a column of numbers, in float64; null if it has no value."""
    return Aggregate("avg", column)


def variance(column: str, *, population: bool = False) -> Aggregate:
    """Return the variance of a column of numbers, in float64.

    By default the sample variance: null if there are fewer than two values. With `population` the
    population variance: null if there is no value. NaN if a value is NaN or infinite.
    """
    return Aggregate("variance_pop" if population else "variance", column)


def stddev(column: str, *, population: bool = False) -> Aggregate:
    """Return the standard deviation: the root of `variance`."""
    return Aggregate("stddev_pop" if population else "stddev", column)


def first(column: str) -> Aggregate:
    """Return the value of the record with the least event time; null if there is no value.

    Among equal times, and in streams without event time, the first to arrive wins. Records without
    a value are skipped.
    """
    return Aggregate("first", column)


def last(column: str) -> Aggregate:
    """Return the value of the record with the greatest event time; null if there is no value.

    Among equal times, and in streams without event time, the last to arrive wins. Records without a
    value are skipped.
    """
    return Aggregate("last", column)


def min_by(column: str, by: str) -> Aggregate:
    """Return the value of `column` where that of `by` is least; null if no record has both.

    `by` is a column of numbers, dates or timestamps. Among records equal in it the first wins, by
    event time and then by arrival.
    """
    return Aggregate("min_by", column, by=by)


def max_by(column: str, by: str) -> Aggregate:
    """Return the value of `column` where that of `by` is greatest; null if no record has both.

    `by` is a column of numbers, dates or timestamps. Among records equal in it the last wins, by
    event time and then by arrival.
    """
    return Aggregate("max_by", column, by=by)


def count_distinct(column: str) -> Aggregate:
    """Count the distinct values of a column exactly, without nulls.

    All NaN are one value. The values of each key are kept in state; if there are many, use
    `approx_count_distinct`.
    """
    return Aggregate("count_distinct", column)


def approx_count_distinct(column: str) -> Aggregate:
    """Estimate the number of distinct values of a column, with a standard error of 2.3 %, without nulls.

    It takes 2 KiB per key, however many values there are.
    """
    return Aggregate("approx_count_distinct", column)


def quantile(column: str, q: float) -> Aggregate:
    """Estimate the quantile `q`, from 0 to 1, of a column of numbers, as float64.

    Of n numbers it estimates the one with floor(q (n - 1)) others before it, with a relative error
    of 1 % while the magnitudes of a key's numbers span a factor of 27,000, of 2 % up to 700
    million, and so on. It takes 4 KiB per key, 8 KiB with negative numbers. Null if there is no
    value.

    Raises:
        PlanError: `q` is not from 0 to 1.
    """
    return _checked("quantile", column, q, None)


def collect(column: str, *, limit: int = 10_000) -> Aggregate:
    """Collect the values of a column in a list, in order of event time, then of arrival, without nulls.

    A list with more than `limit` values fails the job.

    Raises:
        PlanError: `limit` is not from 1 to 2,147,483,648.
    """
    return _checked("collect", column, limit, None)


def top_n(column: str, n: int, *, by: str | None = None, ascending: bool = False) -> Aggregate:
    """List the values of `column` in the `n` records where that of `by` is greatest, best first.

    With `ascending` where it is least. Among records equal in `by` the last ones win, with
    `ascending` the first ones, by event time and then by arrival, so that the best is that of
    `max_by` or `min_by`. Records are skipped where either is null. Space for `n` values per key is
    allocated at once.

    Args:
        column: of any type.
        n: from 1 to 1,000.
        by: a column of numbers, dates or timestamps; `column` itself by default.
        ascending: the least instead of the greatest; in a manifest this is `bottom_n`.

    Raises:
        PlanError: `n` is not from 1 to 1,000.
    """
    return _checked("bottom_n" if ascending else "top_n", column, n, by)


_LAST_USED: Final = AggregateSpec("max", LAST_USED_COLUMN, NOW, LAST_USED_TYPE)


@dataclass(frozen=True)
class AggregatePlan:
    """Aggregates of records of `schema`, per key; checked when made.

    Attributes:
        keys: key columns; none for one global group.
        aggregates: by name of the output column.
        added: columns between keys and aggregates in the result.
        ttl_ms: a key expires this long after its last record, by the machine's clock; None: never.
            Its time is then part of the state, as the maximum of `NOW`.

    Raises:
        PlanError: an unknown column, a type that does not fit, or two output columns of one name.
    """

    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    schema: pa.Schema
    added: tuple[pa.Field, ...] = ()
    where: str = ""
    ttl_ms: int | None = None

    def __post_init__(self) -> None:
        if not self.aggregates:
            raise PlanError("no aggregates given", where=self.where, fix="such as n=hg.count()")
        for key in self.keys:
            if key not in self.schema.names:
                raise PlanError(
                    f"unknown key column `{key}`",
                    where=self.where,
                    fix=suggest(key, self.schema.names, "columns"),
                )
            try:
                check_key_type(self.schema.field(key).type)
            except StateError as error:
                raise PlanError(
                    f"{error.message} column=`{key}`", where=self.where, fix=error.fix
                ) from None
        self._check_names(self.result_schema.names)
        self._check_names(self.state_schema.names)

    def _check_names(self, names: Sequence[str]) -> None:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise PlanError(
                    f"two columns are called `{name}`", where=self.where, fix="rename one of them"
                )
            seen.add(name)

    @cached_property
    def value_columns(self) -> Mapping[str, bool]:
        """The columns of the aggregates, and whether their values are read or only which are null."""
        read: dict[str, bool] = {}
        for one in self.aggregates.values():
            for column in one.columns:
                read[column] = read.get(column, False) or one.kind != "count"
        return read

    @cached_property
    def computed(self) -> ExpressionSteps | None:
        """Return steps that make a column, named by its text, of each SQL text; None if there is none."""
        made: dict[str, Column] = {}
        for one in self.aggregates.values():
            made |= one.computed(self.schema, self.where)
        if not made:
            return None
        step = SelectStep(tuple(made.values()), ", ".join(map(one_line, made)), "an aggregate")
        return ExpressionSteps([step], self.schema)

    def compute(self, data: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns of `computed`, one row per record; no columns if there is nothing to compute.

        Raises:
            DataError: an expression fails for the value of a record.
        """
        if self.computed is None:
            return _NO_COLUMNS
        try:
            made = self.computed.apply(ColumnBatch(data))
        except DataError as error:
            error.where = error.where or self.where
            raise
        assert made is not None  # a select keeps all records
        return made.data

    @property
    def columns_read(self) -> frozenset[str]:
        """The input columns that the plan needs."""
        read = frozenset(column for one in self.aggregates.values() for column in one.columns)
        if self.computed is not None:
            texts = self.computed.output_schema.names
            read = read.difference(texts) | columns_read(self.computed.steps)[0]
        return read.union(self.keys)

    @cached_property
    def key_fields(self) -> list[pa.Field]:
        """Return the key columns as they are kept and emitted."""
        fields = (self.schema.field(key) for key in self.keys)
        return [pa.field(f.name, stored_key_type(f.type), f.nullable) for f in fields]

    @cached_property
    def result_schema(self) -> pa.Schema:
        """The schema of the result: keys, added columns, aggregates."""
        results = [
            pa.field(
                name, aggregate.output_type(self.schema, self.where), aggregate.kind not in COUNTS
            )
            for name, aggregate in self.aggregates.items()
        ]
        return pa.schema([*self.key_fields, *self.added, *results])

    @cached_property
    def state_schema(self) -> pa.Schema:
        """The schema of a snapshot's table: key group, keys, added columns, state of the aggregates."""
        key_group = pa.field(KEY_GROUP_COLUMN, pa.int32(), False)
        state = [field for spec in self.kept for field in spec.new().state_fields()]
        return pa.schema([key_group, *self.key_fields, *self.added, *state])

    def state_table(self, columns: Sequence[pa.Array]) -> pa.Table:
        """Return the state columns of some rows as a table."""
        return pa.Table.from_arrays(list(columns), names=self.state_names)

    @cached_property
    def state_names(self) -> list[str]:
        """The names of the state columns of the aggregates."""
        names: list[str] = self.state_schema.names
        return names[1 + len(self.keys) + len(self.added) :]

    @cached_property
    def described_state_schema(self) -> pa.Schema:
        """Return `state_schema` with metadata that names the aggregates of its columns."""
        fields = list(self.state_schema)[: 1 + len(self.keys) + len(self.added)]
        for spec, aggregate in zip(self.specs, self.aggregates.values(), strict=True):
            about = {AGGREGATE: str(aggregate).encode()}
            fields += [field.with_metadata(about) for field in spec.new().state_fields()]
        fields += list(self.state_schema)[len(fields) :]
        kept = {
            f"aggregate `{name}`": one.kept(self.schema) for name, one in self.aggregates.items()
        }
        return with_meaning(pa.schema(fields), kept)

    @cached_property
    def specs(self) -> list[AggregateSpec]:
        """Return the aggregates for the state layer."""
        computed = self.computed
        fields = self.schema if computed is None else [*self.schema, *computed.output_schema]
        return [one.spec(name, pa.schema(fields)) for name, one in self.aggregates.items()]

    @property
    def kept(self) -> list[AggregateSpec]:
        """The aggregates of the state: `specs`, and with a time to live the last use of the key."""
        return self.specs if self.ttl_ms is None else [*self.specs, _LAST_USED]

    @cached_property
    def partial_fields(self) -> list[pa.Field]:
        """Return the columns of partial results behind the keys; see `partials.py`."""
        fields = [pa.field(PARTIAL_ROWS, pa.int64(), False)]
        for spec, one in zip(self.specs, self.aggregates.values(), strict=True):
            fields += spec.new().state_fields() if one.columns else []
        return fields

    def new_state(self, epoch: TableEpoch) -> AggregateState:
        """Return empty accumulators of a table that counts its cuts with `epoch`."""
        return AggregateState(self.kept, epoch)

    def describe(self) -> str:
        """Describe the plan for `explain`, such as `n=count() per user`."""
        shown = ", ".join(f"{name}={aggregate}" for name, aggregate in self.aggregates.items())
        return f"{shown} per {', '.join(self.keys)}" if self.keys else shown
