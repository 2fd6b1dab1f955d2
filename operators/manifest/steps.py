"""One operator of a manifest: its verb, checked by itself, and the step it makes of its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from ...errors import PlanError
from ..aggregates import parse_aggregate
from ..job_graph import NAME_LENGTH_MAX
from ..schema import to_schema
from ..stream import Stream
from ..windows import tumbling
from .document import Problems
from .fields import Table
from .model import VERBS
from .references import resolve_function

R = TypeVar("R")
Step: TypeAlias = Callable[[Sequence[Stream[Any]]], "Stream[Any] | None"]
"""Applies a verb to its input streams; None if that fails and nothing is known of the result."""

_NOT_FOR_COLUMNS = {"name", "into"}
"""Results that `agg` would take for its own arguments."""
_BELONGS_TO = {
    "into": ("python", "map", "flatMap", "aggregate"),
    "maxInFlight": ("map", "flatMap"),
    "adds": ("python",),
    "keyBy": ("aggregate", "reduce"),
    "window": ("aggregate",),
    "from": tuple(verb for verb in VERBS if verb != "union"),
}


class Builder(Protocol):
    """What a step needs of the builder."""

    problems: Problems

    def attempt(self, line: int, action: Callable[[], R]) -> R | None: ...

    def schema_of(self, table: Table, name: str) -> pa.Schema | type[Any] | None: ...


def plan_step(name: str, table: Table, builder: Builder) -> Step | None:
    """Check everything about an operator that needs no input; None if its verb is not usable."""
    verbs = table.present(VERBS)
    if len(verbs) != 1:
        _complain_about_verbs(name, table, verbs, builder.problems)
        return None
    verb = verbs[0]
    for field, owners in _BELONGS_TO.items():
        if table.tried(field) and verb not in owners:
            builder.problems.add(
                table.line_of(field),
                f"{field} means nothing for {verb} operator=`{name}`",
                f"remove it, or use {' or '.join(owners)}" if field != "from" else "remove it",
            )
    if verb != "union" and not table.tried("from"):
        builder.problems.add(
            table.line, f"operator has no input operator=`{name}`", "from: a source or an operator"
        )
    return _PLANNERS[verb](name, table, builder)


def partitioned(flow: Stream[Any], table: Table, builder: Builder) -> Stream[Any] | None:
    """The stream, spread as `partition` of its reader says."""
    match table.get("partition"):
        case "rebalance":
            change = flow.rebalance
        case "rescale":
            change = flow.rescale
        case "shuffle":
            change = flow.shuffle
        case "broadcast":
            change = flow.broadcast
        case "global":
            change = flow.to_one
        case _:
            return flow
    return builder.attempt(table.line_of("partition"), change)


def _complain_about_verbs(
    name: str, table: Table, verbs: Sequence[str], problems: Problems
) -> None:
    if verbs:
        problems.add(
            table.line_of(verbs[1]),
            f"operator has more than one verb operator=`{name}`: {', '.join(verbs)}",
            "make two operators of it",
        )
    elif not table.strange:
        problems.add(
            table.line, f"operator has no verb operator=`{name}`", f"use one of {', '.join(VERBS)}"
        )


def _filter(name: str, table: Table, builder: Builder) -> Step | None:
    line, condition = table.line_of("filter"), table.get("filter")
    if condition is None:
        return lambda flows: flows[0]
    # Rows come and go, columns do not: the input stands for the result of a filter that failed.
    return lambda flows: (
        builder.attempt(line, lambda: flows[0].filter(condition, name=name)) or flows[0]
    )


def _select(name: str, table: Table, builder: Builder) -> Step | None:
    columns = table.get("select")
    if columns is None:
        return None

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        return _each(
            builder,
            table.line_of("select"),
            list(zip(columns, columns.lines, strict=True)),
            lambda some, name: flows[0].select(*some, name=name),
            name,
        )

    return step


def _union(name: str, table: Table, builder: Builder) -> Step | None:
    if table.get("union") is None:
        return None
    lines = table.get("union").lines

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        first, *others = flows
        made = _each(
            builder,
            table.line_of("union"),
            list(zip(others, lines[1:], strict=True)),
            lambda some, name: first.union(*some, name=name),
            name,
        )
        return made or first

    return step


def _python(name: str, table: Table, builder: Builder) -> Step | None:
    line, reference = table.line_of("python"), table.get("python")
    if table.tried("into") and table.tried("adds"):
        builder.problems.add(
            table.line_of("adds"), f"into and adds exclude each other operator=`{name}`", "keep one"
        )
        return None
    function = reference and builder.attempt(line, lambda: resolve_function(reference))
    into = builder.schema_of(table, "into")
    adds = table.get("adds")
    if function is None or (table.tried("into") and into is None):
        return None
    if table.tried("adds") and (adds is None or adds.bad):
        return None

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        stream, result = flows[0], into
        if adds is not None:
            result = builder.attempt(table.line_of("adds"), lambda: _added(stream, adds))
            if result is None:
                return None
        return builder.attempt(line, lambda: stream.map_batches(function, into=result, name=name))

    return step


def _added(stream: Stream[Any], adds: Table) -> pa.Schema:
    """The columns of `stream` and the new ones; one that exists already changes its type."""
    if stream.schema is None:
        raise PlanError("adds needs an input with columns", fix="give `into` instead")
    schema = stream.schema
    for column in to_schema(adds.values):
        at = schema.get_field_index(column.name)
        schema = schema.append(column) if at < 0 else schema.set(at, column)
    return schema


def _per_record(verb: str) -> Callable[[str, Table, Builder], Step | None]:
    def plan(name: str, table: Table, builder: Builder) -> Step | None:
        line, reference = table.line_of(verb), table.get(verb)
        function = reference and builder.attempt(line, lambda: resolve_function(reference))
        into = builder.schema_of(table, "into")
        if function is None or (table.tried("into") and into is None):
            return None

        limits = {"max_in_flight": table.get("maxInFlight")} if table.get("maxInFlight") else {}

        def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
            method: Any = flows[0].map if verb == "map" else flows[0].flat_map
            return builder.attempt(line, lambda: method(function, into=into, name=name, **limits))

        return step

    return plan


def _reduce(name: str, table: Table, builder: Builder) -> Step | None:
    line, reference = table.line_of("reduce"), table.get("reduce")
    function = reference and builder.attempt(line, lambda: resolve_function(reference))
    keys = table.get("keyBy")
    if not table.tried("keyBy"):
        builder.problems.add(line, f"reduce has no keyBy operator=`{name}`", "keyBy: [column]")
    if function is None or keys is None:
        return None

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        keyed = _keyed(flows[0], table, builder)
        if keyed is None:
            return None
        return builder.attempt(line, lambda: keyed.reduce(function, name=name))

    return step


def _aggregate(name: str, table: Table, builder: Builder) -> Step | None:
    line, written = table.line_of("aggregate"), table.get("aggregate")
    if written is None:
        return None
    made: dict[str, Any] = {}
    for column, text in written.values.items():
        at = written.line_of(column)
        made[column] = builder.attempt(at, lambda text=text: parse_aggregate(text))  # type: ignore[misc]
    for column in _NOT_FOR_COLUMNS & written.lines.keys():
        builder.problems.add(
            written.line_of(column), f"a result cannot be called `{column}`", "rename it"
        )
        made.pop(column, None)
    whole = len(made) == len(written.lines) and None not in made.values()
    if not table.tried("keyBy") and not table.tried("window"):
        builder.problems.add(
            line, f"aggregate has neither keyBy nor window operator=`{name}`", "keyBy: [column]"
        )
        return None
    window = _window(table, builder)
    into = builder.schema_of(table, "into")
    whole = whole and (into is not None or not table.tried("into"))

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        stream = flows[0]
        groups = _groups(stream, table, window, builder)
        schema = stream.schema
        fits = True
        for column, aggregate in made.items():
            if aggregate is not None and schema is not None:
                check = partial(aggregate.output_type, schema)
                fits = builder.attempt(written.line_of(column), check) is not None and fits
        if groups is None or not fits or not whole:
            return None
        return builder.attempt(line, lambda: groups.agg(**made, into=into, name=name))

    return step


def _groups(stream: Stream[Any], table: Table, window: Any, builder: Builder) -> Any:
    """What is aggregated: the stream by key, by window, or both; None if either is wrong."""
    groups: Any = _keyed(stream, table, builder) if table.tried("keyBy") else stream
    if not table.tried("window"):
        return groups
    line = table.line_of("window")
    if not stream.has_event_time:
        builder.problems.add(
            line,
            f"a window needs event time, and `{stream.name}` has none",
            "eventTime: {column: ..., maxOutOfOrder: ...} in the source, or in a step before",
        )
        return None
    if window is None or groups is None:
        return None
    return builder.attempt(line, lambda: groups.window(window))


def _window(table: Table, builder: Builder) -> Any:
    section = table.get("window")
    if section is None or section.bad or "tumbling" not in section.values:
        return None
    bounds = {
        "offset": section.get("offset", "0s"),
        "allowed_lateness": section.get("allowedLateness", "0s"),
    }
    size = section.get("tumbling")
    return builder.attempt(section.line_of("tumbling"), lambda: tumbling(size, **bounds))


def _keyed(stream: Stream[Any], table: Table, builder: Builder) -> Any:
    keys = table.get("keyBy")
    if keys is None:
        return None
    pairs = list(zip(keys, keys.lines, strict=True))
    return _each(builder, table.line_of("keyBy"), pairs, lambda some, _: stream.key_by(*some))


def _each(
    builder: Builder,
    line: int,
    items: Sequence[tuple[Any, int]],
    action: Callable[[Sequence[Any], str], R],
    name: str = "",
) -> R | None:
    """`action` with all items; if that is refused, each item that is refused alone has its problem."""
    before = len(builder.problems.found)
    made = builder.attempt(line, lambda: action([item for item, _ in items], name))
    if made is not None:
        return made
    joint = builder.problems.found[before:]
    del builder.problems.found[before:]
    for number, (item, at) in enumerate(items):
        # Names in a manifest have no blanks: this one is free.
        trial = f"trial {number} of {name}"[:NAME_LENGTH_MAX]
        builder.attempt(at, lambda item=item, trial=trial: action([item], trial))  # type: ignore[misc]
    if len(builder.problems.found) == before:
        builder.problems.found.extend(joint)
    return None


_PLANNERS: dict[str, Callable[[str, Table, Builder], Step | None]] = {
    "filter": _filter,
    "select": _select,
    "union": _union,
    "python": _python,
    "map": _per_record("map"),
    "flatMap": _per_record("flatMap"),
    "reduce": _reduce,
    "aggregate": _aggregate,
}
