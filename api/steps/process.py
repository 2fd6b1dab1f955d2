"""Steps with process functions: the checks of functions, and the nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa

from ...errors import PlanError
from ...operators.functions.checks import check_takes, is_async
from ...operators.functions.dead_letters import FAILED, OnErrorLike, checked_on_error, failed_sides
from ...operators.graph import ByClock, Node
from ...operators.origin import Origin
from ...operators.per_record.base import UserFunction
from ...operators.process.batches import (
    EVENT_TIME_COLUMN,
    KeyedBatchProcess,
    KeyedBatchProcessOperator,
)
from ...operators.process.declared import declared_states
from ...operators.process.emitter import declared_sides
from ...operators.process.functions import (
    BroadcastProcess,
    CoProcess,
    KeyedProcess,
    Process,
    ProcessFunction,
    sets_clock_timers,
)
from ...operators.process.operator import (
    BroadcastProcessOperator,
    CoProcessOperator,
    KeyedProcessOperator,
    ProcessInput,
    ProcessOperator,
    ProcessStep,
)
from ...operators.rows import RowReader
from ...operators.schema import SchemaLike, into_schema, record_class
from ...state.evolution import keeps_hash
from ..node_output import NodeOutput

_AT_TIMES = ("finish", "on_checkpoint_complete", "on_checkpoint_aborted")
_METHODS: dict[type[Any], tuple[str, ...]] = {
    KeyedProcess: ("on_record",),
    Process: ("on_record",),
    KeyedBatchProcess: ("on_batch",),
    CoProcess: ("on_first", "on_second"),
    BroadcastProcess: ("on_record", "on_broadcast"),
}


def add_keyed(
    output: NodeOutput,
    function: object,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.process(...)`."""
    if isinstance(function, KeyedBatchProcess):
        return _add_batches(output, function, name, into, on_error, origin)
    checked = _checked(function, KeyedProcess, origin)
    fields = output.key_fields(origin)
    return _add((output,), KeyedProcessOperator, checked, fields, name, into, on_error, origin)


