"""Steps with process functions: the stream methods, the checks of functions, and the nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

import pyarrow as pa

from ...errors import PlanError
from ...operators.functions.checks import check_takes, is_async
from ...operators.functions.dead_letters import FAILED, OnErrorLike, checked_on_error, failed_sides
from ...operators.graph import ByClock, Node
from ...operators.origin import Origin, capture_origin
from ...operators.partitioning import HashColumns, HashFunction
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
    Input,
    KeyedProcessOperator,
    ProcessOperator,
    ProcessStep,
)
from ...operators.rows import RowReader
from ...operators.schema import SchemaLike, record_class
from ...state.evolution import keeps_hash
from ..required_name import named
from ..stream_base import StreamBase, into_schema

if TYPE_CHECKING:
    from ..connected import BroadcastConnected, BroadcastStream, ConnectedStreams
    from ..stream import Stream

T = TypeVar("T")
U = TypeVar("U")
Out = TypeVar("Out")

KeyedBy = HashColumns | HashFunction
_AT_TIMES = ("finish", "on_checkpoint_complete", "on_checkpoint_aborted")
_METHODS: dict[type[Any], tuple[str, ...]] = {
    KeyedProcess: ("on_record",),
    Process: ("on_record",),
    KeyedBatchProcess: ("on_batch",),
    CoProcess: ("on_first", "on_second"),
    BroadcastProcess: ("on_record", "on_broadcast"),
}


def add_keyed(
    stream: Stream[Any],
    keyed_by: KeyedBy,
    function: object,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `keyed.process(...)`."""
    if isinstance(function, KeyedBatchProcess):
        return _add_batches(stream, keyed_by, function, name, into, on_error, origin)
    checked = _checked(function, KeyedProcess, origin)
    fields = _key_fields(stream, keyed_by, origin)
    inputs = ((stream, keyed_by),)
    return _add(inputs, KeyedProcessOperator, checked, fields, name, into, on_error, origin)


