"""The step of `map_batches`: checks its arguments, naming the user's line, and adds the node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pyarrow as pa

from ...errors import PlanError
from ...operators.async_calls.map_async import AsyncMicroBatches
from ...operators.base import OperatorFactory
from ...operators.durations import Duration, parse_duration
from ...operators.functions.checks import check_returns, check_takes, function_name, is_async
from ...operators.functions.dead_letters import OnErrorLike, checked_on_error, failed_sides
from ...operators.functions.life import FinishResults, with_life
from ...operators.graph import Chaining, Node
from ...operators.origin import Origin
from ...operators.per_record.map_batches import (
    AsyncMapBatchesOperator,
    BatchFunction,
    MapBatchesOperator,
)
from ...operators.per_record.micro_batches import MicroBatches
from ...operators.schema import SchemaLike, into_schema, record_class
from ...operators.whole_numbers import check_whole_number
from ..node_output import NodeOutput

WITHIN: Final = "50ms"
"""The default for how long a row waits for a batch of `rows=` to fill."""
MAX_BATCHES_IN_FLIGHT: Final = 4
"""The default number of concurrent batches of a coroutine function with `rows=`."""


def add_map_batches(
    output: NodeOutput,
    function: Callable[[pa.RecordBatch], Any],
    *,
    into: SchemaLike | None,
    name: str,
    rows: int | None,
    within: Duration | None,
    max_in_flight: int | None,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `map_batches`."""
    schema = output.columns("map_batches", origin)
    check_returns(function, "map_batches", origin)
    check_takes(function, ("the record batch",), "map_batches", origin)
    policy = checked_on_error(on_error, origin)
    made = schema if into is None else into_schema(into, origin)
    step = name or output.job.derived_name("map_batches")
    user = BatchFunction(function, step, origin, made, policy)
    asynchronous = is_async(function)
    sized = rows is not None
    _check_sizes(rows, within, max_in_flight, asynchronous, origin)
    if sized and asynchronous and not name:
        raise PlanError(
            "async step has no name",
            where=str(origin),
            fix='batches with calls in flight are stored under this name; add name="..."',
        )
    factory = _factory(user, schema, rows, within, max_in_flight, asynchronous, origin)
    node = Node(
        name=name,
        kind="map_batches",
        origin=origin,
        inputs=(output.as_input(),),
        factory=with_life(
            factory, function, step, origin, FinishResults(made, output.has_event_time, whole=True)
        ),
        schema=made,
        row_type=output.row_type if into is None else record_class(into),
        chaining=Chaining.HEAD if asynchronous else Chaining.ALWAYS,
        stateful=sized and asynchronous,
        sides=failed_sides(policy, schema),
        detail=function_name(function) + (f", {rows} rows at a time" if sized else ""),
    )
    return output.add(node)


def _factory(
    user: BatchFunction,
    schema: pa.Schema,
    rows: int | None,
    within: Duration | None,
    max_in_flight: int | None,
    asynchronous: bool,
    origin: Origin,
) -> OperatorFactory:
    if rows is None:
        return partial(AsyncMapBatchesOperator if asynchronous else MapBatchesOperator, user)
    within_ms = parse_duration(WITHIN if within is None else within, "within", str(origin))
    if not asynchronous:
        return partial(MicroBatches, user, rows, within_ms)
    room = MAX_BATCHES_IN_FLIGHT if max_in_flight is None else max_in_flight
    return partial(AsyncMicroBatches, user, schema, rows, within_ms, room)


def _check_sizes(
    rows: object, within: object, max_in_flight: object, asynchronous: bool, origin: Origin
) -> None:
    for what, value in (("rows", rows), ("max_in_flight", max_in_flight)):
        if value is not None:
            check_whole_number(what, value, origin)
    if rows is None and within is not None:
        raise PlanError(
            "within= limits how long rows wait for a full batch, and rows= is missing",
            where=str(origin),
            fix="add rows=, such as rows=256",
        )
    if max_in_flight is not None and not (asynchronous and rows is not None):
        raise PlanError(
            "max_in_flight= is for `async def` functions of batches with rows=",
            where=str(origin),
            fix="leave it out",
        )
