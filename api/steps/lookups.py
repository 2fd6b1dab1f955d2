"""Lookups: joins of each record with the entry for its key in a table, or from a coroutine function."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, get_args

import pyarrow as pa

from ...errors import PlanError
from ...operators.async_calls.call import Retry
from ...operators.async_calls.map_async import OnTimeout
from ...operators.durations import Duration, parse_duration
from ...operators.functions.checks import check_takes
from ...operators.functions.dead_letters import OnErrorLike
from ...operators.graph import Node
from ...operators.joins.columns import free_name, plain_schema
from ...operators.joins.lookup import (
    CACHE_FOR,
    CACHE_ROWS,
    LookUp,
    LookupFunction,
    LookupHow,
    LookupService,
    TableLookup,
    TableLookupStep,
)
from ...operators.joins.static_table import StaticTable
from ...operators.origin import Origin
from ...operators.schema import SchemaLike, into_schema, unknown_column
from ...operators.whole_numbers import check_whole_number
from ..node_output import NodeOutput
from ..required_name import named
from .async_calls import CallArguments, add_map_async, check_coroutine


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupArguments:
    """The arguments of `lookup` that are for functions; None: not given. They are explained there."""

    into: SchemaLike | None = None
    cache_rows: int | None = None
    cache_for: Duration | None = None
    max_in_flight: int | None = None
    timeout: Duration | None = None
    ordered: bool | None = None
    retry: Retry | None = None
    on_timeout: OnTimeout | None = None
    on_error: OnErrorLike | None = None

    def given(self) -> dict[str, Any]:
        """Return those that were given."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {what: value for what, value in values.items() if value is not None}

    def calls(self) -> CallArguments:
        """Return those of `map_async`."""
        of_calls = {each.name for each in fields(CallArguments)}
        return CallArguments(**{k: v for k, v in self.given().items() if k in of_calls})


def add_lookup(
    output: NodeOutput,
    key: str | tuple[str, ...],
    function: LookupFunction | LookupService | StaticTable,
    arguments: LookupArguments,
    *,
    how: LookupHow,
    suffix: str | None,
    name: str,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `lookup`."""
    if isinstance(function, StaticTable):
        if given := arguments.given():
            raise PlanError(
                f"a lookup in a table makes no calls: {', '.join(given)} do not apply",
                where=str(origin),
                fix="leave them out; the table says which columns it brings",
            )
        return _add_table_lookup(output, key, function, how, suffix, name, origin)
    if how != "left":
        raise PlanError(
            f"how=`{how}` is for tables: where a function finds nothing the record gets nulls",
            where=str(origin),
            fix='leave it out, and add .filter("column IS NOT NULL")',
        )
    if arguments.into is None:
        arguments = replace(arguments, into=getattr(function, "into", None))
    if arguments.into is None:
        raise PlanError(
            "lookup with a function needs into=: the columns that the function finds",
            where=str(origin),
            fix='such as into={"name": "string"}, or a Struct class',
        )
    return _add_calls(output, key, function, arguments, suffix=suffix, name=name, origin=origin)


@named("async step", "records with calls in flight are stored under this name")
def _add_calls(
    output: NodeOutput,
    key: str | tuple[str, ...],
    function: LookupFunction | LookupService,
    arguments: LookupArguments,
    *,
    suffix: str | None,
    name: str,
    origin: Origin,
) -> NodeOutput:
    joined, schema = _joined(output, key, function, arguments, name, suffix, origin)
    return add_map_async(
        output,
        joined,
        arguments.calls(),
        name=name,
        into=schema,
        origin=origin,
        lifetime=function,
    )


def _joined(
    output: NodeOutput,
    key: str | tuple[str, ...],
    function: LookupFunction | LookupService,
    arguments: LookupArguments,
    name: str,
    suffix: str | None,
    origin: Origin,
) -> tuple[LookUp, pa.Schema]:
    """Return the function of the step and the columns it makes.

    Raises:
        PlanError: a column does not exist, names clash, or the number of rows is wrong.
    """
    rows, keep = arguments.cache_rows, arguments.cache_for
    cache_rows = CACHE_ROWS if rows is None else rows
    cache_for = CACHE_FOR if keep is None else keep
    assert arguments.into is not None
    schema = plain_schema(output.columns("lookup", origin))
    keys = (key,) if isinstance(key, str) else tuple(key)
    for column in keys:
        if column not in schema.names:
            raise unknown_column(column, schema, "lookup", str(origin))
    check_coroutine(function, "lookup", origin)
    check_takes(function, ("the key",), "lookup", origin)
    check_whole_number("cache_rows", cache_rows, origin, least=0, fix="0 keeps nothing")
    keep_ms = parse_duration(cache_for, "cache_for", str(origin))
    found, joined = into_schema(arguments.into, origin), list(schema)
    for field in found:
        taken = [each.name for each in joined]
        column = free_name(field.name, taken, found.names, suffix, (output.name, name), origin)
        joined.append(pa.field(column, field.type, True))
    names = tuple(schema.names), tuple(found.names)
    return LookUp(function, keys, *names, cache_rows, keep_ms / 1_000), pa.schema(joined)


def _add_table_lookup(
    output: NodeOutput,
    key: str | tuple[str, ...],
    table: StaticTable,
    how: LookupHow,
    suffix: str | None,
    name: str,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `lookup` with a table.

    Raises:
        PlanError: a column does not exist, key types differ, or names clash.
    """
    own = plain_schema(output.columns("lookup", origin))
    keys = (key,) if isinstance(key, str) else tuple(key)
    _check_keys(own, keys, table, output.name, origin)
    if how not in get_args(LookupHow):
        raise PlanError(
            f"a lookup cannot be how=`{how}`", where=str(origin), fix='it can be: "inner" or "left"'
        )
    joined = list(own)
    for column in table.columns:
        field = table.schema.field(column)
        taken, names = [each.name for each in joined], (output.name, table.describe())
        called = free_name(column, taken, table.columns, suffix, names, origin)
        joined.append(pa.field(called, field.type, field.nullable or how == "left"))
    step = TableLookupStep(table, keys, how, own, pa.schema(joined), origin)
    return output.add(
        Node(
            name=name,
            kind="lookup",
            origin=origin,
            inputs=(output.as_input(),),
            factory=partial(TableLookup, step),
            schema=step.result,
            detail=f"{how}, {', '.join(keys)} in {table.describe()}",
        )
    )


def _check_keys(
    own: pa.Schema, keys: tuple[str, ...], table: StaticTable, stream: str, origin: Origin
) -> None:
    """Raise PlanError unless the keys have equal types and so can match."""
    for column in keys:
        if column not in own.names:
            raise unknown_column(column, own, "lookup", str(origin))
    types = [own.field(key) for key in keys], [table.schema.field(key) for key in table.keys]
    if [field.type for field in types[0]] != [field.type for field in types[1]]:
        ours, theirs = (", ".join(f"{field.name}: {field.type}" for field in of) for of in types)
        raise PlanError(
            f"`{stream}` is looked up by ({ours}), and the key of the table is ({theirs}): equal keys "
            "would not match",
            where=str(origin),
            fix="name columns equal in number and types; schema= of the table's source sets the types of "
            "its columns, CAST in select makes the stream's alike",
        )
