"""Descriptions of aggregates: `hg.count()`, `hg.sum("amount")`, or their text in a manifest.

Nulls are skipped as in SQL. Result types: count int64; sum int64 of integers, float64 of floats, the
widest decimal of decimals; min and max as the column; avg float64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from ..errors import PlanError, StateError
from ..state.aggregate_state import AggregateSpec, AggregateState, accumulator_for
from ..state.epochs import TableEpoch
from ..state.evolution import AGGREGATE
from ..state.hashing import check_key_type
from ..state.key_index import stored_key_type
from ..state.snapshot import KEY_GROUP_COLUMN
from .suggestions import suggest

KINDS = ("count", "sum", "min", "max", "avg")

_CALL = re.compile(r"\s*(\w+)\s*\(\s*(?:(\w+)|\"([^\"]+)\"|`([^`]+)`|(\*))?\s*\)\s*")
_FIX = (
    'write count(), count(x), sum(x), min(x), max(x) or avg(x); quote odd names: sum("my column")'
)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One aggregate: `kind` of `column`, or of whole rows (`count()`)."""

    kind: str
    column: str | None = None

    def __str__(self) -> str:
        if self.column is None:
            return f"{self.kind}()"
        plain = re.fullmatch(r"\w+", self.column)
        return f"{self.kind}({self.column})" if plain else f'{self.kind}("{self.column}")'

    def output_type(self, schema: pa.Schema, where: str = "") -> pa.DataType:
        """The type of the result on records of `schema`.

        Raises:
            PlanError: no such column, or its type has no such aggregate.
        """
        if self.column is None:
            return pa.int64()
        if self.column not in schema.names:
            raise PlanError(
                f"unknown column `{self.column}` in {self}",
                where=where,
                fix=suggest(self.column, schema.names, "columns"),
            )
        try:
            return accumulator_for(self.kind, self.column, schema.field(self.column).type).type
        except PlanError as error:
            raise PlanError(error.message, where=where, fix=error.fix) from None


def parse_aggregate(text: str) -> Aggregate:
    """The aggregate written as `sum(amount)`; the opposite of `str`.

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
    column = call[2] or call[3] or call[4]
    if column is None and kind != "count":
        raise PlanError(f"{kind} needs a column text=`{text}`", fix=_FIX)
    return Aggregate(kind, column)


def count(column: str | None = None) -> Aggregate:
    """How many records; with a column, how many have a value there."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """The sum of a column of numbers; null if it has no value."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """The least value of a column; null if it has none."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """The greatest value of a column; null if it has none."""
    return Aggregate("max", column)


def avg(column: str) -> Aggregate:
    """The mean of a column of numbers, in float64; null if it has no value."""
    return Aggregate("avg", column)


@dataclass(frozen=True)
class AggregatePlan:
    """Aggregates of records of `schema`, per key; checked when made.

    Attributes:
        keys: key columns; none for one global group.
        aggregates: by name of the output column.
        added: columns that stand between keys and aggregates in the result.

    Raises:
        PlanError: an unknown column, a type that does not fit, or two output columns of one name.
    """

    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    schema: pa.Schema
    added: tuple[pa.Field, ...] = ()
    where: str = ""

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

    @property
    def columns_read(self) -> frozenset[str]:
        """Input columns this needs."""
        read = (aggregate.column for aggregate in self.aggregates.values())
        return frozenset([*self.keys, *(column for column in read if column is not None)])

    @cached_property
    def key_fields(self) -> list[pa.Field]:
        """Key columns as they are kept and emitted."""
        fields = (self.schema.field(key) for key in self.keys)
        return [pa.field(f.name, stored_key_type(f.type), f.nullable) for f in fields]

    @cached_property
    def result_schema(self) -> pa.Schema:
        """What comes out: keys, added columns, aggregates."""
        results = [
            pa.field(
                name, aggregate.output_type(self.schema, self.where), aggregate.kind != "count"
            )
            for name, aggregate in self.aggregates.items()
        ]
        return pa.schema([*self.key_fields, *self.added, *results])

    @cached_property
    def state_schema(self) -> pa.Schema:
        """The table of a snapshot: key group, keys, added columns, state of the aggregates."""
        key_group = pa.field(KEY_GROUP_COLUMN, pa.int32(), False)
        state = [
            field
            for spec in self.specs
            for field in accumulator_for(spec.kind, spec.name, spec.type).state_fields()
        ]
        return pa.schema([key_group, *self.key_fields, *self.added, *state])

    @cached_property
    def described_state_schema(self) -> pa.Schema:
        """`state_schema` with the aggregate of each state column as the column's metadata."""
        fields = list(self.state_schema)[: 1 + len(self.keys) + len(self.added)]
        for spec, aggregate in zip(self.specs, self.aggregates.values(), strict=True):
            about = {AGGREGATE: str(aggregate).encode()}
            accumulator = accumulator_for(spec.kind, spec.name, spec.type)
            fields += [field.with_metadata(about) for field in accumulator.state_fields()]
        return pa.schema(fields)

    @cached_property
    def specs(self) -> list[AggregateSpec]:
        """The aggregates as the state layer takes them."""
        return [
            AggregateSpec(
                aggregate.kind,
                name,
                aggregate.column,
                None if aggregate.column is None else self.schema.field(aggregate.column).type,
            )
            for name, aggregate in self.aggregates.items()
        ]

    def new_state(self, epoch: TableEpoch) -> AggregateState:
        """Empty accumulators, of a table that counts its cuts with `epoch`."""
        return AggregateState(self.specs, epoch)

    def describe(self) -> str:
        """For `explain`, such as `n=count() per user`."""
        shown = ", ".join(f"{name}={aggregate}" for name, aggregate in self.aggregates.items())
        return f"{shown} per {', '.join(self.keys)}" if self.keys else shown
