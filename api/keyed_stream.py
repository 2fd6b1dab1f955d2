"""KeyedStream and windows: records grouped by key, and the steps on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, TypeVar, overload

from ..errors import PlanError
from ..operators.aggregation.aggregates import Aggregate
from ..operators.async_calls.call import Retry
from ..operators.async_calls.map_async import OnTimeout
from ..operators.durations import Duration
from ..operators.functions.checks import function_name
from ..operators.functions.dead_letters import OnErrorLike
from ..operators.joins.co_group import CoGroupFunction
from ..operators.joins.step import How
from ..operators.origin import Origin, capture_origin
from ..operators.partitioning import HashColumns
from ..operators.patterns.match import Match
from ..operators.patterns.pattern import Pattern
from ..operators.per_record.base import MAX_IN_FLIGHT, TIMEOUT
from ..operators.process.batches import KeyedBatchProcess
from ..operators.process.deduplicate import first_of_each_key
from ..operators.process.functions import KeyedProcess
from ..operators.schema import SchemaLike
from ..operators.windows.kinds import Window, check_window
from ..operators.windows.records.assigners import WindowAssigner
from ..operators.windows.records.evictors import Evictor
from ..operators.windows.records.functions import AggregateFunction, WindowProcess
from ..operators.windows.records.triggers import Trigger
from ..operators.windows.sessions.window import SessionWindow
from ..state.keyed.ttl import StateTtl
from ..state.queryable import Queryable
from .connected import BroadcastConnected, BroadcastStream, ConnectedStreams
from .node_output import NodeOutput
from .required_name import named
from .steps.aggregates import add_aggregate, add_reduce, add_window_aggregate, check_windowed
from .steps.async_calls import CallArguments, add_map_async
from .steps.joins import (
    add_as_of_join,
    add_co_group,
    add_interval_join,
    add_window_join,
    check_keyed,
)
from .steps.patterns import add_match
from .steps.process import add_keyed
from .steps.windows import AnyWindow, Windows, describe, why_records
from .stream import Stream, output_of

T = TypeVar("T")
U = TypeVar("U")
Out = TypeVar("Out")

_STATE: Final = "its state is stored under this name"


class KeyedStream(Generic[T]):
    """A stream partitioned by key."""

    def __init__(self, output: NodeOutput) -> None:
        self._output = output

    def __repr__(self) -> str:
        key = self._output.key
        by = ", ".join(key) if isinstance(key, tuple) else function_name(key)
        return f"KeyedStream(by {by} of {Stream[T](self._output)!r})"

    @named("stateful step", _STATE)
    def reduce(
        self,
        function: Callable[[T, T], T],
        *,
        name: str,
        ttl: Duration | StateTtl | None = None,
        queryable: str | Queryable = "",
    ) -> Stream[T]:
        """Combine the records of each key, two at a time; emits the running value for each record.

        Args:
            function: `(value so far, record) -> new value`; a key's first record is its first value.
            name: the address of the state.
            ttl: how long the value of a key lives after the key's last record, by the machine's
                clock: a duration, or `StateTtl`. The record after that is again its first value.
            queryable: the name, unique in the job, under which clients outside the job read the value
                of a key, or `Queryable`; empty: they do not.
        """
        made = add_reduce(self._output, function, name, ttl, queryable, capture_origin())
        return Stream(made)

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
        made = add_keyed(self._output, function, name, into, on_error, capture_origin())
        return Stream(made)

    @named("stateful step", _STATE)
    def deduplicate(self, *, name: str, ttl: Duration | StateTtl | None = None) -> Stream[T]:
        """Keep the first record of each key, and leave out the others.

        Args:
            name: the address of the state.
            ttl: how long a key is remembered after its first record: a duration, or `StateTtl`. Then
                its next record is a first one again. None: for good, so the state grows with the
                number of keys.
        """
        schema, columns = self._output.schema, isinstance(self._output.key, tuple)
        function = first_of_each_key(columns=columns and schema is not None, ttl=ttl)
        into = None if columns else self._output.row_type or schema
        return Stream(add_keyed(self._output, function, name, into, "fail", capture_origin()))

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
        return Stream(
            add_map_async(
                self._output,
                function,
                CallArguments(
                    max_in_flight=max_in_flight,
                    timeout=timeout,
                    ordered=False,
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
        return Stream(add_match(self._output, pattern, select, name, into, capture_origin()))

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
        if isinstance(other, KeyedStream):
            return ConnectedStreams(self._output, other._output, origin)
        if isinstance(other, BroadcastStream):
            return BroadcastConnected(self._output, output_of(other), origin)
        raise PlanError(
            f"connect needs a keyed or a broadcast stream, got `{type(other).__name__}`",
            where=str(origin),
            fix="call .key_by(...) or .broadcast() on it",
        )

    @named("stateful step", _STATE)
    def agg(
        self,
        *,
        name: str,
        into: SchemaLike | None = None,
        ttl: Duration | StateTtl | None = None,
        queryable: str | Queryable = "",
        **aggregates: Aggregate,
    ) -> Stream[Any]:
        """Add running aggregates: the updated row of each key that a batch touched is emitted.

        Args:
            name: the address of the state.
            into: a class or schema that the result fits.
            ttl: how long a key lives after its last record, by the machine's clock: a duration, or
                `StateTtl`. Its aggregates then begin again.
            queryable: the name, unique in the job, under which clients outside the job read the row of
                a key, or `Queryable`; empty: they do not.
            aggregates: output columns, such as `n=hg.count(), total=hg.sum("amount")`.
        """
        origin = capture_origin()
        made = add_aggregate(self._output, aggregates, name, into, ttl, queryable, origin)
        return Stream(made)

    @named("stateful step", _STATE)
    def join(
        self,
        other: KeyedStream[Any],
        *,
        within: tuple[Duration, Duration],
        how: How = "inner",
        suffix: str | None = None,
        name: str,
    ) -> Stream[Any]:
        """Join records of equal keys that are near each other in event time.

        The result has the columns of both, keys of equal names once, and the later of both event
        times. Late records are in `.late`, those of `other` in `.side("late_other")`.

        Args:
            other: the other keyed stream, of the same job.
            within: the bounds of the other record's time relative to this one's, both inclusive.
                `("-10m", "0s")`: it is up to ten minutes older.
            how: `inner`; `left`, `right` or `full` also emit records without a match, with nulls
                for the other side, once event time shows that none will come.
            suffix: appended to columns of `other` whose names are taken.
            name: the address of the state.
        """
        origin = capture_origin()
        right = _keyed_output(other, "join", origin)
        made = add_interval_join(self._output, right, within, how, name, suffix, origin)
        return Stream(made)

    @named("stateful step", _STATE)
    def join_as_of(
        self,
        versions: KeyedStream[Any],
        *,
        how: Literal["inner", "left"] = "inner",
        valid_for: Duration | None = None,
        suffix: str | None = None,
        name: str,
    ) -> Stream[Any]:
        """Join each record with the version of its key that is valid at the record's event time.

        A version is valid from its event time until that of the next one. Records wait for the
        watermark; of the versions before it, the newest of each key is kept while it is valid. Late
        records are in `.late`, versions that came too late to take effect in `.side("late_other")`.

        Args:
            versions: the keyed stream of versions, of the same job.
            how: `inner`; `left` also emits records without a version, with nulls for it.
            valid_for: the longest time a version is valid, in event time; then it is dropped.
                Without it the newest version of each key is kept for ever.
            suffix: appended to columns of the versions whose names are taken.
            name: the address of the state.
        """
        origin = capture_origin()
        right = _keyed_output(versions, "join_as_of", origin)
        made = add_as_of_join(self._output, right, how, valid_for, name, suffix, origin)
        return Stream(made)

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
        output = self._output
        why = why_records(
            output.schema is not None,
            window,
            trigger,
            evictor,
            keyed_by_columns=isinstance(output.keyed_by, HashColumns),
            known=isinstance(window, Window | SessionWindow),
        )
        if why or not isinstance(window, Window | SessionWindow):
            return RecordWindowedStream(output, window, trigger, evictor, why, origin)
        return WindowedStream(output, window, origin)


class _RecordWindows(Generic[T]):
    """The operations on windows that take a function of records; subclasses provide the windows."""

    def _windows(self, origin: Origin) -> Windows:
        raise NotImplementedError

    @named("stateful step", _STATE)
    def reduce(
        self,
        function: Callable[[T, T], T],
        process: WindowProcess[Any, T, Any] | None = None,
        *,
        name: str,
        into: SchemaLike | None = None,
    ) -> Stream[Any]:
        """Combine the records of each key and window, two at a time, as they arrive.

        A window keeps one value. Results have the last ms of the window as event time; late records
        are in the result's `.late` stream.

        Args:
            function: `(value so far, record) -> new value`; the first record is the first value.
            process: gets the value of a window, alone in a list, with the key and the window;
                without it the value is the result.
            name: the address of the state.
            into: columns to make of the results of `process`.
        """
        origin = capture_origin()
        return Stream(self._windows(origin).reduce(function, process, name, into, origin))

    @named("stateful step", _STATE)
    def aggregate(
        self,
        function: AggregateFunction[T, Any, Out],
        process: WindowProcess[Any, Out, Any] | None = None,
        *,
        name: str,
        into: SchemaLike | None = None,
    ) -> Stream[Any]:
        """Combine the records of each key and window into an accumulator, as they arrive.

        Args:
            function: an instance: `create`, `add`, `result`, and `merge` for windows that merge.
            process: gets the result of a window, alone in a list, with the key and the window;
                without it the result is emitted.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects.
        """
        origin = capture_origin()
        return Stream(self._windows(origin).aggregate(function, process, name, into, origin))

    @named("stateful step", _STATE)
    def process(
        self,
        function: WindowProcess[Any, T, Out],
        *,
        name: str,
        into: SchemaLike | None = None,
    ) -> Stream[Out]:
        """Call a function with all records of a window, which are kept until then, each time it fires.

        Args:
            function: an instance; each subtask works with a copy of it.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects.
        """
        origin = capture_origin()
        return Stream(self._windows(origin).process(function, name, into, origin))


class WindowedStream(_RecordWindows[T]):
    """Records in windows, per key; `agg` and the functions of records add a step."""

    def __init__(self, output: NodeOutput, window: Window | SessionWindow, origin: Origin) -> None:
        check_windowed(output, window, origin)
        self._output = output
        self._window = window

    def __repr__(self) -> str:
        return f"WindowedStream({self._output.name}, {self._window.describe()})"

    def _windows(self, origin: Origin) -> Windows:
        return Windows(self._output, self._window, None, None, origin)

    @named("stateful step", _STATE)
    def agg(
        self,
        *,
        name: str,
        into: SchemaLike | None = None,
        queryable: str | Queryable = "",
        **aggregates: Aggregate,
    ) -> Stream[Any]:
        """Add aggregates per key and window, emitted when the watermark has passed the window's end.

        The result has the key columns, `window_start`, `window_end` and the aggregates; for count
        and global windows it has no bounds. Late records are in the result's `.late` stream.

        Args:
            name: the address of the state.
            into: a class or schema that the result fits.
            queryable: the name, unique in the job, under which clients outside the job read the windows
                of a key that have not expired; empty: they do not. Count windows do not have it.
            aggregates: output columns, such as `n=hg.count(), total=hg.sum("amount")`.
        """
        origin = capture_origin()
        made = add_window_aggregate(
            self._output, self._window, aggregates, name, into, queryable, origin
        )
        return Stream(made)

    @named("stateful step", _STATE)
    def join(
        self,
        other: KeyedStream[Any],
        *,
        how: How = "inner",
        suffix: str | None = None,
        name: str,
    ) -> Stream[Any]:
        """Join records of equal keys in the same window; emit the pairs when the window ends.

        The result has the columns of both, keys of equal names once, and the event time of the
        window's last millisecond. Late records are in `.late`, those of `other` in
        `.side("late_other")`. A record within the allowed lateness adds its pairs to the result.

        Args:
            other: the other keyed stream, of the same job.
            how: `inner`; `left`, `right` or `full` also emit records without a match, with nulls
                for the other side.
            suffix: appended to columns of `other` whose names are taken.
            name: the address of the state.
        """
        origin = capture_origin()
        check_keyed(self._output, "join", origin)
        right = _keyed_output(other, "join", origin)
        made = add_window_join(self._output, right, self._window, how, name, suffix, origin)
        return Stream(made)

    @named("stateful step", _STATE)
    def co_group(
        self,
        other: KeyedStream[Any],
        function: CoGroupFunction,
        *,
        into: SchemaLike | None = None,
        name: str,
    ) -> Stream[Any]:
        """Call a function for each key of a window, with all its records of both streams.

        Args:
            other: the other keyed stream, of the same job.
            function: `(key, records, records of other)`; returns or yields results. The key is a tuple if
                it has several columns.
            into: columns to make of the results; without it they stay Python objects.
            name: the address of the state.
        """
        origin = capture_origin()
        check_keyed(self._output, "co_group", origin)
        right = _keyed_output(other, "co_group", origin)
        made = add_co_group(self._output, right, self._window, function, into, name, origin)
        return Stream(made)


class RecordWindowedStream(_RecordWindows[T]):
    """Windows that only functions of records can use; `why` says for what reason."""

    def __init__(
        self,
        output: NodeOutput,
        window: AnyWindow | WindowAssigner[Any],
        trigger: Trigger[Any] | None,
        evictor: Evictor[Any] | None,
        why: str,
        origin: Origin,
    ) -> None:
        self._made = Windows(output, window, trigger, evictor, origin)
        self._shown = f"{output.name}, {describe(window)}"
        self._why = why

    def __repr__(self) -> str:
        return f"RecordWindowedStream({self._shown})"

    def _windows(self, origin: Origin) -> Windows:
        return self._made

    if not TYPE_CHECKING:  # a type checker shall report that these do not exist

        def agg(self, **arguments: Any) -> NoReturn:
            """Refuse: aggregates of columns do not support triggers, evictors and custom assigners."""
            raise self._refused("agg")

        def join(self, *arguments: Any, **named: Any) -> NoReturn:
            """Refuse, see `agg`."""
            raise self._refused("join")

        def co_group(self, *arguments: Any, **named: Any) -> NoReturn:
            """Refuse, see `agg`."""
            raise self._refused("co_group")

    def _refused(self, what: str) -> PlanError:
        return PlanError(
            f"{what} of windows works on whole columns, and {self._why}",
            where=str(capture_origin()),
            fix="use .reduce(...), .aggregate(...) or .process(...) on the window",
        )


def _keyed_output(other: object, what: str, origin: Origin) -> NodeOutput:
    """Return the output of the second stream of a join.

    Raises:
        PlanError: it is not keyed.
    """
    if isinstance(other, KeyedStream):
        return other._output
    raise PlanError(
        f"{what} needs a keyed stream, got `{type(other).__name__}`",
        where=str(origin),
        fix="call .key_by(...) on it",
    )
