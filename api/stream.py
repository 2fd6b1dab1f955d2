"""Stream: the records of a step, and the operations on them.

A stream is a value: use it twice and it branches. Methods only add to the job's graph; nothing
runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import polars as pl
import pyarrow as pa

from ..errors import PlanError, StateError
from ..operators.async_calls.map_async import TIMED_OUT
from ..operators.durations import Duration
from ..operators.expressions.expression_steps import FilterStep, SelectStep
from ..operators.expressions.expressions import ExpressionLike, check_filter, check_select, show
from ..operators.functions.checks import (
    check_plain,
    check_returns,
    check_takes,
    function_name,
    is_async,
)
from ..operators.functions.dead_letters import (
    FAIL,
    FAILED,
    OnErrorLike,
    checked_on_error,
    failed_sides,
)
from ..operators.functions.life import Results, with_life
from ..operators.graph import Node
from ..operators.origin import Origin, capture_origin
from ..operators.partitioning import (
    Custom,
    Global,
    HashColumns,
    HashFunction,
    Partitioning,
    Rebalance,
    Rescale,
    Shuffle,
)
from ..operators.per_record.base import MAX_IN_FLIGHT
from ..operators.per_record.operators import (
    AsyncFilterOperator,
    AsyncFlatMapOperator,
    AsyncMapOperator,
    FilterOperator,
    FlatMapOperator,
    MapOperator,
    UnionOperator,
)
from ..operators.process.emitter import SideOutput
from ..operators.schema import SchemaLike, united, unknown_column
from ..operators.sink import Sink, SinkOperator
from ..operators.source import REJECTED
from ..operators.suggestions import suggest
from ..operators.watermarks.strategy import WatermarkStrategy
from ..operators.windows.kinds import Window
from ..operators.windows.late import LATE, WITH_CONTEXT
from ..operators.windows.sessions.window import SessionWindow
from ..state.hashing import check_key_type
from .required_name import named
from .steps.async_calls import Calls
from .steps.event_time import add_event_time
from .steps.lookups import Lookups
from .steps.loops import Loops
from .steps.process import Processes

if TYPE_CHECKING:
    from .connected import BroadcastStream
    from .keyed_stream import KeyedStream, WindowedStream

T = TypeVar("T")
U = TypeVar("U")
_OF_KEYS: Final = frozenset(
    ["agg", "reduce", "match", "join", "join_as_of", "co_group", "process_batches"]
)


class Stream(Loops[T], Lookups[T], Calls[T], Processes[T]):
    """The records that a step of a job emits."""

    if not TYPE_CHECKING:  # a type checker shall report that these methods do not exist

        def __getattr__(self, name: str) -> Any:
            if name in _OF_KEYS:
                raise AttributeError(
                    f"`{name}` works on keyed streams, and key_by is missing: "
                    f'write .key_by("user_id").{name}(...), or .key_with(lambda record: ...).{name}(...)'
                )
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")

    # one record at a time

    @overload
    def filter(
        self,
        condition: ExpressionLike | Callable[[T], bool],
        *,
        name: str = "",
        max_in_flight: int = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[T]: ...
    @overload
    def filter(
        self,
        condition: Callable[[T], Awaitable[bool]],
        *,
        name: str = "",
        max_in_flight: int = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[T]: ...
    def filter(
        self,
        condition: ExpressionLike | Callable[[T], bool] | Callable[[T], Awaitable[bool]],
        *,
        name: str = "",
        max_in_flight: int = MAX_IN_FLIGHT,
        on_error: OnErrorLike = "fail",
    ) -> Stream[T]:
        """Keep the records for which a condition holds: SQL text, a `pl.Expr`, or a function.

        `max_in_flight` and `on_error`, as for `map`, are for functions.
        """
        origin = capture_origin()
        policy = checked_on_error(on_error, origin)
        if isinstance(condition, str | pl.Expr):
            if policy != FAIL:
                raise PlanError(
                    "on_error= is for functions, and this filter is an expression",
                    where=str(origin),
                    fix="leave it out: expressions give null where a function would raise",
                )
            schema = self._columns("filter by expression", origin)
            step = FilterStep(
                check_filter(condition, schema, "filter", str(origin)), show(condition)
            )
            return self._expression("filter", name, origin, step, schema)
        if not callable(condition):
            raise PlanError(
                f"filter needs a condition, got `{type(condition).__name__}`",
                where=str(origin),
                fix='give SQL text such as "amount > 0", a polars expression, or a function of the record',
            )
        check_returns(condition, "filter", origin)
        user = self._user_function("filter", name, origin, condition, None, max_in_flight, policy)
        operator = AsyncFilterOperator if is_async(condition) else FilterOperator
        return self._add(
            "filter",
            name,
            origin,
            with_life(
                partial(operator, user),
                condition,
                user.step,
                origin,
                Results(self.schema, self._has_event_time),
            ),
            is_async=is_async(condition),
            schema=self.schema,
            row_type=self._row_type,
            columns=user.reader.columns_read,
            detail=function_name(condition),
            sides=failed_sides(policy, self.schema),
        )

    def select(self, *expressions: ExpressionLike, name: str = "") -> Stream[Any]:
        """Compute new columns: column names, `"a * 2 AS b"`, `pl.Expr`; `"*"` is all."""
        origin = capture_origin()
        schema = self._columns("select", origin)
        columns = check_select(expressions, schema, "select", str(origin))
        step = SelectStep(tuple(columns), ", ".join(show(each) for each in expressions))
        return self._expression("select", name, origin, step, schema)

    @overload
    def map(
        self,
        function: Callable[[T], Awaitable[U]],
        *,
        name: str = "",
        max_in_flight: int = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[U]: ...
    @overload
    def map(
        self,
        function: Callable[[T], U],
        *,
        name: str = "",
        max_in_flight: int = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[U]: ...
    @overload
    def map(
        self,
        function: Callable[[T], Any],
        *,
        into: type[U],
        name: str = "",
        max_in_flight: int = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[U]: ...
    @overload
    def map(
        self,
        function: Callable[[T], Any],
        *,
        into: SchemaLike | None,
        name: str = "",
        max_in_flight: int = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[Any]: ...
    def map(
        self,
        function: Callable[[T], Any],
        *,
        into: SchemaLike | None = None,
        name: str = "",
        max_in_flight: int = MAX_IN_FLIGHT,
        on_error: OnErrorLike = "fail",
    ) -> Stream[Any]:
        """Call a function for each record; `async def` functions run concurrently, in order.

        Args:
            function: from a record to a record.
            into: make columns of the results: a Struct, dataclass or schema that they fit.
            name: names the step in errors and metrics.
            max_in_flight: for a coroutine function, the most concurrent calls per subtask.
            on_error: the handling of records for which it raises: `fail`, `drop`, `side_output`
                (the stream `.failed`), or an `OnError` with retries.
        """
        operators = (MapOperator, AsyncMapOperator)
        return self._per_record("map", operators, function, into, name, max_in_flight, on_error)

    def flat_map(
        self,
        function: Callable[[T], Iterable[U] | Awaitable[Iterable[U]] | AsyncIterable[U]],
        *,
        into: SchemaLike | None = None,
        name: str = "",
        max_in_flight: int = MAX_IN_FLIGHT,
        on_error: OnErrorLike = "fail",
    ) -> Stream[U]:
        """Call a function that returns any number of results for each record; arguments as for `map`."""
        operators = (FlatMapOperator, AsyncFlatMapOperator)
        return self._per_record(
            "flat_map", operators, function, into, name, max_in_flight, on_error
        )

    def event_time(
        self,
        when: str | Callable[[T], Any],
        *,
        max_out_of_order: Duration | None = None,
        strategy: WatermarkStrategy | None = None,
        idle_after: Duration | None = None,
        close_after: Duration | None = None,
        per_split: bool = True,
        wait_for_queued: bool | None = None,
        align: str | None = None,
        max_drift: Duration | None = None,
        align_every: Duration | None = None,
        on_error: OnErrorLike = "fail",
        name: str = "",
    ) -> Stream[T]:
        """Assign event times to the records, and derive watermarks.

        Args:
            when: a timestamp, date or int64 (ms) column, or a function of the record that returns
                int milliseconds since 1970 UTC or an aware datetime.
            max_out_of_order: how far a record may be behind the latest time of its split without
                being late; 0 by default.
            strategy: another rule for watermarks, instead of `max_out_of_order`.
            idle_after: a split, or a subtask, without records for this long no longer holds others
                back.
            close_after: after this long without records, time follows the clock, so that windows
                close.
            per_split: directly after a source, each of the splits being read has its own
                watermarks.
            wait_for_queued: splits that the reader has not reached, such as files in its queue,
                hold the watermark back as well: no record is late because of the order of files,
                and windows stay open until the last file is being read. The default is True
                directly after a source that ends, and False elsewhere.
            align: sources of the same group, by its name, wait for each other.
            max_drift: how far a split may be ahead of the slowest subtask of its group.
            align_every: how often the group exchanges watermarks; 1s by default.
            on_error: the handling of records that have no event time (null, out of range, or the
                function raised), as for `map`.
            name: names the step in errors and metrics.
        """
        return add_event_time(
            self,
            when,
            max_out_of_order=max_out_of_order,
            strategy=strategy,
            idle_after=idle_after,
            close_after=close_after,
            per_split=per_split,
            wait_for_queued=wait_for_queued,
            align=align,
            max_drift=max_drift,
            align_every=align_every,
            on_error=on_error,
            name=name,
        )

    # several streams, and where records go

    def union(self, *others: Stream[T], name: str = "") -> Stream[T]:
        """Merge this stream and others; their columns must be the same."""
        origin = capture_origin()
        streams = (self, *others)
        for other in others:
            self._check_union(other, origin)
        schemas = [stream.schema for stream in streams if stream.schema is not None]
        node = Node(
            id=-1,
            name=name,
            kind="union",
            origin=origin,
            inputs=tuple(stream._input() for stream in streams),
            factory=UnionOperator,
            schema=united(*schemas) if schemas else None,
            row_type=self._row_type
            if all(stream._row_type is self._row_type for stream in streams)
            else None,
            columns_read=frozenset(),
        )
        return self._like(self._job.add_node(node))

    def rebalance(self) -> Stream[T]:
        """Distribute batches over all subtasks of the next step in turn."""
        return self._routed(Rebalance())

    def rescale(self) -> Stream[T]:
        """Distribute batches in turn over the nearby subtasks of the next step only."""
        return self._routed(Rescale())

    def shuffle(self) -> Stream[T]:
        """Send each batch to a random subtask of the next step."""
        return self._routed(Shuffle())

    def broadcast(self, *, name: str = "") -> BroadcastStream[T]:
        """Send every record to every subtask of the next step, for `connect`.

        Args:
            name: the name of the stream in errors; by default that of its step.
        """
        from .connected import BroadcastStream  # broadcast streams are streams

        return BroadcastStream(self, name)

    def to_one(self) -> Stream[T]:
        """Run the next step in a single subtask."""
        return self._routed(Global())

    def partition_with(self, function: Callable[[T, int], int]) -> Stream[T]:
        """Send each record to the subtask `function(record, parallelism)` of the next step."""
        origin = capture_origin()
        check_plain(function, "partition_with", origin)
        check_takes(function, ("the record", "the parallelism"), "partition_with", origin)
        return self._routed(Custom(function))

    def key_by(self, *columns: str) -> KeyedStream[T]:
        """Partition the records by the values of these columns.

        Floats are refused: results of float arithmetic may differ in the last bit.
        """
        from .keyed_stream import KeyedStream  # keyed streams are made of streams

        origin = capture_origin()
        schema = self._columns("key_by", origin)
        if not columns:
            raise PlanError(
                "key_by needs a column", where=str(origin), fix='such as key_by("user_id")'
            )
        for column in columns:
            if not isinstance(column, str):
                raise PlanError(
                    f"key_by takes the names of columns, got `{type(column).__name__}`",
                    where=str(origin),
                    fix='such as key_by("user_id", "day"); key_with takes a function of the record',
                )
        if len(set(columns)) < len(columns):
            raise PlanError("key_by names a column twice", where=str(origin))
        for column in columns:
            if column not in schema.names:
                raise unknown_column(column, schema, "key_by", str(origin))
            _check_key(column, schema.field(column).type, origin)
        return KeyedStream(self, HashColumns(tuple(columns)))

    def key_with(self, function: Callable[[T], Hashable]) -> KeyedStream[T]:
        """Partition the records by `function(record)`: no floats, no mutable values."""
        from .keyed_stream import KeyedStream

        origin = capture_origin()
        check_plain(function, "key_with", origin)
        check_takes(function, ("the record",), "key_with", origin)
        self._check_reads(function, "key_with", origin)
        return KeyedStream(self, HashFunction(function))

    def window(self, window: Window | SessionWindow) -> WindowedStream[T]:
        """Put all records of a window together, whatever their key, in one subtask."""
        from .keyed_stream import WindowedStream

        return WindowedStream(self, (), Global(), window, capture_origin())

    @overload
    def side(self, tag: SideOutput[U]) -> Stream[U]: ...
    @overload
    def side(self, tag: str) -> Stream[Any]: ...
    def side(self, tag: SideOutput[U] | str) -> Stream[Any]:
        """Return a side output of the step that makes this stream: `Function.attribute`, or its name."""
        tag = tag.name if isinstance(tag, SideOutput) else tag
        if tag not in self._node.sides or self._side is not None:
            sides = [] if self._side is not None else list(self._node.sides)
            raise PlanError(
                f"`{self.name}` has no side output `{tag}`",
                where=str(capture_origin()),
                fix=suggest(tag, sides, "side outputs"),
            )
        # Records without event time are emitted by `event_time`, too.
        untimed = tag == FAILED and self._node.kind == "event_time"
        timed = self._has_event_time and not untimed
        return Stream(self._job, self._node, side=tag, has_event_time=timed)

    @property
    def late(self) -> Stream[Any]:
        """The records that were too late for their window, join or pattern."""
        return self.side(LATE)

    @property
    def late_with_context(self) -> Stream[Any]:
        """The records of `.late`, each with its context.

        The late record is in the column `record`. The others are `event_time`; `lateness_ms`,
        how far the watermark was ahead of it, ms; `window_start` and `window_end` of the last
        window that it would have been in, null for steps without windows; and `operator`. In a
        stream of Python objects they are `hg.LateRecord`.
        """
        return self.side(LATE + WITH_CONTEXT)

    @property
    def timed_out(self) -> Stream[Any]:
        """The records of a `map_async` whose calls timed out; for a pattern, the partial matches
        that did."""
        return self.side(TIMED_OUT)

    @property
    def failed(self) -> Stream[Any]:
        """The records for which the function of this step raised, with the error."""
        return self.side(FAILED)

    @property
    def rejected(self) -> Stream[Any]:
        """The records that a source could not read."""
        return self.side(REJECTED)

    @named("sink", "the record of what it has written is stored under this name")
    def write(
        self,
        sink: Sink,
        *,
        name: str,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> None:
        """Send the records to a sink; its default slot sharing group is that of its input."""
        origin = capture_origin()
        if not isinstance(sink, Sink):
            raise PlanError(f"write needs a sink, got `{type(sink).__name__}`", where=str(origin))
        self._check_sink(sink, name, origin)
        node = Node(
            id=-1,
            name=name,
            kind="sink",
            origin=origin,
            inputs=(self._input(),),
            factory=partial(SinkOperator, sink),
            sink=sink,
            parallelism=parallelism,
            slot_sharing_group=slot_sharing_group
            and self._job.check_group(slot_sharing_group, origin),
            stateful=True,
            detail=sink.describe(),
        )
        self._job.add_node(node)

    def _routed(self, partitioning: Partitioning) -> Stream[T]:
        return Stream(
            self._job,
            self._node,
            side=self._side,
            partitioning=partitioning,
            has_event_time=self._has_event_time,
        )


def _check_key(column: str, kind: pa.DataType, origin: Origin) -> None:
    if pa.types.is_floating(kind):
        raise PlanError(
            f"column `{column}` is a float, and floats are no keys type=`{kind}`",
            where=str(origin),
            fix=f"equal amounts may differ in the last bit; convert it to whole numbers, such as "
            f'.select("*", "CAST(round({column} * 100) AS BIGINT) AS {column}_100")',
        )
    try:
        check_key_type(kind)
    except StateError as error:
        raise PlanError(
            f"{error.message} column=`{column}`", where=str(origin), fix=error.fix
        ) from None