def add_keyless(
    stream: Stream[Any],
    function: object,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `stream.process(...)`."""
    checked = _checked(function, Process, origin)
    inputs = ((stream, None),)
    return _add(inputs, KeyedProcessOperator, checked, None, name, into, on_error, origin)


def _add_batches(
    stream: Stream[Any],
    keyed_by: KeyedBy,
    function: KeyedBatchProcess[Any, Any, Any],
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> Stream[Any]:
    _checked(function, KeyedBatchProcess, origin)
    schema = stream._columns("a KeyedBatchProcess", origin)
    fields = _key_fields(stream, keyed_by, origin)
    if fields is None:
        raise PlanError(
            "a KeyedBatchProcess needs a key made of columns, and key_with gives a function",
            where=str(origin),
            fix='make the key a column and name it: .select("*", "lower(url) AS key").key_by("key")',
        )
    if stream.has_event_time and EVENT_TIME_COLUMN in schema.names:
        raise PlanError(
            f"`{stream.name}` has a column `{EVENT_TIME_COLUMN}`, which is the event time "
            "of rows in a KeyedBatchProcess",
            where=str(origin),
            fix="give it another name with select",
        )
    inputs = ((stream, keyed_by),)
    operator = KeyedBatchProcessOperator
    made = schema if into is None else into
    result = _add(inputs, operator, function, fields, name, made, on_error, origin)
    if into is None:
        result._node.row_type = stream._row_type
    return result


def add_connected(
    first: tuple[Stream[Any], KeyedBy | None],
    second: tuple[Stream[Any], KeyedBy | None],
    function: object,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `keyed.connect(keyed).process(...)`, or of two streams without keys."""
    checked = _checked(function, CoProcess, origin)
    fields = _common_fields(
        _key_fields(*first, origin), _key_fields(*second, origin), first[0], second[0], origin
    )
    return _add((first, second), CoProcessOperator, checked, fields, name, into, on_error, origin)


def add_broadcast(
    keyed: tuple[Stream[Any], KeyedBy | None],
    broadcast: Stream[Any],
    function: object,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `keyed.connect(stream.broadcast()).process(...)`, or of a stream without keys."""
    checked = _checked(function, BroadcastProcess, origin)
    fields = _key_fields(*keyed, origin)
    inputs = (keyed, (broadcast, None))
    return _add(inputs, BroadcastProcessOperator, checked, fields, name, into, on_error, origin)


def check_connected(first: Stream[Any], second: Stream[Any], origin: Origin) -> None:
    """Raise PlanError unless two streams can be inputs of one step."""
    if first._job is not second._job:
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
    inputs: Sequence[tuple[Stream[Any], KeyedBy | None]],
    operator: type[ProcessOperator],
    function: ProcessFunction[Any, Any],
    fields: Sequence[pa.Field] | None,
    name: str,
    into: SchemaLike | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> Stream[Any]:
    policy = checked_on_error(on_error, origin)
    schema = None if into is None else into_schema(into, origin)
    main = inputs[0][0]
    declared = declared_states(
        function,
        fields,
        str(origin),
        event_time=main.has_event_time,
        keyed=inputs[0][1] is not None,
    )
    methods = [getattr(function, method) for method in _METHODS[_kind_of(function)]]
    given = tuple(
        Input(RowReader(stream.schema, stream._row_type, method), _key(keyed_by))
        for (stream, keyed_by), method in zip(inputs, methods, strict=True)
    )
    sides = _sides(function, origin)
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
    return main._like(
        main._job.add_node(
            Node(
                id=-1,
                name=name,
                kind="process",
                origin=origin,
                inputs=tuple(stream._input(keyed_by) for stream, keyed_by in inputs),
                factory=partial(operator, step),
                schema=schema,
                row_type=record_class(into),
                stateful=True,
                sides={**dict.fromkeys(sides), **failed},
                detail=type(function).__name__,
                by_clock=ByClock.TIMERS if sets_clock_timers(function) else None,
            )
        )
    )


def _sides(function: object, origin: Origin) -> tuple[str, ...]:
    try:
        return tuple(declared_sides(type(function)))
    except PlanError as error:
        raise PlanError(error.message, where=str(origin), fix=error.fix) from error


def _key(keyed_by: KeyedBy | None) -> Any:
    if isinstance(keyed_by, HashColumns):
        return keyed_by.columns
    return None if keyed_by is None else keyed_by.function


def _key_fields(
    stream: Stream[Any], keyed_by: KeyedBy | None, origin: Origin
) -> list[pa.Field] | None:
    if not isinstance(keyed_by, HashColumns):
        return None
    schema = stream._columns("key_by", origin)
    return [schema.field(column) for column in keyed_by.columns]


def _common_fields(
    first: list[pa.Field] | None,
    second: list[pa.Field] | None,
    one: Stream[Any],
    other: Stream[Any],
    origin: Origin,
) -> list[pa.Field] | None:
    """Return the key columns of both: the names of the first, the wider type of each pair."""
    if first is None or second is None:
        return first or second
    types = [_common_type(a.type, b.type) for a, b in zip(first, second, strict=False)]
    if len(first) != len(second) or None in types:
        raise PlanError(
            f"`{one.name}` has the key ({_shown(first)}), `{other.name}` has ({_shown(second)}): equal "
            "keys would not match",
            where=str(origin),
            fix="key both by columns of the same number and types; CAST in select makes them alike",
        )
    return [field.with_type(type_) for field, type_ in zip(first, types, strict=True)]


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


class Processes(StreamBase[T], Generic[T]):
    """Steps of functions with state of the subtask."""

    @named("stateful step", "its state is stored under this name")
    def process(
        self,
        function: Process[T, Out],
        *,
        name: str,
        into: SchemaLike | None = None,
        on_error: OnErrorLike = "fail",
    ) -> Stream[Out]:
        """Call a function with state of the subtask, and side outputs, for each record.

        Records keep their distribution: after `rebalance()` a subtask gets any of them. State per
        key and timers need `key_by` or `key_with` before.

        Args:
            function: an instance; each subtask works with a copy of it.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects.
            on_error: the handling of records for which it raises, as for `KeyedStream.process`.
        """
        from .process import add_keyless  # makes streams

        return add_keyless(self._whole, function, name, into, on_error, capture_origin())

    @overload
    def connect(self, other: BroadcastStream[U]) -> BroadcastConnected[T, U]: ...  # type: ignore[overload-overlap]
    @overload
    def connect(self, other: Stream[U]) -> ConnectedStreams[T, U]: ...
    def connect(
        self, other: Stream[U] | BroadcastStream[U]
    ) -> ConnectedStreams[T, U] | BroadcastConnected[T, U]:
        """Connect this stream and another, both without keys, for one function; follow with
        `.process(...)`.

        Args:
            other: a stream, or `stream.broadcast()`, which every subtask gets.
        """
        from ..connected import BroadcastConnected, BroadcastStream, ConnectedStreams
        from ..stream import Stream

        origin = capture_origin()
        if isinstance(other, BroadcastStream):
            return BroadcastConnected((self._whole, None), other, origin)
        if isinstance(other, Stream):
            return ConnectedStreams((self._whole, None), (other, None), origin)
        raise PlanError(
            f"connect needs a stream without keys here, got `{type(other).__name__}`",
            where=str(origin),
            fix="call .key_by(...) or .key_with(...) on both streams, or on none",
        )

    @property
    def _whole(self) -> Stream[Any]:
        from ..stream import Stream

        assert isinstance(self, Stream)
        return self
