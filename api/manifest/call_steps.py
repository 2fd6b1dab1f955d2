"""Steps that call functions by record or by batch, and their error handling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from ...errors import PlanError
from ...operators.async_calls.call import Retry
from ...operators.functions.dead_letters import OnError
from ...operators.schema import to_schema
from ..stream import Stream
from .fields import (
    REFERENCE,
    BooleanKind,
    Field,
    IntegerKind,
    ListOf,
    NumberKind,
    Section,
    Table,
    TextKind,
    duration,
)
from .references import is_reference, resolve, resolve_function
from .step import (
    CALLED,
    COLUMNS,
    INTO,
    KEYS,
    MAX_IN_FLIGHT,
    ROWS,
    Planner,
    Step,
    StepBuilder,
    Verb,
    check_keys,
    function_of,
    given,
    keyed,
    sound,
)

RETRY = Section(
    "retry",
    {
        "attempts": Field(
            IntegerKind(1, 1000), "calls of a record at most, the first one included"
        ),
        "delay": Field(duration(), "between the first call and the second"),
        "factor": Field(NumberKind(1), "growth of each further delay"),
        "longest": Field(duration(), "the longest delay"),
        "onException": Field(
            ListOf(REFERENCE), "exceptions to retry: `builtins:OSError`, or one function of them"
        ),
        "onResult": Field(REFERENCE, "a function result -> bool: call again? `module:function`"),
    },
)
_RETRY: Final = {"attempts": "attempts", "delay": "delay", "factor": "factor", "longest": "longest"}
_TIMEOUT_WORDS: Final = ("fail", "side_output")


def plan_python(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `python`, a function of batches."""
    line = table.line_of("python")
    if table.tried("into") and table.tried("adds"):
        builder.problems.add(
            table.line_of("adds"), f"into and adds exclude each other operator=`{name}`", "keep one"
        )
        return None
    function = function_of(table, "python", builder)
    into = builder.schema_of(table, "into")
    adds = table.get("adds")
    if function is None or not sound(table, into=into, adds=adds) or (adds and adds.bad):
        return None
    options = given(table, rows="rows", within="within", max_in_flight="maxInFlight")
    options |= on_error(table)

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        stream, result = flows[0], into
        if adds is not None:
            result = builder.attempt(table.line_of("adds"), lambda: _added(stream, adds))
            if result is None:
                return None
        return builder.attempt(
            line, lambda: stream.map_batches(function, into=result, name=name, **options)
        )

    return step


def _added(stream: Stream[Any], adds: Table) -> pa.Schema:
    """Return the columns of `stream` and the new ones; one that exists changes its type."""
    if stream.schema is None:
        raise PlanError("adds needs an input with columns", fix="give `into` instead")
    schema = stream.schema
    for column in to_schema(adds.values):
        at = schema.get_field_index(column.name)
        schema = schema.append(column) if at < 0 else schema.set(at, column)
    return schema


def plan_per_record(verb: str) -> Planner:
    """Return the planner of `map` or `flatMap`."""

    def plan(name: str, table: Table, builder: StepBuilder) -> Step | None:
        line, function = table.line_of(verb), function_of(table, verb, builder)
        into = builder.schema_of(table, "into")
        if function is None or not sound(table, into=into):
            return None
        options = {**given(table, max_in_flight="maxInFlight"), **on_error(table)}

        def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
            method: Any = flows[0].map if verb == "map" else flows[0].flat_map
            return builder.attempt(line, lambda: method(function, into=into, name=name, **options))

        return step

    return plan


