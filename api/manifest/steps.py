"""One operator of a manifest: its verb, checked on its own, and the step made from its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..stream import Stream
from .call_steps import on_error, plan_map_async, plan_per_record, plan_python
from .document import Problems
from .fields import Table
from .keyed_steps import plan_aggregate, plan_match, plan_process, plan_reduce
from .lookup_steps import plan_lookup
from .operator_model import VERBS
from .pair_steps import plan_co_group, plan_iterate, plan_join, plan_join_as_of
from .references import is_reference, resolve_function
from .step import Builder, Planner, Step, each

_KEYED: Final = (
    "aggregate",
    "reduce",
    "process",
    "match",
    "join",
    "joinAsOf",
    "coGroup",
    "mapAsync",
)
_WINDOWED: Final = ("aggregate", "reduce", "process", "join", "coGroup")
_CALLS: Final = ("python", "map", "flatMap", "mapAsync", "lookup")
_BELONGS_TO: Final = {
    "into": (*_CALLS, "aggregate", "reduce", "process", "coGroup", "match"),
    "maxInFlight": _CALLS,
    "adds": ("python",),
    "keyBy": _KEYED,
    "keyWith": _KEYED,
    "window": _WINDOWED,
    "windowProcess": ("aggregate", "reduce"),
    "connect": ("process",),
    "rows": ("python",),
    "within": ("python",),
    "timeout": ("mapAsync", "lookup"),
    "ordered": ("mapAsync", "lookup"),
    "retry": ("mapAsync", "lookup"),
    "onTimeout": ("mapAsync", "lookup"),
    "onError": ("filter", "process", *_CALLS),
    "from": tuple(verb for verb in VERBS if verb != "union"),
}


def plan_step(name: str, table: Table, builder: Builder) -> Step | None:
    """Check an operator as far as possible without its input; return None if its verb is unusable."""
    verbs = table.present(VERBS)
    if len(verbs) != 1:
        _complain_about_verbs(name, table, verbs, builder.problems)
        return None
    verb = verbs[0]
    for field, owners in _BELONGS_TO.items():
        if table.tried(field) and verb not in owners:
            builder.problems.add(
                table.line_of(field),
                f"{field} has no effect for {verb} operator=`{name}`",
                f"remove it, or use {' or '.join(owners)}" if field != "from" else "remove it",
            )
    if table.tried("partition") and verb in _KEYED and table.present(["keyBy", "keyWith"]):
        builder.problems.add(
            table.line_of("partition"),
            f"partition has no effect with a key operator=`{name}`",
            "remove it: all records of a key go to the same subtask",
        )
    if verb != "union" and not table.tried("from"):
        builder.problems.add(
            table.line, f"operator has no input operator=`{name}`", "from: a source or an operator"
        )
    return _PLANNERS[verb](name, table, builder)


def partitioned(flow: Stream[Any], table: Table, builder: Builder) -> Stream[Any] | None:
    """Return the stream, distributed by the `partition` of its reader."""
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
    line, written = table.line_of("filter"), table.get("filter")
    if written is None:
        return lambda flows: flows[0]
    condition: Any = written
    if is_reference(written):
        condition = builder.attempt(line, lambda: resolve_function(written))
    options = on_error(table)

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any]:
        # A filter keeps the columns, so the input can stand for the result of a filter that failed.
        if condition is None:
            return flows[0]
        make = lambda: flows[0].filter(condition, name=name, **options)  # noqa: E731
        return builder.attempt(line, make) or flows[0]

    return step


def _select(name: str, table: Table, builder: Builder) -> Step | None:
    columns = table.get("select")
    if columns is None:
        return None

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        return each(
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
        # A `from` beside it, which is reported elsewhere, comes after them.
        first, *others = flows[: len(lines)]
        made = each(
            builder,
            table.line_of("union"),
            list(zip(others, lines[1:], strict=True)),
            lambda some, name: first.union(*some, name=name),
            name,
        )
        return made or first

    return step


_PLANNERS: Final[dict[str, Planner]] = {
    "filter": _filter,
    "select": _select,
    "union": _union,
    "python": plan_python,
    "map": plan_per_record("map"),
    "flatMap": plan_per_record("flatMap"),
    "mapAsync": plan_map_async,
    "lookup": plan_lookup,
    "reduce": plan_reduce,
    "aggregate": plan_aggregate,
    "process": plan_process,
    "match": plan_match,
    "join": plan_join,
    "joinAsOf": plan_join_as_of,
    "coGroup": plan_co_group,
    "iterate": plan_iterate,
}
