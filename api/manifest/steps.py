"""One operator of a manifest: its verb, checked on its own, and the step made from its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..stream import Stream
from . import call_steps, keyed_steps, pair_steps
from .call_steps import on_error
from .document import Problems
from .event_times import EVENT_TIME
from .fields import ChoiceKind, Field, ListOf, Section, Table, TextKind
from .lookup_steps import lookup_verb
from .references import is_reference, resolve_function
from .registry import SourceConnector
from .step import (
    CALLED,
    PARALLELISM,
    PARTITIONINGS,
    SLOT_SHARING_GROUP,
    STREAM,
    Step,
    StepBuilder,
    Verb,
    each,
)

_UNION: Final = "union"


def plan_step(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Check an operator as far as possible without its input; return None if its verb is unusable."""
    verbs = table.present(list(VERBS))
    if len(verbs) != 1:
        _complain_about_verbs(name, table, verbs, builder.problems)
        return None
    verb = VERBS[verbs[0]]
    for field, owners in _OWNERS.items():
        if field not in verb.fields:
            fix = f"remove it, or use {' or '.join(owners)}"
            _refuse_field(field, verb, fix, name, table, builder)
    if verb.name == _UNION:
        _refuse_field("from", verb, "remove it", name, table, builder)
    if table.tried("partition") and verb.keyed and table.present(["keyBy", "keyWith"]):
        builder.problems.add(
            table.line_of("partition"),
            f"partition has no effect with a key operator=`{name}`",
            "remove it: all records of a key go to the same subtask",
        )
    if verb.name != _UNION and not table.tried("from"):
        builder.problems.add(
            table.line, f"operator has no input operator=`{name}`", "from: a source or an operator"
        )
    return verb.plan(name, table, builder)


def _refuse_field(
    field: str, verb: Verb, fix: str, name: str, table: Table, builder: StepBuilder
) -> None:
    if table.tried(field):
        message = f"{field} has no effect for {verb.name} operator=`{name}`"
        builder.problems.add(table.line_of(field), message, fix)


def inputs_of(table: Table) -> list[tuple[str, int]]:
    """Return the streams that an operator reads, each with the line that names it."""
    union = table.get(_UNION, ())
    inputs = list(zip(union, getattr(union, "lines", ()), strict=True))
    if table.get("from"):
        inputs.append((table.get("from"), table.line_of("from")))
    for verb in VERBS.values():
        for named, field in verb.inputs:
            if (section := table.get(named)) is not None and section.get(field) is not None:
                inputs.append((section.get(field), section.line_of(field)))
    return inputs


def partitioned(flow: Stream[Any], table: Table, builder: StepBuilder) -> Stream[Any] | None:
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


def _filter(name: str, table: Table, builder: StepBuilder) -> Step | None:
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


def _select(name: str, table: Table, builder: StepBuilder) -> Step | None:
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


def _union(name: str, table: Table, builder: StepBuilder) -> Step | None:
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


_OWN: Final = (
    Verb(
        "filter",
        Field(TextKind(), "an SQL condition, or `module:function`; other rows are dropped"),
        _filter,
        CALLED,
    ),
    Verb("select", Field(ListOf(TextKind()), "columns and SQL expressions `a / 2 AS b`"), _select),
    Verb(_UNION, Field(ListOf(STREAM), "the streams to merge, instead of `from`"), _union),
)
VERBS: Final = {
    verb.name: verb
    for verb in (
        *_OWN,
        *call_steps.VERBS,
        lookup_verb({}),
        *keyed_steps.VERBS,
        *pair_steps.VERBS,
    )
}
"""The verbs by their names: an operator has exactly one of them."""
_OWNERS: Final = {
    field: [verb.name for verb in VERBS.values() if field in verb.fields]
    for each_verb in VERBS.values()
    for field in each_verb.fields
}
"""Fields that have an effect for some verbs only, with these verbs."""
_OF_ALL: Final = {
    "eventTime": Field(EVENT_TIME, "event time of the result"),
    "partition": Field(ChoiceKind(PARTITIONINGS), "how its input is distributed over its subtasks"),
    "parallelism": Field(PARALLELISM, "number of subtasks"),
    "slotSharingGroup": SLOT_SHARING_GROUP,
    "chaining": Field(ChoiceKind(("head", "never")), "start a new chain here, or never chain"),
}
"""The fields that every operator may have."""


def operator_section(connectors: Mapping[str, SourceConnector]) -> Section:
    """Return the section of an operator; its `lookup` has those connectors that make tables."""
    verbs = {**VERBS, "lookup": lookup_verb(connectors)}
    fields = {"from": Field(STREAM, "the source or operator it reads")}
    fields |= {verb.name: verb.value for verb in verbs.values()}
    for verb in verbs.values():
        fields |= verb.fields
    return Section("operator", {**fields, **_OF_ALL})
