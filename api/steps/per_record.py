"""Steps that treat each record or batch by itself, unions and sinks: their checks, and the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from ...errors import HeadgateError, PlanError
from ...operators.base import OperatorFactory
from ...operators.durations import Duration, parse_duration
from ...operators.expressions.expression_steps import (
    ExpressionFactory,
    ExpressionSteps,
    FilterStep,
    SelectStep,
    Step,
    columns_read,
)
from ...operators.expressions.expressions import ExpressionLike, check_filter, check_select, show
from ...operators.functions.checks import (
    check_callable,
    check_returns,
    check_takes,
    function_name,
    is_async,
)
from ...operators.functions.dead_letters import (
    FAIL,
    OnError,
    OnErrorLike,
    checked_on_error,
    failed_sides,
)
from ...operators.functions.life import FinishResults, with_life
from ...operators.graph import Chaining, Node
from ...operators.lazy_modules import is_expression
from ...operators.origin import Origin
from ...operators.per_record.base import UserFunction
from ...operators.per_record.map_batches import (
    AsyncMapBatchesOperator,
    BatchFunction,
    MapBatchesOperator,
)
from ...operators.per_record.micro_batches import MicroBatches
from ...operators.per_record.operators import (
    AsyncFilterOperator,
    AsyncFlatMapOperator,
    AsyncMapOperator,
    FilterOperator,
    FlatMapOperator,
    MapOperator,
    UnionOperator,
)
from ...operators.rows import RowReader, check_attributes
from ...operators.schema import (
    SchemaLike,
    difference,
    into_schema,
    record_class,
    same_columns,
    united,
)
from ...operators.sink import Sink, SinkOperator
from ...operators.whole_numbers import check_whole_number
from ..node_output import NodeOutput

WITHIN: Final = "50ms"
"""The default for how long a row waits for a batch of `rows=` to fill."""
MAX_BATCHES_IN_FLIGHT: Final = 4
"""The default number of concurrent batches of a coroutine function with `rows=`."""
_OPERATORS: Final = {
    "filter": (FilterOperator, AsyncFilterOperator),
    "map": (MapOperator, AsyncMapOperator),
    "flat_map": (FlatMapOperator, AsyncFlatMapOperator),
}
"""The plain operator and the async one of each kind of step."""


def add_filter(
    output: NodeOutput,
    condition: object,
    name: str,
    max_in_flight: int,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `filter`."""
    policy = checked_on_error(on_error, origin)
    if isinstance(condition, str) or is_expression(condition):
        if policy != FAIL:
            raise PlanError(
                "on_error= is for functions, and this filter is an expression",
                where=str(origin),
                fix="leave it out: expressions give null where a function would raise",
            )
        schema = output.columns("filter by expression", origin)
        step = FilterStep(check_filter(condition, schema, "filter", str(origin)), show(condition))
        return add_expression(output, "filter", name, origin, step, schema)
    if not callable(condition):
        raise PlanError(
            f"filter needs a condition, got `{type(condition).__name__}`",
            where=str(origin),
            fix='give SQL text such as "amount > 0", a polars expression, or a function of the record',
        )
    check_returns(condition, "filter", origin)
    user = user_function(output, "filter", name, origin, condition, None, max_in_flight, policy)
    made = FinishResults(output.schema, output.has_event_time)
    return _add_calls(output, "filter", name, user, made, output.row_type)


def add_select(
    output: NodeOutput, expressions: tuple[ExpressionLike, ...], name: str, origin: Origin
) -> NodeOutput:
    """Add the step of `select`."""
    schema = output.columns("select", origin)
    columns = check_select(expressions, schema, "select", str(origin))
    step = SelectStep(tuple(columns), ", ".join(show(each) for each in expressions))
    return add_expression(output, "select", name, origin, step, schema)


def add_expression(
    output: NodeOutput, kind: str, name: str, origin: Origin, step: Step, schema: pa.Schema
) -> NodeOutput:
    """Add a step of expressions on the columns of `schema`."""
    steps = ExpressionSteps([step], schema)
    reads, passes = columns_read([step])
    return output.add(
        Node(
            name=name,
            kind=kind,
            origin=origin,
            inputs=(output.as_input(),),
            factory=ExpressionFactory(steps),
            schema=schema if passes else steps.output_schema,
            row_type=output.row_type if passes else None,
            columns_read=reads,
            detail=step.text,
        )
    )


