"""The step of `map_async`: checks its arguments, naming the user's line, and adds the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from ...operators.functions.life import FinishResults, with_life
from ...operators.functions.user_code import is_failure
from ...operators.graph import Chaining, Node
from ...operators.origin import Origin
from ...operators.partitioning import HashColumns
from ...operators.per_record.base import MAX_IN_FLIGHT, TIMEOUT
from ...operators.rows import RowReader
from ...operators.schema import SchemaLike, into_schema, record_class
from ..node_output import NodeOutput
from .per_record import user_function


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """The arguments of `map_async` that say how calls are made; they are explained there."""

    max_in_flight: int = MAX_IN_FLIGHT
    timeout: Duration = TIMEOUT
    ordered: bool = True
    retry: Retry | None = None
    on_timeout: OnTimeout = "fail"
    on_error: OnErrorLike = "fail"


def add_map_async(
    output: NodeOutput,
    function: Callable[[Any], Any],
    calls: CallArguments,
    *,
    name: str,
    into: SchemaLike | None,
    origin: Origin,
    lifetime: object = None,
) -> NodeOutput:
    """Add the step of `map_async`; calls of equal keys are made one after the other.

    `lifetime` is the user's function object, if `function` is one of ours around it.
    """
    check_coroutine(function, "map_async", origin)
    timeout_ms = parse_duration(calls.timeout, "timeout of map_async", str(origin))
    if timeout_ms < 1:
        raise PlanError(
            f"timeout of map_async must be positive value=`{calls.timeout}`", where=str(origin)
        )
    on_timeout, in_flight = calls.on_timeout, calls.max_in_flight
    if on_timeout not in ("fail", "side_output"):
        _check_on_timeout(on_timeout, origin)
    policy = checked_on_error(calls.on_error, origin)
    rule = rule_of(calls.retry, policy, origin)
    _check_time_for(rule, timeout_ms, origin)
    schema = None if into is None else into_schema(into, origin)
    user = user_function(output, "map_async", name, origin, function, schema, in_flight, policy)
    step = AsyncMapStep(
        user,
        CallSettings(function, in_flight, timeout_ms, calls.ordered, rule),
        output.schema,
        on_timeout,
        _key_of(output),
    )
    late = {TIMED_OUT: output.schema} if on_timeout == "side_output" else {}
    node = Node(
        name=name,
        kind="map_async",
        origin=origin,
        inputs=(output.as_input(),),
        factory=with_life(
            partial(MapAsync, step),
            lifetime or function,
            name,
            origin,
            FinishResults(schema, output.has_event_time) if lifetime is None else None,
        ),
        schema=schema,
        row_type=record_class(into),
        # Only the head of a chain may hold records back from its subtask.
        chaining=Chaining.HEAD,
        stateful=True,
        sides={**late, **failed_sides(policy, output.schema)},
        detail=f"{function_name(function)}, {in_flight} at a time, "
        f"timeout {format_duration(timeout_ms)}",
    )
    return output.add(node)


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
    return RetryRule(policy.retries + 1, on_exception=is_failure)


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


def _key_of(output: NodeOutput) -> KeyOfRecords | None:
    keyed_by = output.keyed_by
    if keyed_by is None:
        return None
    if isinstance(keyed_by, HashColumns):
        return KeyOfRecords(columns=keyed_by.columns)
    reader = RowReader(output.schema, output.row_type, keyed_by.function)
    return KeyOfRecords(function=keyed_by.function, reader=reader)