def plan_map_async(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `mapAsync`, with keys or without."""
    line, function = table.line_of("mapAsync"), function_of(table, "mapAsync", builder)
    into = builder.schema_of(table, "into")
    by_key = bool(table.present(["keyBy", "keyWith"]))
    fits = not by_key or check_keys("mapAsync", name, table, line, builder)
    if by_key and table.tried("ordered"):
        builder.problems.add(
            table.line_of("ordered"),
            f"ordered has no effect with a key operator=`{name}`",
            "remove it: the records of each key are in order",
        )
        fits = False
    options = call_options(table, builder)
    if function is None or not fits or options is None or not sound(table, into=into):
        return None

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        source: Any = keyed(flows[0], table, builder) if by_key else flows[0]
        if source is None:
            return None
        return builder.attempt(
            line, lambda: source.map_async(function, into=into, name=name, **options)
        )

    return step


def call_options(table: Table, builder: StepBuilder) -> dict[str, Any] | None:
    """Return the call options of `mapAsync` and `lookup` as arguments; None if some are wrong."""
    retry, late = _retry(table, builder), _on_timeout(table, builder)
    if not sound(table, retry=retry, onTimeout=late):
        return None
    options = given(table, max_in_flight="maxInFlight", timeout="timeout", ordered="ordered")
    options |= on_error(table) | ({} if retry is None else {"retry": retry})
    return options | ({} if late is None else {"on_timeout": late})


def on_error(table: Table) -> dict[str, Any]:
    """Return the argument `on_error` if `onError` is given."""
    said = table.get("onError")
    if isinstance(said, Table):
        return {"on_error": OnError(said.get("then", "fail"), said.get("retries", 0))}
    return {} if said is None else {"on_error": said}


def _on_timeout(table: Table, builder: StepBuilder) -> Any:
    said, line = table.get("onTimeout"), table.line_of("onTimeout")
    if said is None or said in _TIMEOUT_WORDS:
        return said
    if is_reference(said):
        return builder.attempt(line, lambda: resolve_function(said))
    builder.problems.add(
        line,
        f"onTimeout must be {', '.join(_TIMEOUT_WORDS)} or `module:function`, not the text `{said}`",
        'such as "steps:fallback", a function of the record that gives the result',
    )
    return None


def _retry(table: Table, builder: StepBuilder) -> Retry | None:
    section = table.get("retry")
    if section is None or section.bad:
        return None
    again = function_of(section, "onResult", builder)
    kinds: Any = None
    if (references := section.get("onException")) is not None:
        found = [
            builder.attempt(line, lambda at=at: resolve(at))  # type: ignore[misc]
            for at, line in zip(references, references.lines, strict=True)
        ]
        if None not in found:
            kinds = found[0] if len(found) == 1 else tuple(found)
    if not sound(section, onResult=again, onException=kinds):
        return None
    options = given(section, **_RETRY)
    options |= {} if kinds is None else {"on_exception": kinds}
    return Retry(**options, on_result=again)


_CALLED: Final = {**INTO, **MAX_IN_FLIGHT, **CALLED}
CALL_OPTIONS: Final = {
    **_CALLED,
    "timeout": Field(duration(), "of a record in `mapAsync` or `lookup`, all attempts included"),
    "ordered": Field(BooleanKind(), "false: results are emitted as calls finish"),
    "retry": Field(RETRY, "when `mapAsync` or `lookup` calls its function again"),
    "onTimeout": Field(
        TextKind(), "fail, side_output, or a function record -> record, `module:function`"
    ),
}
"""The fields of `mapAsync` and `lookup` that are about calls."""
VERBS: Final = (
    Verb(
        "python",
        Field(REFERENCE, "a function RecordBatch -> RecordBatch, `module:function`"),
        plan_python,
        {
            **_CALLED,
            "adds": Field(COLUMNS, "columns that `python` adds to those of its input"),
            "rows": Field(ROWS, "call `python` with this many rows at a time"),
            "within": Field(duration(), "how long a row waits for that many to arrive"),
        },
    ),
    Verb(
        "map",
        Field(REFERENCE, "a function record -> record, `module:function`"),
        plan_per_record("map"),
        _CALLED,
    ),
    Verb(
        "flatMap",
        Field(REFERENCE, "a function record -> records, `module:function`"),
        plan_per_record("flatMap"),
        _CALLED,
    ),
    Verb(
        "mapAsync",
        Field(REFERENCE, "a coroutine function record -> record, `module:function`"),
        plan_map_async,
        {**CALL_OPTIONS, **KEYS},
    ),
)