def add_map(
    output: NodeOutput,
    kind: Literal["map", "flat_map"],
    function: Callable[..., Any],
    into: SchemaLike | None,
    name: str,
    max_in_flight: int,
    on_error: OnErrorLike,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `map` or `flat_map`."""
    if kind == "map":
        check_returns(function, kind, origin)
    policy = checked_on_error(on_error, origin)
    schema = None if into is None else into_schema(into, origin)
    user = user_function(output, kind, name, origin, function, schema, max_in_flight, policy)
    made = FinishResults(schema, output.has_event_time)
    return _add_calls(output, kind, name, user, made, record_class(into))


def _add_calls(
    output: NodeOutput,
    kind: str,
    name: str,
    user: UserFunction,
    made: FinishResults,
    row_type: type[Any] | None,
) -> NodeOutput:
    """Add a step that calls a function for each record: the plain operator or the async one."""
    function, origin = user.function, user.origin
    asynchronous = is_async(function)
    operator = partial(_OPERATORS[kind][asynchronous], user)
    return output.add(
        Node(
            name=name,
            kind=kind,
            origin=origin,
            inputs=(output.as_input(),),
            factory=with_life(operator, function, user.step, origin, made),
            schema=made.schema,
            row_type=row_type,
            chaining=Chaining.HEAD if asynchronous else Chaining.ALWAYS,
            columns_read=user.reader.columns_read,
            detail=function_name(function),
            sides=failed_sides(user.on_error, output.schema),
        )
    )


def user_function(
    output: NodeOutput,
    kind: str,
    name: str,
    origin: Origin,
    function: Callable[..., Any],
    into: pa.Schema | None,
    max_in_flight: int,
    on_error: OnError = FAIL,
) -> UserFunction:
    """Return a function of a record, checked, with the reader of its records.

    Raises:
        PlanError: it cannot be called with a record, or reads what the records do not have.
    """
    check_callable(function, kind, origin)
    check_takes(function, ("the record",), kind, origin)
    check_whole_number("max_in_flight", max_in_flight, origin)
    check_reads(output, function, kind, origin)
    reader = RowReader(output.schema, output.row_type, function)
    step = name or output.job.derived_name(kind)
    return UserFunction(function, step, origin, reader, into, max_in_flight, on_error)


def check_reads(
    output: NodeOutput, function: Callable[..., Any], kind: str, origin: Origin
) -> None:
    """Raise PlanError if a function of a record reads what the columns do not have."""
    if output.schema is not None:
        check_attributes(function, output.schema, output.row_type, kind, str(origin))


def add_union(
    output: NodeOutput, others: Sequence[NodeOutput | None], name: str, origin: Origin
) -> NodeOutput:
    """Add the step of `union`; one of `others` is None if the user gave something else than a stream."""
    outputs = (output, *(_checked_union(output, other, origin) for other in others))
    schemas = [each.schema for each in outputs if each.schema is not None]
    one_type = all(each.row_type is output.row_type for each in outputs)
    return output.add(
        Node(
            name=name,
            kind="union",
            origin=origin,
            inputs=tuple(each.as_input() for each in outputs),
            factory=UnionOperator,
            schema=united(*schemas) if schemas else None,
            row_type=output.row_type if one_type else None,
            columns_read=frozenset(),
        )
    )


def _checked_union(output: NodeOutput, other: NodeOutput | None, origin: Origin) -> NodeOutput:
    if other is None or other.job is not output.job:
        raise PlanError("union needs streams of the same job", where=str(origin))
    if (output.schema is None) != (other.schema is None):
        plain = output if output.schema is None else other
        plain.columns("union with a stream of columns", origin)
    if output.schema is not None and not same_columns(output.schema, other.schema):
        problem = difference(output.schema, other.schema) or "other order of columns"
        raise PlanError(
            f"`{output.name}` and `{other.name}` have different columns: {problem}",
            where=str(origin),
            fix=f"bring them together with .select({', '.join(map(repr, output.schema.names))})",
        )
    if output.has_event_time != other.has_event_time:
        without = other if output.has_event_time else output
        raise PlanError(
            f"`{without.name}` has no event time, the stream it is united with has",
            where=str(origin),
            fix="call .event_time(...) on each stream before union, or once after it",
        )
    return other


def add_sink(
    output: NodeOutput,
    sink: object,
    name: str,
    parallelism: int | None,
    slot_sharing_group: str | None,
    origin: Origin,
) -> None:
    """Add the step of `write`."""
    if not isinstance(sink, Sink):
        raise PlanError(f"write needs a sink, got `{type(sink).__name__}`", where=str(origin))
    _check_sink(output, sink, name, origin)
    output.add(
        Node(
            name=name,
            kind="sink",
            origin=origin,
            inputs=(output.as_input(),),
            factory=partial(SinkOperator, sink),
            sink=sink,
            parallelism=parallelism,
            slot_sharing_group=slot_sharing_group
            and output.job.check_group(slot_sharing_group, origin),
            stateful=True,
            detail=sink.describe(),
        )
    )


def _check_sink(output: NodeOutput, sink: Sink, name: str, origin: Origin) -> None:
    if sink.guarantee not in sink.guarantees:
        able = ", ".join(sorted(guarantee.value for guarantee in sink.guarantees))
        raise PlanError(
            f"sink `{name}` cannot promise {sink.guarantee.value}: {sink.describe()}",
            where=str(origin),
            fix=f"it supports: {able}",
        )
    if sink.needs_columns:
        output.columns(f"sink `{name}`", origin)
    try:
        sink.bind(output.schema)
    except HeadgateError as error:
        if not error.where:
            error.where = str(origin)
        raise


class BatchSizes(msgspec.Struct, frozen=True):
    """The arguments of `map_batches` that set the size of batches; they are explained there."""

    rows: int | None
    within: Duration | None
    max_in_flight: int | None

    def check(self, asynchronous: bool, origin: Origin) -> None:
        """Raise PlanError if they do not fit each other, or the kind of function."""
        for what, value in (("rows", self.rows), ("max_in_flight", self.max_in_flight)):
            if value is not None:
                check_whole_number(what, value, origin)
        if self.rows is None and self.within is not None:
            raise PlanError(
                "within= limits how long rows wait for a full batch, and rows= is missing",
                where=str(origin),
                fix="add rows=, such as rows=256",
            )
        if self.max_in_flight is not None and not (asynchronous and self.rows is not None):
            raise PlanError(
                "max_in_flight= is for `async def` functions of batches with rows=",
                where=str(origin),
                fix="leave it out",
            )

    def factory(
        self, user: BatchFunction, schema: pa.Schema, asynchronous: bool, origin: Origin
    ) -> OperatorFactory:
        """Return what makes the operator."""
        if self.rows is None:
            return partial(AsyncMapBatchesOperator if asynchronous else MapBatchesOperator, user)
        within = WITHIN if self.within is None else self.within
        within_ms = parse_duration(within, "within", str(origin))
        if not asynchronous:
            return partial(MicroBatches, user, self.rows, within_ms)
        from ...operators.async_calls.map_async import AsyncMicroBatches  # few jobs make calls

        room = MAX_BATCHES_IN_FLIGHT if self.max_in_flight is None else self.max_in_flight
        return partial(AsyncMicroBatches, user, schema, self.rows, within_ms, room)


def add_map_batches(
    output: NodeOutput,
    function: Callable[[pa.RecordBatch], Any],
    sizes: BatchSizes,
    *,
    into: SchemaLike | None,
    name: str,
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
    sized = sizes.rows is not None
    sizes.check(asynchronous, origin)
    if sized and asynchronous and not name:
        raise PlanError(
            "async step has no name",
            where=str(origin),
            fix='batches with calls in flight are stored under this name; add name="..."',
        )
    factory = sizes.factory(user, schema, asynchronous, origin)
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
        detail=function_name(function) + (f", {sizes.rows} rows at a time" if sized else ""),
    )
    return output.add(node)
