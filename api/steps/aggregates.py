"""Aggregates per key, over windows or running: the checks of their arguments, and the nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from ...errors import HeadgateError, PlanError
from ...operators.aggregation.aggregates import Aggregate, AggregatePlan
from ...operators.aggregation.reduce import ReduceOperator
from ...operators.aggregation.running_aggregate import RunningAggregate
from ...operators.base import OperatorFactory
from ...operators.durations import Duration, parse_duration
from ...operators.expressions.expression_steps import SelectStep
from ...operators.expressions.expressions import Column
from ...operators.functions.checks import check_plain, check_returns, check_takes
from ...operators.graph import ByClock, Node
from ...operators.lazy_modules import pl
from ...operators.origin import Origin
from ...operators.partitioning import HashColumns
from ...operators.queries import QueryableState, queryable_state
from ...operators.schema import SchemaLike, into_schema, record_class, same_columns
from ...operators.suggestions import suggest
from ...operators.windows.clocked_windows import ClockedWindows
from ...operators.windows.counts import CountAggregate
from ...operators.windows.factory import WindowFactory
from ...operators.windows.kinds import (
    WINDOW_FIELDS,
    CountWindow,
    GlobalWindow,
    SlidingWindow,
    TumblingWindow,
    Window,
)
from ...operators.windows.late import late_sides
from ...operators.windows.panes.global_windows import GlobalAggregate
from ...operators.windows.sessions.operator import SessionAggregate
from ...operators.windows.sessions.window import SessionWindow, bound_gap
from ...state.keyed.keys import OPAQUE_KEYS, keys_of_columns
from ...state.keyed.ttl import StateTtl, ttl_of
from ...state.queryable import Queryable
from ..node_output import NodeOutput
from .per_record import add_expression


def add_reduce(
    output: NodeOutput,
    function: Callable[[Any, Any], Any],
    name: str,
    ttl: Duration | StateTtl | None,
    queryable: str | Queryable,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.reduce(...)`."""
    rules = _checked_ttl(ttl, origin)
    check_plain(function, "reduce", origin)
    check_returns(function, "reduce", origin)
    check_takes(function, ("the value so far", "the record"), "reduce", origin)
    assert output.key is not None  # a keyed stream has keys
    read_as = _queryable(output, queryable, "reduce", origin, output.schema)
    operator = partial(
        ReduceOperator,
        function,
        output.key,
        ttl=rules,
        schema=output.schema,
        row_type=output.row_type,
        committed=any(one.committed for one in read_as),
        step=name,
        origin=origin,
    )
    return output.add(
        Node(
            name=name,
            kind="reduce",
            origin=origin,
            inputs=(output.as_input(),),
            factory=operator,
            schema=output.schema,
            row_type=output.row_type,
            stateful=True,
            queryable=read_as,
        )
    )


def _check_no_result(queryable: object, origin: Origin) -> None:
    """Check that `queryable` is not meant as the name of a result.

    Raises:
        PlanError: it is an aggregate.
    """
    if isinstance(queryable, Aggregate):
        raise PlanError(
            "`queryable` is the name under which clients read the state, and no result can be called so",
            where=str(origin),
            fix="give the result another name",
        )


def _queryable(
    output: NodeOutput, name: object, kind: str, origin: Origin, values: pa.Schema | None
) -> tuple[QueryableState, ...]:
    """Return the declaration of a step whose one state is queryable.

    Raises:
        PlanError: this cannot be a name.
    """
    fields = None
    if not callable(output.key) and output.schema is not None:
        fields = [output.schema.field(column) for column in output.key or ()]
    keys = OPAQUE_KEYS if fields is None else keys_of_columns(fields)
    columns = None if fields is None else [field.name for field in fields]
    return queryable_state(name, kind, kind, keys, columns, origin, values)


