"""Joins of keyed streams: the checks of their arguments, and the nodes."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, cast

import pyarrow as pa

from ...errors import PlanError
from ...operators.base import OperatorFactory
from ...operators.durations import Duration, format_duration, parse_duration
from ...operators.functions.checks import check_plain, function_name
from ...operators.graph import Node
from ...operators.joins.as_of import AsOfJoin
from ...operators.joins.co_group import CoGroup, CoGroupFunction, CoGroupStep
from ...operators.joins.columns import JoinColumns, join_columns
from ...operators.joins.interval import IntervalJoin, parse_interval, show_interval
from ...operators.joins.step import AS_OF_HOWS, HOWS, LATE_OTHER, How, JoinStep, outer_sides
from ...operators.joins.windowed import WindowJoin
from ...operators.origin import Origin
from ...operators.partitioning import HashColumns
from ...operators.per_record.base import UserFunction
from ...operators.rows import RowReader
from ...operators.schema import SchemaLike, into_schema, record_class
from ...operators.suggestions import suggest
from ...operators.windows.kinds import TimeWindow, Window
from ...operators.windows.late import late_sides
from ...operators.windows.sessions.window import SessionWindow
from ..node_output import NodeOutput

_ANY_SUFFIX: Final = " of the other"


def add_interval_join(
    left: NodeOutput,
    right: NodeOutput,
    within: object,
    how: How,
    name: str,
    suffix: str | None,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.join(other, within=...)`."""
    interval = parse_interval(within, origin)
    columns = checked_columns(left, right, how, HOWS, suffix, origin)
    step = JoinStep(name, columns, outer_sides(how))
    detail = f"{show_interval(interval)}, {how}"
    factory = partial(IntervalJoin, step, interval)
    return add_join(left, right, "interval_join", name, factory, columns.result, detail, origin)


def add_as_of_join(
    left: NodeOutput,
    versions: NodeOutput,
    how: How,
    valid_for: Duration | None,
    name: str,
    suffix: str | None,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.join_as_of(versions)`."""
    columns = checked_columns(left, versions, how, AS_OF_HOWS, suffix, origin)
    valid_for_ms, detail = None, str(how)
    if valid_for is not None:
        valid_for_ms = parse_duration(valid_for, "valid_for", str(origin))
        if valid_for_ms < 1:
            raise PlanError(f"valid_for must be positive value=`{valid_for}`", where=str(origin))
        detail = f"{how}, versions valid for {format_duration(valid_for_ms)}"
    factory = partial(AsOfJoin, JoinStep(name, columns, outer_sides(how)), valid_for_ms)
    return add_join(left, versions, "as_of_join", name, factory, columns.result, detail, origin)


def add_window_join(
    left: NodeOutput,
    right: NodeOutput,
    window: Window | SessionWindow,
    how: How,
    name: str,
    suffix: str | None,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.window(...).join(other)`."""
    panes = _of_event_time(window, "a window join", origin)
    columns = checked_columns(left, right, how, HOWS, suffix, origin)
    factory = partial(WindowJoin, JoinStep(name, columns, outer_sides(how)), panes)
    detail = f"{panes.describe()}, {how}"
    result = add_join(left, right, "window_join", name, factory, columns.result, detail, origin)
    result.node.window_ends_ms = panes.ends_every_ms
    return result


def add_co_group(
    left: NodeOutput,
    right: NodeOutput,
    window: Window | SessionWindow,
    function: CoGroupFunction,
    into: SchemaLike | None,
    name: str,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.window(...).co_group(other, function)`."""
    panes = _of_event_time(window, "co_group", origin)
    check_plain(function, "co_group", origin)
    # Both sides stay apart, so names may clash; the suffix only makes the unused result possible.
    columns = checked_columns(left, right, "inner", HOWS, _ANY_SUFFIX, origin)
    schema = None if into is None else into_schema(into, origin)
    whole = RowReader(None, None, function)
    step = CoGroupStep(
        JoinStep(name, columns, outer_sides("inner")),
        function,
        UserFunction(cast(Any, function), name, origin, whole, schema),
        (left.row_type, right.row_type),
    )
    detail = f"{panes.describe()}, {function_name(function)}"
    factory = partial(CoGroup, step, panes)
    result = add_join(left, right, "co_group", name, factory, schema, detail, origin)
    result.node.row_type = record_class(into)
    result.node.window_ends_ms = panes.ends_every_ms
    return result


def _of_event_time(window: Window | SessionWindow, what: str, origin: Origin) -> TimeWindow:
    """Return the window, if it is one of event time that joins support.

    Raises:
        PlanError: it is not.
    """
    if not isinstance(window, TimeWindow) or window.early or window.processing:
        raise PlanError(
            f"{what} takes windows of event time without early results window=`{window.describe()}`",
            where=str(origin),
            fix="such as hg.tumbling or hg.sliding, without emit_every= and emit_rows=",
        )
    return window


def checked_columns(
    left: NodeOutput,
    right: NodeOutput,
    how: How,
    hows: tuple[str, ...],
    suffix: str | None,
    origin: Origin,
) -> JoinColumns:
    """Return the columns of a join of two keyed streams.

    Raises:
        PlanError: they cannot be joined.
    """
    if how not in hows:
        raise PlanError(f"unknown how `{how}`", where=str(origin), fix=suggest(how, hows, "how"))
    if left.job is not right.job:
        raise PlanError(
            f"`{left.name}` and `{right.name}` are streams of different jobs",
            where=str(origin),
            fix="read both with the same hg.Job",
        )
    schemas = left.columns("join", origin), right.columns("join", origin)
    keys = _key_columns(left, origin), _key_columns(right, origin)
    for output in (left, right):
        if not output.has_event_time:
            raise PlanError(
                f"a join needs event time, and `{output.name}` has none",
                where=str(origin),
                fix='call .event_time("column", max_out_of_order="10s") on both streams before',
            )
    outer = outer_sides(how)
    nullable = (outer[1], outer[0])
    return join_columns(schemas, keys, nullable, suffix, (left.name, right.name), origin)


def add_join(
    left: NodeOutput,
    right: NodeOutput,
    kind: str,
    name: str,
    factory: OperatorFactory,
    schema: pa.Schema | None,
    detail: str,
    origin: Origin,
) -> NodeOutput:
    """Add the node of a join, and the side outputs of late rows."""
    node = Node(
        name=name,
        kind=kind,
        origin=origin,
        inputs=(left.as_input(), right.as_input()),
        factory=factory,
        schema=schema,
        stateful=True,
        sides={
            **late_sides(left.schema),
            **late_sides(right.schema, LATE_OTHER),
        },
        detail=detail,
    )
    return left.add(node)


def _key_columns(output: NodeOutput, origin: Origin) -> tuple[str, ...]:
    if isinstance(output.partitioning, HashColumns):
        return output.partitioning.columns
    raise PlanError(
        "a join needs keys made of columns, and key_with gives a function",
        where=str(origin),
        fix='make the key a column and name it: .select("*", "lower(url) AS key").key_by("key")',
    )


def check_keyed(output: NodeOutput, what: str, origin: Origin) -> None:
    """Raise PlanError unless the records of a window have a key made of columns."""
    if not isinstance(output.partitioning, HashColumns):
        raise PlanError(
            f"{what} needs a key", where=str(origin), fix="call .key_by(...) before .window(...)"
        )
