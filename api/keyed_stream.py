"""KeyedStream and windows: records grouped by key, and the steps on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Generic, Self, TypeVar, overload

import polars as pl
import pyarrow as pa

from ..errors import PlanError
from ..operators.aggregation.aggregates import Aggregate, AggregatePlan
from ..operators.aggregation.reduce import ReduceOperator
from ..operators.aggregation.running_aggregate import RunningAggregate
from ..operators.async_calls.call import Retry
from ..operators.async_calls.map_async import OnTimeout
from ..operators.base import OperatorFactory
from ..operators.durations import Duration
from ..operators.expressions.expression_steps import SelectStep
from ..operators.expressions.expressions import Column
from ..operators.functions.checks import check_plain, check_returns, check_takes, function_name
from ..operators.functions.dead_letters import OnErrorLike
from ..operators.graph import ByClock, Node
from ..operators.origin import Origin, capture_origin
from ..operators.partitioning import HashColumns, HashFunction, Partitioning
from ..operators.patterns.match import Match
from ..operators.patterns.pattern import Pattern
from ..operators.per_record.base import MAX_IN_FLIGHT
from ..operators.process.batches import KeyedBatchProcess
from ..operators.process.emitter import SideOutput
from ..operators.process.functions import KeyedProcess
from ..operators.schema import SchemaLike, record_class, same_columns
from ..operators.suggestions import suggest
from ..operators.windows.kinds import Window, check_window
from ..operators.windows.late import late_sides
from ..operators.windows.records.assigners import WindowAssigner
from ..operators.windows.records.evictors import Evictor
from ..operators.windows.records.triggers import Trigger
from ..operators.windows.sessions.window import SessionWindow
from .connected import BroadcastConnected, BroadcastStream, ConnectedStreams
from .required_name import named
from .steps.async_calls import TIMEOUT, add_map_async
from .steps.joins import KeyedJoins, WindowedJoins
from .steps.patterns import add_match
from .steps.process import add_keyed
from .steps.windows import (
    AnyWindow,
    RecordWindowedStream,
    RecordWindows,
    Windows,
    needs_event_time,
    one_key,
    session_aggregate,
    why_records,
    window_aggregate,
    window_fields,
)
from .stream import Stream
from .stream_base import into_schema

T = TypeVar("T")
U = TypeVar("U")
Out = TypeVar("Out")

_STATE = "its state is stored under this name"


class KeyedStream(KeyedJoins[T], Generic[T]):
    """A stream partitioned by key."""

    def __init__(self, stream: Stream[T], keyed_by: HashColumns | HashFunction) -> None:
        self._stream = stream
        self._keyed_by = keyed_by

    def __repr__(self) -> str:
        by = self._keyed_by
        key = ", ".join(by.columns) if isinstance(by, HashColumns) else function_name(by.function)
        return f"KeyedStream(by {key} of {self._stream!r})"

    @named("stateful step", _STATE)
    def reduce(self, function: Callable[[T, T], T], *, name: str) -> Stream[T]:
        """Combine the records of each key, two at a time; emits the running value for each record.

        Args:
            function: `(value so far, record) -> new value`; a key's first record is its first value.
            name: the address of the state.
        """
        origin = capture_origin()
        check_plain(function, "reduce", origin)
        check_returns(function, "reduce", origin)
        check_takes(function, ("the value so far", "the record"), "reduce", origin)
        stream = self._stream
        row_type = stream._row_type
        key = self._keyed_by
        operator = partial(
            ReduceOperator,
            function,
            key.columns if isinstance(key, HashColumns) else key.function,
            schema=stream.schema,
            row_type=row_type,
            step=name,
            origin=origin,
        )
        return _add_stateful(
            stream, "reduce", name, origin, operator, self._keyed_by, stream.schema, row_type
        )

    @named("stateful step", _STATE)
    def process(
        self,
        function: KeyedProcess[Any, T, Out] | KeyedBatchProcess[Any, T, Out],
        *,
        name: str,
        into: SchemaLike | None = None,
        on_error: OnErrorLike = "fail",
    ) -> Stream[Out]:
        """Call a function with keyed state and timers for each record, or for each batch.

        Each result has the event time of its record, or of the timer that made it.

        Args:
            function: an instance; each subtask works with a copy of it.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects, or, for a
                `KeyedBatchProcess`, have the columns of this stream.
            on_error: the handling of records and timers for which it raises, as for `map`; their
                changes and results are undone. `.failed` has Python objects.
        """
        return add_keyed(
            self._stream, self._keyed_by, function, name, into, on_error, capture_origin()
        )

    @named("async step", "records with calls in flight are stored under this name")
    def map_async(
        self,
        function: Callable[[T], Awaitable[Out]],
        *,
        name: str,
        max_in_flight: int = MAX_IN_FLIGHT,
        timeout: Duration = TIMEOUT,
        retry: Retry | None = None,
        on_timeout: OnTimeout = "fail",
        on_error: OnErrorLike = "fail",
        into: SchemaLike | None = None,
    ) -> Stream[Out]:
        """Call a coroutine function for each record: those of one key one after the other, in order.

        Results of different keys are emitted as calls finish, but none crosses a watermark. The
        timeout of a record begins when its turn comes. Arguments as for `Stream.map_async`.
        """
        return add_map_async(
            self._stream,
            self._keyed_by,
            function,
            name=name,
            max_in_flight=max_in_flight,
            timeout=timeout,
            ordered=False,
            retry=retry,
            on_timeout=on_timeout,
            on_error=on_error,
            into=into,
            origin=capture_origin(),
        )

    @overload
    def match(
        self,
        pattern: Pattern[T],
        *,
        name: str,
        select: None = None,
        into: None = None,
    ) -> Stream[Match[T]]: ...
    @overload
    def match(
        self,
        pattern: Pattern[T],
        *,
        name: str,
        select: Callable[[Match[T]], Out],
        into: SchemaLike | None = None,
    ) -> Stream[Out]: ...
    @named("stateful step", _STATE)
    def match(
        self,
        pattern: Pattern[T],
        *,
        name: str,
        select: Callable[[Match[T]], Any] | None = None,
        into: SchemaLike | None = None,
    ) -> Stream[Any]:
        """Find a pattern in the records of each key, in order of event time, ties in order of arrival.

        Partial matches that were not complete in the time of `within` are in `.timed_out`, as
        `hg.cep.Match`; late records in `.late`.

        Args:
            pattern: begun with `hg.cep.begin`.
            name: the address of the state.
            select: a function of each `hg.cep.Match`; without it matches are emitted as they are.
            into: columns to make of the results of `select`.
        """
        return add_match(
            self._stream, self._keyed_by, pattern, select, name, into, capture_origin()
        )

    @overload
    def connect(self, other: KeyedStream[U]) -> ConnectedStreams[T, U]: ...
    @overload
    def connect(self, other: BroadcastStream[U]) -> BroadcastConnected[T, U]: ...
    def connect(
        self, other: KeyedStream[U] | BroadcastStream[U]
    ) -> ConnectedStreams[T, U] | BroadcastConnected[T, U]:
        """Connect this stream and another, for one function of both; follow with `.process(...)`.

        Args:
            other: a stream with the same keys, or `stream.broadcast()`, which every subtask gets.
        """
        origin = capture_origin()
        keyed = (self._stream, self._keyed_by)
        if isinstance(other, KeyedStream):
            return ConnectedStreams(keyed, (other._stream, other._keyed_by), origin)
        if isinstance(other, BroadcastStream):
            return BroadcastConnected(keyed, other, origin)
        raise PlanError(
            f"connect needs a keyed or a broadcast stream, got `{type(other).__name__}`",
            where=str(origin),
            fix="call .key_by(...) or .broadcast() on it",
        )

    @named("stateful step", _STATE)
    def agg(
        self, *, name: str, into: SchemaLike | None = None, **aggregates: Aggregate
    ) -> Stream[Any]:
        """Add running aggregates: the updated row of each key that a batch touched is emitted.

        Args:
            name: the address of the state.
            into: a class or schema that the result fits.
            aggregates: output columns, such as `n=hg.count(), total=hg.sum("amount")`.
        """
        origin = capture_origin()
        plan = _plan(self._stream, self._columns("agg", origin), aggregates, origin)
        result = _add_stateful(
            self._stream,
            "agg",
            name,
            origin,
            partial(RunningAggregate, plan, name),
            self._keyed_by,
            plan.result_schema,
            detail=plan.describe(),
            columns=plan.columns_read,
        )
        return _fitted(result, into, origin)

    @overload
    def window(self, window: Window | SessionWindow) -> WindowedStream[T]: ...
    @overload
    def window(
        self,
        window: WindowAssigner[T],
        *,
        trigger: Trigger[T] | None = None,
        evictor: Evictor[T] | None = None,
    ) -> RecordWindowedStream[T]: ...
    @overload
    def window(
        self, window: AnyWindow, *, trigger: Trigger[T], evictor: Evictor[T] | None = None
    ) -> RecordWindowedStream[T]: ...
    @overload
    def window(self, window: AnyWindow, *, evictor: Evictor[T]) -> RecordWindowedStream[T]: ...
    def window(
        self,
        window: AnyWindow | WindowAssigner[T],
        *,
        trigger: Trigger[T] | None = None,
        evictor: Evictor[T] | None = None,
    ) -> WindowedStream[T] | RecordWindowedStream[T]:
        """Cut the stream into windows; follow with `.agg(...)`, or with a function of records.

        Args:
            window: such as `hg.tumbling("1m")`, or a `hg.WindowAssigner` of your own.
            trigger: decides when windows fire, instead of at their end.
            evictor: leaves records out when they fire.
        """
        origin = capture_origin()
        check_window(window, origin)
        stream, key = self._stream, self._keyed_by
        why = why_records(
            stream.schema is not None,
            window,
            trigger,
            evictor,
            keyed_by_columns=isinstance(key, HashColumns),
            known=isinstance(window, Window | SessionWindow),
        )
        if why or not isinstance(window, Window | SessionWindow):
            return RecordWindowedStream(stream, key, window, trigger, evictor, why, origin)
        return WindowedStream(stream, self._columns("window", origin), key, window, origin)

    def _columns(self, what: str, origin: Origin) -> tuple[str, ...]:
        if isinstance(self._keyed_by, HashColumns):
            return self._keyed_by.columns
        raise PlanError(
            f"{what} needs a key made of columns, and key_with gives a function",
            where=str(origin),
            fix='make the key a column and name it: .select("*", "lower(url) AS key").key_by("key")',
        )


class WindowedStream(WindowedJoins, RecordWindows[T]):
    """Records in windows, per key; `agg` and the functions of records add a step."""

    def __init__(
        self,
        stream: Stream[Any],
        keys: tuple[str, ...],
        partitioning: Partitioning,
        window: Window | SessionWindow,
        origin: Origin,
    ) -> None:
        stream._columns("window", origin)
        if not isinstance(window, Window | SessionWindow):
            raise PlanError(
                f"not a window type=`{type(window).__name__}`",
                where=str(origin),
                fix='such as .window(hg.tumbling("1m"))',
            )
        if isinstance(window, SessionWindow) and window.processing:
            raise PlanError(
                "sessions in processing time need a key",
                where=str(origin),
                fix="call .key_with(lambda record: 0) before, for one window of all records",
            )
        if needs_event_time(window) and not stream.has_event_time:
            raise PlanError(
                f"a window needs event time, and `{stream.name}` has none",
                where=str(origin),
                fix='call .event_time("column", max_out_of_order="10s") before',
            )
        self._stream = stream
        self._keys = keys
        self._partitioning = partitioning
        self._window = window

    def _windows(self, origin: Origin) -> Windows:
        keyed_by = self._partitioning
        if not isinstance(keyed_by, HashColumns):
            keyed_by = HashFunction(one_key)
        return Windows(self._stream, keyed_by, self._window, None, None, origin)

    def __repr__(self) -> str:
        return f"WindowedStream({self._stream.name}, {self._window.describe()})"

    @named("stateful step", _STATE)
    def agg(
        self, *, name: str, into: SchemaLike | None = None, **aggregates: Aggregate
    ) -> Stream[Any]:
        """Add aggregates per key and window, emitted when the watermark has passed the window's end.

        The result has the key columns, `window_start`, `window_end` and the aggregates; for count
        and global windows it has no bounds. Late records are in the result's `.late` stream.

        Args:
            name: the address of the state.
            into: a class or schema that the result fits.
            aggregates: output columns, such as `n=hg.count(), total=hg.sum("amount")`.
        """
        origin = capture_origin()
        plan = _plan(self._stream, self._keys, aggregates, origin, window_fields(self._window))
        factory: OperatorFactory
        if isinstance(self._window, SessionWindow):
            factory, columns = session_aggregate(self._window, plan, name)
        else:
            factory = window_aggregate(self._window, plan, name)
            columns = plan.columns_read
        result = _add_stateful(
            self._stream,
            "window",
            name,
            origin,
            factory,
            self._partitioning,
            plan.result_schema,
            detail=f"{self._window.describe()}: {plan.describe()}",
            columns=columns,
            sides=late_sides(self._stream.schema) if needs_event_time(self._window) else None,
            by_clock=_by_clock(self._window),
        )
        return _fitted(result, into, origin)


def _by_clock(window: Window | SessionWindow) -> ByClock | None:
    if getattr(window, "processing", False):
        return ByClock.WINDOWS
    early = getattr(window, "early", None)
    return ByClock.EARLY if early is not None and early.every_ms else None


def _plan(
    stream: Stream[Any],
    keys: tuple[str, ...],
    aggregates: Mapping[str, Aggregate],
    origin: Origin,
    added: tuple[pa.Field, ...] = (),
) -> AggregatePlan:
    for column, aggregate in aggregates.items():
        if not isinstance(aggregate, Aggregate):
            raise PlanError(
                f"`{column}` is not an aggregate type=`{type(aggregate).__name__}`",
                where=str(origin),
                fix=f'such as {column}=hg.count() or {column}=hg.sum("amount")',
            )
    schema = stream._columns("agg", origin)
    return AggregatePlan(keys, dict(aggregates), schema, added, str(origin))


def _add_stateful(
    stream: Stream[Any],
    kind: str,
    name: str,
    origin: Origin,
    factory: OperatorFactory,
    partitioning: Partitioning,
    schema: pa.Schema | None,
    row_type: type[Any] | None = None,
    *,
    detail: str = "",
    columns: frozenset[str] | None = None,
    sides: dict[str, pa.Schema | None] | None = None,
    by_clock: ByClock | None = None,
) -> Stream[Any]:
    node = Node(
        id=-1,
        name=name,
        kind=kind,
        origin=origin,
        inputs=(stream._input(partitioning),),
        factory=factory,
        schema=schema,
        row_type=row_type,
        stateful=True,
        sides=sides or {},
        detail=detail,
        columns_read=columns,
        by_clock=by_clock,
    )
    return stream._like(stream._job.add_node(node))


def _fitted(stream: Stream[Any], into: SchemaLike | None, origin: Origin) -> Stream[Any]:
    """Return the stream with the columns of `into`: fewer, reordered, or cast without loss."""
    if into is None:
        return stream
    wanted = into_schema(into, origin)
    found = stream._columns("agg", origin)
    for name in wanted.names:
        if name not in found.names:
            raise PlanError(
                f"`{name}` of into= is not in the result of `{stream.name}`",
                where=str(origin),
                fix=suggest(name, found.names, "columns"),
            )
    node = stream._node
    if same_columns(wanted, found):
        node.row_type = record_class(into)
        return stream
    columns = tuple(_cast(field, found.field(field.name).type, origin) for field in wanted)
    step = SelectStep(columns, ", ".join(wanted.names))
    result = stream._expression("select", "", origin, step, found)
    result._node.row_type = record_class(into)
    return _WithSides(result, stream)


class _WithSides(Stream[Any]):
    """The result of a select, with the side outputs of the aggregate before it."""

    def __init__(self, stream: Stream[Any], before: Stream[Any]) -> None:
        super().__init__(stream._job, stream._node, has_event_time=stream._has_event_time)
        self._before = before

    def side(self, tag: SideOutput[Any] | str) -> Stream[Any]:
        return self._before.side(tag)

    def parallel(self, parallelism: int) -> Self:
        self._before.parallel(parallelism)
        return super().parallel(parallelism)


def _cast(field: pa.Field, found: pa.DataType, origin: Origin) -> Column:
    reads = frozenset([field.name])
    if found == field.type:
        return Column(field.name, pl.col(field.name), field.name, reads)
    kinds = (pa.types.is_timestamp, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if not any(kind(found) and kind(field.type) for kind in kinds):
        raise PlanError(
            f"`{field.name}` of into= is {field.type}, the result is {found}",
            where=str(origin),
            fix=f"change the type of `{field.name}`, or convert after agg with select",
        )
    return Column(field.name, pl.col(field.name).cast(_polars_type(field.type)), None, reads)


def _polars_type(kind: pa.DataType) -> Any:
    return pl.Series(pl.from_arrow(pa.array([], kind))).dtype