def _checked_ttl(ttl: object, origin: Origin) -> StateTtl | None:
    """Return when the keys of a running aggregate expire; None: never.

    Raises:
        PlanError: a rule is wrong, or only states of process functions have it.
    """
    if isinstance(ttl, Aggregate):
        raise PlanError(
            "`ttl` is the time to live of the keys, and no result can be called so",
            where=str(origin),
            fix="give the result another name",
        )
    try:
        rules = ttl_of(ttl)
        if rules is None:
            return None
        if parse_duration(rules.after, "ttl") < 1:
            raise PlanError("ttl must be at least 1 ms")
    except HeadgateError as error:
        raise PlanError(error.message, where=str(origin), fix=error.fix) from error
    for rule, allowed in (("time", "processing"), ("expired", "never_return")):
        if getattr(rules, rule) != allowed:
            raise PlanError(
                f"the keys of this step expire with {rule}=`{allowed}` only "
                f"value=`{getattr(rules, rule)}`",
                where=str(origin),
                fix="write a process function: its states take all of hg.StateTtl",
            )
    return rules


def add_aggregate(
    output: NodeOutput,
    aggregates: Mapping[str, Aggregate],
    name: str,
    into: SchemaLike | None,
    ttl: Duration | StateTtl | None,
    queryable: str | Queryable,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.agg(...)`."""
    rules = _checked_ttl(ttl, origin)
    _check_no_result(queryable, origin)
    if not isinstance(output.partitioning, HashColumns):
        raise PlanError(
            "agg needs a key made of columns, and key_with gives a function",
            where=str(origin),
            fix='make the key a column and name it: .select("*", "lower(url) AS key").key_by("key")',
        )
    plan = _plan(output, aggregates, origin)
    values = pa.schema(list(plan.result_schema)[len(plan.keys) :])
    read_as = _queryable(output, queryable, "running", origin, values)
    if rules is not None:
        plan = replace(plan, ttl_ms=parse_duration(rules.after, "ttl"))
    result = output.add(
        Node(
            name=name,
            kind="agg",
            origin=origin,
            inputs=(output.as_input(),),
            factory=partial(
                RunningAggregate, plan, name, committed=any(one.committed for one in read_as)
            ),
            schema=plan.result_schema,
            stateful=True,
            detail=plan.describe(),
            columns_read=plan.columns_read,
            queryable=read_as,
        )
    )
    return _fitted(result, into, origin)


def add_window_aggregate(
    output: NodeOutput,
    window: Window | SessionWindow,
    aggregates: Mapping[str, Aggregate],
    name: str,
    into: SchemaLike | None,
    queryable: str | Queryable,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.window(...).agg(...)`."""
    _check_no_result(queryable, origin)
    plan = _plan(output, aggregates, origin, _window_fields(window))
    read_as = _queryable_windows(output, queryable, window, plan, origin)
    factory: OperatorFactory
    committed = any(one.committed for one in read_as)
    if isinstance(window, SessionWindow):
        factory, columns = session_aggregate(window, plan, name, committed=committed)
    else:
        factory = window_aggregate(window, plan, name, committed=committed)
        columns = plan.columns_read
    result = output.add(
        Node(
            name=name,
            kind="window",
            origin=origin,
            inputs=(output.as_input(),),
            factory=factory,
            schema=plan.result_schema,
            stateful=True,
            sides=late_sides(output.schema) if _needs_event_time(window) else {},
            detail=f"{window.describe()}: {plan.describe()}",
            columns_read=columns,
            by_clock=_by_clock(window),
            window_ends_ms=getattr(window, "ends_every_ms", 0),
            queryable=read_as,
        )
    )
    return _fitted(result, into, origin)


def _queryable_windows(
    output: NodeOutput,
    queryable: str | Queryable,
    window: Window | SessionWindow,
    plan: AggregatePlan,
    origin: Origin,
) -> tuple[QueryableState, ...]:
    """Return the declaration of a step with windows.

    Raises:
        PlanError: clients cannot read the state of these windows, or not so.
    """
    if queryable == "":
        return ()
    if isinstance(window, CountWindow):
        raise PlanError(
            f"the state of these windows cannot be queried window=`{window.describe()}`",
            where=str(origin),
            fix="leave queryable= out; all windows but count windows have it",
        )
    if isinstance(window, GlobalWindow):
        values = pa.schema(list(plan.result_schema)[len(plan.keys) :])
        return _queryable(output, queryable, "running", origin, values)
    return _queryable(output, queryable, "window", origin, None)


def check_windowed(output: NodeOutput, window: object, origin: Origin) -> None:
    """Check a window of whole columns, for `agg` and joins.

    Raises:
        PlanError: not a window, or one that does not fit the records.
    """
    output.columns("window", origin)
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
    if _needs_event_time(window) and not output.has_event_time:
        raise PlanError(
            f"a window needs event time, and `{output.name}` has none",
            where=str(origin),
            fix='call .event_time("column", max_out_of_order="10s") before',
        )


def _window_fields(window: object) -> tuple[pa.Field, ...]:
    """Return the window columns of a result; none if the window has no times."""
    return WINDOW_FIELDS if _knows_bounds(window) else ()


def _needs_event_time(window: object) -> bool:
    """Return False for windows that cut a stream by something else than event time."""
    return _knows_bounds(window) and not getattr(window, "processing", False)


def _knows_bounds(window: object) -> bool:
    """Return False for windows without times."""
    return not isinstance(window, CountWindow | GlobalWindow)


def window_aggregate(
    window: Window, plan: AggregatePlan, step: str, *, committed: bool = False
) -> OperatorFactory:
    """Return the factory of the operator for these windows, read as of checkpoints if `committed`."""
    if isinstance(window, CountWindow):
        return partial(CountAggregate, window, plan, step)
    if isinstance(window, GlobalWindow):
        return partial(GlobalAggregate, window, plan, step, committed=committed)
    windows = WindowFactory(window, plan, step, committed)
    if isinstance(window, TumblingWindow | SlidingWindow) and window.processing:
        return partial(_clocked, window, windows)
    return windows


def _clocked(window: TumblingWindow | SlidingWindow, windows: WindowFactory) -> ClockedWindows:
    return ClockedWindows(window, windows(), windows.step)


def session_aggregate(
    window: SessionWindow, plan: AggregatePlan, step: str, *, committed: bool = False
) -> tuple[OperatorFactory, frozenset[str]]:
    """Return the operator's factory, and the columns that it reads.

    Raises:
        PlanError: the gap does not fit the columns.
    """
    gap = bound_gap(window, plan.schema, step, plan.where)
    lateness_ms = window.allowed_lateness_ms
    factory = partial(SessionAggregate, gap, lateness_ms, plan, step, committed=committed)
    return factory, plan.columns_read | gap.reads


def _by_clock(window: Window | SessionWindow) -> ByClock | None:
    if getattr(window, "processing", False):
        return ByClock.WINDOWS
    early = getattr(window, "early", None)
    return ByClock.EARLY if early is not None and early.every_ms else None


def _plan(
    output: NodeOutput,
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
    schema, by = output.columns("agg", origin), output.partitioning
    keys = by.columns if isinstance(by, HashColumns) else ()
    return AggregatePlan(keys, dict(aggregates), schema, added, str(origin))


def _fitted(output: NodeOutput, into: SchemaLike | None, origin: Origin) -> NodeOutput:
    """Return the result with the columns of `into`: fewer, reordered, or cast without loss."""
    if into is None:
        return output
    wanted = into_schema(into, origin)
    found = output.columns("agg", origin)
    for name in wanted.names:
        if name not in found.names:
            raise PlanError(
                f"`{name}` of into= is not in the result of `{output.name}`",
                where=str(origin),
                fix=suggest(name, found.names, "columns"),
            )
    if same_columns(wanted, found):
        output.node.row_type = record_class(into)
        return output
    columns = tuple(_cast(field, found.field(field.name).type, origin) for field in wanted)
    step = SelectStep(columns, ", ".join(wanted.names))
    result = add_expression(output, "select", "", origin, step, found)
    result.node.row_type = record_class(into)
    return replace(result, aggregate=output)


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