def add_keyless(
    output: NodeOutput,
    function: object,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `stream.process(...)`."""
    checked = _checked(function, Process, origin)
    return _add((output,), KeyedProcessOperator, checked, None, name, into, on_error, origin)


def _add_batches(
    output: NodeOutput,
    function: KeyedBatchProcess[Any, Any, Any],
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    _checked(function, KeyedBatchProcess, origin)
    schema = output.columns("a KeyedBatchProcess", origin)
    fields = output.key_fields(origin)
    if fields is None:
        raise PlanError(
            "a KeyedBatchProcess needs a key made of columns, and key_with gives a function",
            where=str(origin),
            fix='make the key a column and name it: .select("*", "lower(url) AS key").key_by("key")',
        )
    if output.has_event_time and EVENT_TIME_COLUMN in schema.names:
        raise PlanError(
            f"`{output.name}` has a column `{EVENT_TIME_COLUMN}`, which is the event time "
            "of rows in a KeyedBatchProcess",
            where=str(origin),
            fix="give it another name with select",
        )
    operator = KeyedBatchProcessOperator
    made = schema if into is None else into
    result = _add((output,), operator, function, fields, name, made, on_error, origin)
    if into is None:
        result.node.row_type = output.row_type
    return result


def add_connected(
    first: NodeOutput,
    second: NodeOutput,
    function: object,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.connect(keyed).process(...)`, or of two streams without keys."""
    checked = _checked(function, CoProcess, origin)
    fields = _common_fields(first, second, origin)
    return _add((first, second), CoProcessOperator, checked, fields, name, into, on_error, origin)


def add_broadcast(
    output: NodeOutput,
    broadcast: NodeOutput,
    function: object,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.connect(stream.broadcast()).process(...)`, or of a stream without keys."""
    checked = _checked(function, BroadcastProcess, origin)
    fields = output.key_fields(origin)
    inputs = (output, broadcast)
    return _add(inputs, BroadcastProcessOperator, checked, fields, name, into, on_error, origin)


def check_connected(first: NodeOutput, second: NodeOutput, origin: Origin) -> None:
    """Raise PlanError unless two streams can be inputs of one step."""
    if first.job is not second.job:
        raise PlanError("connect needs streams of the same job", where=str(origin))
    if first.has_event_time != second.has_event_time:
        without, other = (second, first) if first.has_event_time else (first, second)
        raise PlanError(
            f"`{without.name}` has no event time, `{other.name}` has: time would stand still, since it "
            "is that of the slower input",
            where=str(origin),
            fix=f"call .event_time(...) on `{without.name}` too; with idle_after= it does not hold time "
            "back while it is silent",
        )


def _add(
    inputs: Sequence[NodeOutput],
    operator: type[ProcessOperator],
    function: ProcessFunction[Any, Any],
    fields: Sequence[pa.Field] | None,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    policy = checked_on_error(on_error, origin)
    schema = None if into is None else into_schema(into, origin)
    main = inputs[0]
    declared = declared_states(
        function,
        fields,
        str(origin),
        event_time=main.has_event_time,
        keyed=main.keyed_by is not None,
    )
    methods = [getattr(function, method) for method in _METHODS[_kind_of(function)]]
    given = tuple(
        ProcessInput(_reader(output, method), output.key)
        for output, method in zip(inputs, methods, strict=True)
    )
    sides = side_names(function, origin)
    failed = failed_sides(policy, None)
    if FAILED in sides and failed:
        raise PlanError(
            f"`{type(function).__name__}.{FAILED}` has the name of the side output of failed records",
            where=str(origin),
            fix="give it another name, or do not use on_error=side_output",
        )
    step = ProcessStep(
        function,
        UserFunction(methods[0], name, origin, given[0].reader, schema, on_error=policy),
        given,
        declared,
        sides,
        main.has_event_time,
    )
    return main.add(
        Node(
            name=name,
            kind="process",
            origin=origin,
            inputs=tuple(output.as_input() for output in inputs),
            factory=partial(operator, step),
            schema=schema,
            row_type=record_class(into),
            stateful=True,
            sides={**dict.fromkeys(sides), **failed},
            detail=type(function).__name__,
            queryable=declared.queryable(fields and [field.name for field in fields], str(origin)),
            by_clock=ByClock.TIMERS if sets_clock_timers(function) else None,
        )
    )


def _reader(output: NodeOutput, method: Callable[..., Any]) -> RowReader:
    """Return the reader of records for a method that takes a record and a context."""
    # A key function gets the same records, and may read other columns: they stay whole for it.
    reads = None if callable(output.key) else method
    return RowReader(output.schema, output.row_type, reads, parameters=2)


def side_names(function: object, origin: Origin) -> tuple[str, ...]:
    """Return the names of the side outputs that a function declares."""
    try:
        return tuple(declared_sides(type(function)))
    except PlanError as error:
        raise PlanError(error.message, where=str(origin), fix=error.fix) from error


def _common_fields(first: NodeOutput, second: NodeOutput, origin: Origin) -> list[pa.Field] | None:
    """Return the key columns of both: the names of the first, the wider type of each pair."""
    ours, theirs = first.key_fields(origin), second.key_fields(origin)
    if ours is None or theirs is None:
        return ours or theirs
    types = [_common_type(a.type, b.type) for a, b in zip(ours, theirs, strict=False)]
    if len(ours) != len(theirs) or None in types:
        raise PlanError(
            f"`{first.name}` has the key ({_shown(ours)}), `{second.name}` has ({_shown(theirs)}): equal "
            "keys would not match",
            where=str(origin),
            fix="key both by columns of the same number and types; CAST in select makes them alike",
        )
    return [field.with_type(type_) for field, type_ in zip(ours, types, strict=True)]


def _common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    a, b = (t.value_type if pa.types.is_dictionary(t) else t for t in (one, other))
    if a == b or keeps_hash(b, a):
        return a
    return b if keeps_hash(a, b) else None


def _shown(fields: Sequence[pa.Field]) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in fields)


def _kind_of(function: object) -> type[Any]:
    return next(kind for kind in _METHODS if isinstance(function, kind))


def _checked(function: object, kind: type[Any], origin: Origin) -> ProcessFunction[Any, Any]:
    """Return the function, if it is a usable instance of its kind.

    Raises:
        PlanError: it is not.
    """
    if isinstance(function, type) and issubclass(function, kind):
        raise PlanError(
            f"process needs an instance, got the class `{function.__name__}`",
            where=str(origin),
            fix=f"write process({function.__name__}(), name=...)",
        )
    if not isinstance(function, kind):
        raise PlanError(
            f"process needs a {kind.__name__} here, got `{type(function).__name__}`",
            where=str(origin),
            fix=_fix(function, kind),
        )
    for method in (*_METHODS[kind], "on_timer", *_AT_TIMES):
        _check_method(function, kind, method, origin)
    checked: ProcessFunction[Any, Any] = function
    return checked


def _check_method(function: object, kind: type[Any], name: str, origin: Origin) -> None:
    method: Callable[..., Any] = getattr(function, name)
    if name in _METHODS[kind] and getattr(type(function), name) is getattr(kind, name):
        raise PlanError(
            f"`{type(function).__name__}` has no method {name}",
            where=str(origin),
            fix=f"write def {name}(self, ..., ctx): ...",
        )
    if is_async(method) or inspect.isasyncgenfunction(method):
        raise PlanError(
            f"{name} must be a plain function, and that of `{type(function).__name__}` is async",
            where=str(origin),
            fix="do the awaiting in an async map before or after it",
        )
    given = _GIVEN.get(name, ("the record", "the context"))
    check_takes(method, given, f"process with {name}", origin)


_GIVEN: Final = {
    "on_timer": ("the timer", "the context"),
    "on_batch": ("the groups of records", "the context"),
    "finish": ("the context",),
    "on_checkpoint_complete": ("the number of the checkpoint",),
    "on_checkpoint_aborted": ("the number of the checkpoint",),
}


def _fix(function: object, kind: type[Any]) -> str:
    if isinstance(function, CoProcess):
        return "a CoProcess has two inputs: keyed.connect(other_keyed).process(...)"
    if isinstance(function, BroadcastProcess):
        return "a BroadcastProcess has two inputs: keyed.connect(stream.broadcast()).process(...)"
    if isinstance(function, Process):
        return "a Process is for a stream without keys: stream.process(...); derive from hg.KeyedProcess"
    if kind is Process and isinstance(function, KeyedProcess | KeyedBatchProcess):
        return "call .key_by(...) or .key_with(...) before it, or derive from hg.Process"
    if isinstance(function, KeyedProcess | KeyedBatchProcess):
        return f"a {_kind_of(function).__name__} has one input: keyed.process(...)"
    return f"derive a class from hg.{kind.__name__}[...]; map and flat_map take functions"
