"""Stream: the records of a step, and the operations on them.

A stream is a value: use it twice and it branches. Methods only add to the job's graph; nothing
runs. Steps that few jobs have are imported by the method that adds them.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, overload

import pyarrow as pa

from ..errors import PlanError
from ..operators.durations import Duration, parse_duration
from ..operators.expressions.expressions import ExpressionLike
from ..operators.functions.dead_letters import FAILED, OnErrorLike
from ..operators.graph import Chaining
from ..operators.notebook import html_table
from ..operators.origin import capture_origin
from ..operators.partitioning import Broadcast, Global, Rebalance, Rescale, Shuffle
from ..operators.per_record.base import MAX_IN_FLIGHT, TIMEOUT
from ..operators.schema import SchemaLike
from ..operators.sink import Sink
from ..operators.source import REJECTED
from .node_output import NodeOutput
from .required_name import named
from .steps.distribution import distributed_by_function, keyed_by_columns, keyed_by_function
from .steps.event_time import WatermarkArguments, add_event_time
from .steps.per_record import (
    BatchSizes,
    add_filter,
    add_map,
    add_map_batches,
    add_select,
    add_sink,
    add_union,
)

if TYPE_CHECKING:
    from ..operators.async_calls.call import Retry
    from ..operators.async_calls.map_async import OnTimeout
    from ..operators.joins.lookup import LookupFunction, LookupHow, LookupService
    from ..operators.joins.static_table import StaticTable
    from ..operators.process.emitter import SideOutput
    from ..operators.process.functions import Process
    from ..operators.watermarks.strategy import WatermarkStrategy
    from ..operators.windows.kinds import Window
    from ..operators.windows.sessions.window import SessionWindow
    from .connected import BroadcastConnected, BroadcastStream, ConnectedStreams
    from .keyed_stream import KeyedStream, WindowedStream
    from .steps.loops import OpenLoop

T = TypeVar("T")
U = TypeVar("U")
Out = TypeVar("Out")
_OF_KEYS: Final = frozenset(
    ["agg", "reduce", "match", "join", "join_as_of", "co_group", "process_batches"]
)


class Stream(Generic[T]):
    """The records that a step of a job emits."""

    def __init__(self, output: NodeOutput) -> None:
        self._output = output

    if not TYPE_CHECKING:  # a type checker shall report that these methods do not exist

        def __getattr__(self, name: str) -> Any:
            if name in _OF_KEYS:
                raise AttributeError(
                    f"`{name}` works on keyed streams, and key_by is missing: "
                    f'write .key_by("user_id").{name}(...), or .key_with(lambda record: ...).{name}(...)'
                )
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of the records; None for a stream of Python objects."""
        return self._output.schema

    @property
    def name(self) -> str:
        """The name of the step that makes this stream."""
        return self._output.name

    @property
    def has_event_time(self) -> bool:
        """True after `event_time`, where records have event times."""
        return self._output.has_event_time

    def __repr__(self) -> str:
        """Show the name and the columns: `Stream(clicks: url string, at timestamp[ms])`."""
        schema = self.schema
        columns = ["Python objects"] if schema is None else [f"{f.name} {f.type}" for f in schema]
        time = "; event time" if self.has_event_time else ""
        return f"{type(self).__name__}({self.name}: {', '.join(columns)}{time})"

    def _repr_html_(self) -> str:
        """The columns and their types as a table, which notebooks show."""
        time = ", with event time" if self.has_event_time else ""
        columns = [(field.name, field.type) for field in self.schema or ()]
        records = "" if self.schema is not None else " of Python objects"
        return html_table(f"{type(self).__name__} {self.name}{records}{time}", columns)

    def show(self, n: int = 10, *, within: Duration = "10s") -> None:
        """Print the first records of this stream as a table.

        Runs the part of the job that makes the stream, in this process and with parallelism 1, until
        there are `n` records, the input ends, or the time is up. Nothing is written: the job's sinks and
        other branches do not run, and its checkpoints are neither read nor written. Functions of steps on
        the way are called. A window fires only when its time has come, so showing one may take much of the
        input.

        Args:
            n: the most records to print.
            within: how long to wait for them.

        Raises:
            UsageError: the job is wrong as written, or a source keeps its data in the job's storage.
            JobError: a step failed.
        """
        origin = capture_origin()
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise PlanError(
                f"show needs a whole number of records from 1 n=`{n}`", where=str(origin)
            )
        within_ms = parse_duration(within, "within", str(origin))
        self._output.job.show(self._output, n, within_ms, origin)

    def parallel(self, parallelism: int) -> Self:
        """Run the step that makes this stream in this many subtasks."""
        self._output.set_parallelism(parallelism, capture_origin())
        return self

    def start_new_chain(self) -> Self:
        """Do not run the step in the same subtask as the one before it."""
        node = self._output.own_node("start_new_chain", capture_origin())
        if node.chaining is Chaining.ALWAYS:
            node.chaining = Chaining.HEAD
        return self

    def disable_chaining(self) -> Self:
        """Do not run the step in the same subtask as any other."""
        self._output.own_node("disable_chaining", capture_origin()).chaining = Chaining.NEVER
        return self

    def slot_sharing_group(self, name: str) -> Self:
        """Run the step only in slots of this group, whose resources the job declares.

        The steps behind it are in the same group, unless they name another, or read streams of several
        groups: then they are in the group `default`. Steps of different groups share no slot and no chain.

        Raises:
            PlanError: the job declares no such group.
        """
        origin = capture_origin()
        node = self._output.own_node("slot_sharing_group", origin)
        node.slot_sharing_group = self._output.job.check_group(name, origin)
        return self

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
        return Stream(add_filter(self._output, condition, name, max_in_flight, on_error, origin))

    def select(self, *expressions: ExpressionLike, name: str = "") -> Stream[Any]:
        """Compute new columns: column names, `"a * 2 AS b"`, `pl.Expr`; `"*"` is all."""
        return Stream(add_select(self._output, expressions, name, capture_origin()))

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
        origin = capture_origin()
        return Stream(
            add_map(self._output, "map", function, into, name, max_in_flight, on_error, origin)
        )

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
        origin = capture_origin()
        return Stream(
            add_map(self._output, "flat_map", function, into, name, max_in_flight, on_error, origin)
        )

    def map_batches(
        self,
        function: Callable[[pa.RecordBatch], Any],
        *,
        into: SchemaLike | None = None,
        name: str = "",
        rows: int | None = None,
        within: Duration | None = None,
        max_in_flight: int | None = None,
        on_error: OnErrorLike = "fail",
    ) -> Stream[Any]:
        """Call a function with whole `pa.RecordBatch`es. Results must not depend on the batch boundaries.

        Args:
            function: returns a RecordBatch; if it has as many rows as the input, they keep their
                event times, in order.
            into: the columns of the result, if they differ from those of the input.
            name: names the step in errors and metrics; with `rows` and an `async def` function it
                is the address of the state.
            rows: call it with this many rows at a time; fewer at barriers, watermarks and the end.
            within: the longest time a row waits for a batch of `rows` to fill; 50 ms by default.
            max_in_flight: for an `async def` function with `rows`, the batches in flight, 4 by
                default.
            on_error: the handling of records for which it raises; the batch is called in ever
                smaller parts until they are found.
        """
        return Stream(
            add_map_batches(
                self._output,
                function,
                BatchSizes(rows, within, max_in_flight),
                into=into,
                name=name,
                on_error=on_error,
                origin=capture_origin(),
            )
        )

    @named("async step", "records with calls in flight are stored under this name")
    def map_async(
        self,
        function: Callable[[T], Awaitable[U]],
        *,
        name: str,
        max_in_flight: int = MAX_IN_FLIGHT,
        timeout: Duration = TIMEOUT,
        ordered: bool = True,
        retry: Retry | None = None,
        on_timeout: OnTimeout = "fail",
        on_error: OnErrorLike = "fail",
        into: SchemaLike | None = None,
    ) -> Stream[U]:
        """Call a coroutine function for each record; records with calls in flight are state.

        Args:
            function: from a record to a record.
            name: the address of the state.
            max_in_flight: calls begun whose results were not emitted yet, per subtask.
            timeout: for a record, from its first attempt to the end of its last.
            ordered: results keep the order of the records; otherwise they are emitted as calls
                finish, but none crosses a watermark.
            retry: when the function is called again for the same record.
            on_timeout: the handling of a timed-out record: `fail`, `side_output` (the stream
                `.timed_out`), or a function of the record that gives the result instead.
            on_error: the handling of a record whose last attempt raised.
            into: make columns of the results.
        """
        from .steps.async_calls import CallArguments, add_map_async

        return Stream(
            add_map_async(
                self._output,
                function,
                CallArguments(
                    max_in_flight=max_in_flight,
                    timeout=timeout,
                    ordered=ordered,
                    retry=retry,
                    on_timeout=on_timeout,
                    on_error=on_error,
                ),
                name=name,
                into=into,
                origin=capture_origin(),
            )
        )

    @overload
    def lookup(
        self,
        key: str | tuple[str, ...],
        function: LookupFunction,
        *,
        into: SchemaLike,
        name: str,
        suffix: str | None = ...,
        cache_rows: int = ...,
        cache_for: Duration = ...,
        max_in_flight: int = ...,
        timeout: Duration = ...,
        ordered: bool = ...,
        retry: Retry | None = ...,
        on_timeout: OnTimeout = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[Any]: ...
    @overload
    def lookup(
        self,
        key: str | tuple[str, ...],
        function: LookupService,
        *,
        name: str,
        suffix: str | None = ...,
        cache_rows: int = ...,
        cache_for: Duration = ...,
        max_in_flight: int = ...,
        timeout: Duration = ...,
        ordered: bool = ...,
        retry: Retry | None = ...,
        on_timeout: OnTimeout = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[Any]: ...
    @overload
    def lookup(
        self,
        key: str | tuple[str, ...],
        function: StaticTable,
        *,
        how: LookupHow = ...,
        suffix: str | None = ...,
        name: str = ...,
    ) -> Stream[Any]: ...
    def lookup(
        self,
        key: str | tuple[str, ...],
        function: LookupFunction | LookupService | StaticTable,
        *,
        how: LookupHow = "left",
        suffix: str | None = None,
        name: str = "",
        into: SchemaLike | None = None,
        cache_rows: int | None = None,
        cache_for: Duration | None = None,
        max_in_flight: int | None = None,
        timeout: Duration | None = None,
        ordered: bool | None = None,
        retry: Retry | None = None,
        on_timeout: OnTimeout | None = None,
        on_error: OnErrorLike | None = None,
    ) -> Stream[Any]:
        """Join each record with what a coroutine function, or a static table, has for its key.

        Args:
            key: the column whose value `function` gets; with several it gets a tuple.
            function: from a key to a record (a mapping or an object) with the columns of `into`, or
                None, which gives nulls; or what `postgres_lookup` returns, which knows its columns; or a
                table made by `hg.static_table`.
            how: for tables: `left` gives nulls where the table has no row, `inner` drops such
                records.
            suffix: appended to found columns whose names are taken.
            name: for functions, the address of the state.
            into: for functions, the columns that are found; they may be null in the result.
            cache_rows: for functions, the answers kept per process and step, None among them; 0:
                none. The default is 10,000.
            cache_for: for functions, how long an answer is valid; the default is 1m.
            max_in_flight: for functions, as for `map_async`; so are the arguments after it.
        """
        from .steps.lookups import LookupArguments, add_lookup

        return Stream(
            add_lookup(
                self._output,
                key,
                function,
                LookupArguments(
                    into=into,
                    cache_rows=cache_rows,
                    cache_for=cache_for,
                    max_in_flight=max_in_flight,
                    timeout=timeout,
                    ordered=ordered,
                    retry=retry,
                    on_timeout=on_timeout,
                    on_error=on_error,
                ),
                how=how,
                suffix=suffix,
                name=name,
                origin=capture_origin(),
            )
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
        return Stream(
            add_event_time(
                self._output,
                when,
                WatermarkArguments(
                    max_out_of_order=max_out_of_order,
                    strategy=strategy,
                    idle_after=idle_after,
                    close_after=close_after,
                    per_split=per_split,
                    wait_for_queued=wait_for_queued,
                    align=align,
                    max_drift=max_drift,
                    align_every=align_every,
                ),
                on_error=on_error,
                name=name,
                origin=capture_origin(),
            )
        )

    # functions with state, and loops

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
        from .steps.process import add_keyless

        made = add_keyless(self._output, function, name, into, on_error, capture_origin())
        return Stream(made)

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
        from .connected import BroadcastConnected, BroadcastStream, ConnectedStreams

        origin = capture_origin()
        if isinstance(other, BroadcastStream):
            return BroadcastConnected(self._output, other._output, origin)
        if isinstance(other, Stream):
            return ConnectedStreams(self._output, other._output, origin)
        raise PlanError(
            f"connect needs a stream without keys here, got `{type(other).__name__}`",
            where=str(origin),
            fix="call .key_by(...) or .key_with(...) on both streams, or on none",
        )

    @named("iteration", "records under way in the loop are stored under this name")
    def iterate(
        self,
        body: Callable[[Stream[T]], tuple[Stream[T], Stream[U]]],
        *,
        name: str,
        wait: Duration = "0s",
        parallelism: int | None = None,
    ) -> Stream[U]:
        """Add a loop: `body(stream) -> (feedback, output)`; records of `feedback` go back into `stream`.

        It ends when the inputs have ended and no records are in flight in it any more.

        Args:
            body: called once, now, to build the steps of the loop.
            name: the address of the state.
            wait: the loop ends only after it was empty for this long.
            parallelism: of both ends of the loop.
        """
        from .steps.loops import begin_loop

        origin = capture_origin()
        loop = begin_loop(
            self._output, body, name=name, wait=wait, parallelism=parallelism, origin=origin
        )
        return _closed(loop, body)

    @named("iteration", "records under way in the loop are stored under this name")
    def iterate_rounds(
        self,
        body: Callable[[Stream[T]], tuple[Stream[T], Stream[U]]],
        *,
        name: str,
        max_rounds: int,
        while_any: ExpressionLike | Callable[[T], Any] | None = None,
        parallelism: int | None = None,
    ) -> Stream[U]:
        """Add a loop in rounds, for input that ends: the feedback of one round is the input of the next.

        Event time in the loop is the number of the round, from 0; when a round is over in all
        subtasks, it is the watermark. The loop ends after a round without feedback, or as
        `while_any` or `max_rounds` say; then the feedback of the last round is dropped.

        Args:
            body: called once, now, to build the steps of the loop.
            name: the address of the state.
            max_rounds: the most rounds.
            while_any: there is another round only if this holds for some record of the feedback.
            parallelism: of both ends of the loop.
        """
        from .steps.loops import begin_rounds

        origin = capture_origin()
        loop = begin_rounds(
            self._output,
            body,
            name=name,
            max_rounds=max_rounds,
            while_any=while_any,
            parallelism=parallelism,
            origin=origin,
        )
        return _closed(loop, body)

    # several streams, and where records go

    def union(self, *others: Stream[T], name: str = "") -> Stream[T]:
        """Merge this stream and others; their columns must be the same."""
        given = [other._output if isinstance(other, Stream) else None for other in others]
        return Stream(add_union(self._output, given, name, capture_origin()))

    def rebalance(self) -> Stream[T]:
        """Distribute batches over all subtasks of the next step in turn."""
        return Stream(self._output.distributed(Rebalance()))

    def rescale(self) -> Stream[T]:
        """Distribute batches in turn over the nearby subtasks of the next step only."""
        return Stream(self._output.distributed(Rescale()))

    def shuffle(self) -> Stream[T]:
        """Send each batch to a random subtask of the next step."""
        return Stream(self._output.distributed(Shuffle()))

    def broadcast(self, *, name: str = "") -> BroadcastStream[T]:
        """Send every record to every subtask of the next step, for `connect`.

        Args:
            name: the name of the stream in errors; by default that of its step.
        """
        from .connected import BroadcastStream  # broadcast streams are streams

        return BroadcastStream(replace(self._output, partitioning=Broadcast(), label=name))

    def to_one(self) -> Stream[T]:
        """Run the next step in a single subtask."""
        return Stream(self._output.distributed(Global()))

    def partition_with(self, function: Callable[[T, int], int]) -> Stream[T]:
        """Send each record to the subtask `function(record, parallelism)` of the next step."""
        return Stream(distributed_by_function(self._output, function, capture_origin()))

    def key_by(self, *columns: str) -> KeyedStream[T]:
        """Partition the records by the values of these columns.

        Floats are refused: results of float arithmetic may differ in the last bit.
        """
        from .keyed_stream import KeyedStream  # keyed streams are made of streams

        return KeyedStream(keyed_by_columns(self._output, columns, capture_origin()))

    def key_with(self, function: Callable[[T], Hashable]) -> KeyedStream[T]:
        """Partition the records by `function(record)`: no floats, no mutable values."""
        from .keyed_stream import KeyedStream

        return KeyedStream(keyed_by_function(self._output, function, capture_origin()))

    def window(self, window: Window | SessionWindow) -> WindowedStream[T]:
        """Put all records of a window together, whatever their key, in one subtask."""
        from .keyed_stream import WindowedStream

        return WindowedStream(self._output.distributed(Global()), window, capture_origin())

    # results

    @overload
    def side(self, tag: SideOutput[U]) -> Stream[U]: ...
    @overload
    def side(self, tag: str) -> Stream[Any]: ...
    def side(self, tag: SideOutput[U] | str) -> Stream[Any]:
        """Return a side output of the step that makes this stream: `Function.attribute`, or its name."""
        from ..operators.process.emitter import SideOutput

        tag = tag.name if isinstance(tag, SideOutput) else tag
        return Stream(self._output.side_output(tag, capture_origin()))

    @property
    def late(self) -> Stream[Any]:
        """The records that were too late for their window, join or pattern."""
        from ..operators.windows.late import LATE

        return self.side(LATE)

    @property
    def late_with_context(self) -> Stream[Any]:
        """The records of `.late`, each with its context.

        The late record is in the column `record`. The others are `event_time`; `lateness_ms`,
        how far the watermark was ahead of it, ms; `window_start` and `window_end` of the last
        window that it would have been in, null for steps without windows; and `operator`. In a
        stream of Python objects they are `hg.LateRecord`.
        """
        from ..operators.windows.late import LATE, WITH_CONTEXT

        return self.side(LATE + WITH_CONTEXT)

    @property
    def timed_out(self) -> Stream[Any]:
        """The records of a `map_async` whose calls timed out; for a pattern, the partial matches
        that did."""
        from ..operators.async_calls.map_async import TIMED_OUT

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
        add_sink(self._output, sink, name, parallelism, slot_sharing_group, origin)


def output_of(stream: Stream[Any]) -> NodeOutput:
    """The inside of a stream, for headgate's own modules."""
    return stream._output


def _closed(loop: OpenLoop, body: Callable[[Any], object]) -> Stream[Any]:
    """Call the user's function that adds the steps in a loop, and close the loop with its feedback."""
    from .steps.loops import end_loop

    inside: Stream[Any] = Stream(loop.inside)
    result = body(inside)
    pair = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    feedback, output = pair
    if not isinstance(feedback, Stream) or not isinstance(output, Stream):
        raise PlanError(
            f"the body of `{inside.name}` must return two streams, the feedback and the output, and "
            f"returned `{type(result).__name__}`",
            where=str(loop.origin),
            fix="return feedback, output; add a step to a keyed stream first",
        )
    end_loop(loop, feedback._output, output._output)
    return output
