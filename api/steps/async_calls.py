"""Steps that call coroutine functions, or functions of batches: the stream methods and their checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import pyarrow as pa

from ...errors import PlanError
from ...operators.async_calls.call import Retry, RetryRule, checked_retry
from ...operators.async_calls.in_flight import CallSettings
from ...operators.async_calls.map_async import (
    TIMED_OUT,
    AsyncMapStep,
    KeyOfRecords,
    MapAsync,
    OnTimeout,
)
from ...operators.durations import Duration, format_duration, parse_duration
from ...operators.functions.checks import (
    check_plain,
    check_takes,
    function_name,
    is_async,
    is_async_generator,
)
from ...operators.functions.dead_letters import OnError, OnErrorLike, checked_on_error, failed_sides
from ...operators.functions.life import Results, with_life
from ...operators.functions.user_code import FAILURES
from ...operators.graph import Chaining, Node
from ...operators.origin import Origin, capture_origin
from ...operators.partitioning import HashColumns, HashFunction
from ...operators.per_record.base import MAX_IN_FLIGHT
from ...operators.rows import RowReader
from ...operators.schema import SchemaLike, record_class
from ..required_name import named
from ..stream_base import StreamBase, into_schema

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")
U = TypeVar("U")

TIMEOUT: Final = "2s"
"""The default timeout of a record, all attempts included."""


def add_map_async(
    stream: StreamBase[Any],
    keyed_by: HashColumns | HashFunction | None,
    function: Callable[[Any], Any],
    *,
    name: str,
    max_in_flight: int,
    timeout: Duration,
    ordered: bool,
    retry: Retry | None,
    on_timeout: OnTimeout,
    on_error: OnErrorLike,
    into: SchemaLike | None,
    origin: Origin,
    lifetime: object = None,
) -> Stream[Any]:
    """Add the step of `map_async`; `keyed_by` is None for a stream without keys.

    `lifetime` is the user's function object, if `function` is one of ours around it.
    """
    check_coroutine(function, "map_async", origin)
    timeout_ms = parse_duration(timeout, "timeout of map_async", str(origin))
    if timeout_ms < 1:
        raise PlanError(
            f"timeout of map_async must be positive value=`{timeout}`", where=str(origin)
        )
    if on_timeout not in ("fail", "side_output"):
        _check_on_timeout(on_timeout, origin)
    policy = checked_on_error(on_error, origin)
    rule = rule_of(retry, policy, origin)
    _check_time_for(rule, timeout_ms, origin)
    schema = None if into is None else into_schema(into, origin)
    user = stream._user_function("map_async", name, origin, function, schema, max_in_flight, policy)
    step = AsyncMapStep(
        user,
        CallSettings(function, max_in_flight, timeout_ms, ordered, rule),
        stream.schema,
        on_timeout,
        _key_of(stream, keyed_by),
    )
    late = {TIMED_OUT: stream.schema} if on_timeout == "side_output" else {}
    node = Node(
        id=-1,
        name=name,
        kind="map_async",
        origin=origin,
        inputs=(stream._input(keyed_by),),
        factory=with_life(
            partial(MapAsync, step),
            lifetime or function,
            name,
            origin,
            Results(schema, stream.has_event_time) if lifetime is None else None,
        ),
        schema=schema,
        row_type=record_class(into),
        # Only the head of a chain may hold records back from its subtask.
        chaining=Chaining.HEAD,
        stateful=True,
        sides={**late, **failed_sides(policy, stream.schema)},
        detail=f"{function_name(function)}, {max_in_flight} at a time, "
        f"timeout {format_duration(timeout_ms)}",
    )
    return stream._like(stream._job.add_node(node))


def check_coroutine(function: Callable[[Any], Any], kind: str, origin: Origin) -> None:
    """Raise PlanError unless it is an `async def` function that returns."""
    if not is_async(function) or is_async_generator(function):
        yields = "yields" if is_async_generator(function) else "is not async"
        raise PlanError(
            f"{kind} needs an `async def` function that returns, and this one {yields} "
            f"function=`{function_name(function)}`",
            where=str(origin),
            fix="write async def, and await slow calls; blocking code belongs in asyncio.to_thread",
        )


def rule_of(retry: Retry | None, policy: OnError, origin: Origin) -> RetryRule:
    """Return the retry rule that `retry=` or the retries of `on_error=` set."""
    if retry is not None and policy.retries:
        raise PlanError(
            "both retry= and the retries of on_error= set the number of retries",
            where=str(origin),
            fix="leave the retries to retry=",
        )
    if not policy.retries:
        return checked_retry(retry, origin)
    return RetryRule(policy.retries + 1, on_exception=FAILURES)


def _check_on_timeout(on_timeout: object, origin: Origin) -> None:
    if not callable(on_timeout):
        raise PlanError(
            f"not a policy for timeouts on_timeout=`{on_timeout}`",
            where=str(origin),
            fix='it can be: "fail", "side_output", or a function of the record that gives the result',
        )
    check_plain(on_timeout, "on_timeout", origin)
    check_takes(on_timeout, ("the record",), "on_timeout", origin)


def _check_time_for(rule: RetryRule, timeout_ms: int, origin: Origin) -> None:
    """Raise PlanError if the delays alone use up the timeout, so that the last attempts cannot run."""
    if not rule.delay_after(1):
        return  # without a first delay there are no later ones
    delays_s = 0.0
    for attempt in range(1, rule.attempts):
        delays_s += rule.delay_after(attempt)
        if delays_s * 1000 >= timeout_ms:
            raise PlanError(
                f"the delays before attempt {attempt + 1} leave no time for it "
                f"timeout=`{format_duration(timeout_ms)}`",
                where=str(origin),
                fix="the timeout is for all attempts of a record: make it longer, or the retries fewer",
            )


def _key_of(
    stream: StreamBase[Any], keyed_by: HashColumns | HashFunction | None
) -> KeyOfRecords | None:
    if keyed_by is None:
        return None
    if isinstance(keyed_by, HashColumns):
        return KeyOfRecords(columns=keyed_by.columns)
    reader = RowReader(stream.schema, stream._row_type, keyed_by.function)
    return KeyOfRecords(function=keyed_by.function, reader=reader)


class Calls(StreamBase[T], Generic[T]):
    """Steps whose functions are expensive to call."""

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
        from .batches import add_map_batches  # its steps are made of this package

        return add_map_batches(
            self,
            function,
            into=into,
            name=name,
            rows=rows,
            within=within,
            max_in_flight=max_in_flight,
            on_error=on_error,
            origin=capture_origin(),
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
        return add_map_async(
            self,
            None,
            function,
            name=name,
            max_in_flight=max_in_flight,
            timeout=timeout,
            ordered=ordered,
            retry=retry,
            on_timeout=on_timeout,
            on_error=on_error,
            into=into,
            origin=capture_origin(),
        )
