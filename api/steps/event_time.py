"""The step of `Stream.event_time`: checks its arguments, naming the user's line, and adds the node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from ...errors import PlanError
from ...operators.durations import Duration, parse_duration
from ...operators.event_time import ColumnTimes, EventTimes, FunctionTimes, check_time_column
from ...operators.functions.checks import check_plain, function_name
from ...operators.functions.dead_letters import OnError, OnErrorLike, checked_on_error, failed_sides
from ...operators.graph import Chaining, Node
from ...operators.origin import Origin
from ...operators.partitioning import Forward
from ...operators.per_record.map_batches import MapBatchesOperator
from ...operators.schema import unknown_column
from ...operators.source import Source
from ...operators.watermarks.operator import EventTimeOperator
from ...operators.watermarks.strategy import (
    ALIGN_EVERY_MS,
    WatermarkAlignmentGroup,
    WatermarkSettings,
    WatermarkStrategy,
    bounded_by,
)
from ..node_output import NodeOutput
from .per_record import user_function

_PASSING: Final = frozenset({"filter", "select", "map", "flat_map", "event_time"})
"""The kinds of steps that emit the results of a batch at once."""


class WatermarkArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `Stream.event_time` that say how watermarks are made; they are explained there."""

    max_out_of_order: Duration | None
    strategy: WatermarkStrategy | None
    idle_after: Duration | None
    close_after: Duration | None
    per_split: bool
    wait_for_queued: bool | None
    align: str | None
    max_drift: Duration | None
    align_every: Duration | None

    def settings(self, output: NodeOutput, name: str, origin: Origin) -> WatermarkSettings:
        """Return the settings of the step behind `output`.

        Raises:
            PlanError: arguments that do not fit each other, or the stream.
        """
        waits = self.wait_for_queued
        settings = WatermarkSettings(
            _strategy(self.max_out_of_order, self.strategy, origin),
            _optional_ms(self.idle_after, "idle_after", origin),
            _optional_ms(self.close_after, "close_after", origin),
            self.per_split and _knows_splits(output),
            _alignment(self.align, self.max_drift, self.align_every, origin),
            _waits_by_default(output, self.per_split) if waits is None else waits,
            waits_by_default=waits is None,
        )
        if waits and not settings.per_split:
            raise PlanError(
                "event_time can wait for queued splits only where it knows the splits of a source",
                where=str(origin),
                fix="call it after job.read, with nothing but map, filter, select or flat_map between "
                "them, none of them async, and without per_split=False",
            )
        if settings.close_after_ms is not None and not name:
            raise PlanError(
                "event_time with close_after has no name",
                where=str(origin),
                fix='the progress of event time is stored under this name; add name="..."',
            )
        if settings.alignment is not None:
            _check_alignment(output, settings, settings.alignment, origin)
        return settings


def add_event_time(
    output: NodeOutput,
    when: str | Callable[[Any], Any],
    watermarks: WatermarkArguments,
    *,
    on_error: OnErrorLike,
    name: str,
    origin: Origin,
) -> NodeOutput:
    """See `Stream.event_time`.

    Raises:
        PlanError: arguments that do not fit each other, or the stream.
    """
    settings = watermarks.settings(output, name, origin)
    policy = checked_on_error(on_error, origin)
    times, columns, detail = _times(output, when, name, policy, origin)
    of = "" if name else _reads(output, detail)
    node = Node(
        name=name,
        kind="event_time",
        origin=origin,
        inputs=(output.as_input(),),
        factory=partial(EventTimeOperator, times, settings, origin, of, policy),
        schema=output.schema,
        row_type=output.row_type,
        columns_read=columns,
        detail=detail,
        stateful=settings.close_after_ms is not None,
        sides=failed_sides(policy, output.schema),
        watermarks=settings,
    )
    return output.add(node, has_event_time=True)


def _times(
    output: NodeOutput, when: object, name: str, policy: OnError, origin: Origin
) -> tuple[EventTimes, frozenset[str] | None, str]:
    """Return the source of event times, the columns it reads (None: all), and a text for `explain`."""
    if isinstance(when, str):
        schema = output.columns("event_time by column", origin)
        if when not in schema.names:
            raise unknown_column(when, schema, "event_time", str(origin))
        check_time_column(when, schema.field(when).type, str(origin))
        return ColumnTimes(when, origin), frozenset([when]), when
    if not callable(when):
        raise PlanError(
            f"event_time needs a column or a function, got `{type(when).__name__}`",
            where=str(origin),
            fix='such as event_time("at"), or a function of the record that returns a datetime',
        )
    check_plain(when, "event_time", origin)
    user = user_function(output, "event_time", name, origin, when, None, 1, policy)
    return FunctionTimes(user), user.reader.columns_read, function_name(when)


def _waits_by_default(output: NodeOutput, per_split: bool) -> bool:
    """Return True directly after a bounded source: as its end is known, no record has to be late."""
    source = _source_of(output)
    return per_split and _knows_splits(output) and source is not None and source.bounded


def _strategy(
    max_out_of_order: Duration | None, strategy: WatermarkStrategy | None, origin: Origin
) -> WatermarkStrategy:
    if strategy is None:
        return bounded_by(_optional_ms(max_out_of_order, "max_out_of_order", origin) or 0)
    if not isinstance(strategy, WatermarkStrategy):
        raise PlanError(
            f"strategy is no hg.WatermarkStrategy type=`{type(strategy).__name__}`",
            where=str(origin),
            fix="such as hg.WatermarkStrategy.custom(MyGenerator)",
        )
    if max_out_of_order is not None:
        raise PlanError(
            "event_time has both a strategy and max_out_of_order",
            where=str(origin),
            fix="give one: the strategy sets how far records may be out of order",
        )
    return strategy


def _alignment(
    group: str | None, max_drift: Duration | None, every: Duration | None, origin: Origin
) -> WatermarkAlignmentGroup | None:
    if group is None:
        if max_drift is not None or every is not None:
            what = "max_drift" if max_drift is not None else "align_every"
            raise PlanError(
                f"{what} has no effect without align", where=str(origin), fix='add align="a name"'
            )
        return None
    if not isinstance(group, str) or not group:
        raise PlanError(f"align is not the name of a group value=`{group!r}`", where=str(origin))
    if max_drift is None:
        raise PlanError(
            f"alignment needs max_drift group=`{group}`",
            where=str(origin),
            fix='set how far a source may be ahead of the slowest, such as max_drift="30s"',
        )
    drift_ms = parse_duration(max_drift, "max_drift", str(origin))
    every_ms = _optional_ms(every, "align_every", origin)
    if every_ms == 0:
        raise PlanError("align_every must be above 0", where=str(origin), fix='such as "1s"')
    return WatermarkAlignmentGroup(group, drift_ms, every_ms or ALIGN_EVERY_MS)


def _check_alignment(
    output: NodeOutput,
    settings: WatermarkSettings,
    alignment: WatermarkAlignmentGroup,
    origin: Origin,
) -> None:
    if settings.idle_after_ms is None:
        raise PlanError(
            f"alignment needs idle_after group=`{alignment.group}`",
            where=str(origin),
            fix="or one split without records holds up all sources of the group; "
            'add idle_after="1m"',
        )
    if _up_to_source(output) is None:
        raise PlanError(
            f"alignment stops sources, and there is none right before group=`{alignment.group}`",
            where=str(origin),
            fix="call event_time after job.read, with nothing but map, filter, select or flat_map "
            "between them, none of them async",
        )
    for node in output.job.graph.nodes:
        other = node.watermarks.alignment if node.watermarks is not None else None
        if other is not None and other.group == alignment.group and other != alignment:
            raise PlanError(
                f"group `{alignment.group}` has another max_drift or align_every in `{node.name}`",
                where=str(origin),
                fix=f"all members agree; the other is at {node.origin.location}",
            )


def _knows_splits(output: NodeOutput) -> bool:
    """Return True if each batch of `output` is of one split: the one that the source has read last.

    That is not so for side outputs, and after steps that collect records before they emit them.
    """
    nodes = _up_to_source(output)
    return (
        nodes is not None
        and output.as_input().side is None
        and all(_passes_batches(node) and node.inputs[0].side is None for node in nodes)
    )


def _passes_batches(node: Node) -> bool:
    if node.kind == "map_batches":
        return isinstance(node.factory, partial) and node.factory.func is MapBatchesOperator
    return node.kind in _PASSING


def _reads(output: NodeOutput, when: str) -> str:
    """Return a text for the source of event times: the column or function, and all sources."""
    sources, nodes = set(), [output.as_input().node]
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node.id not in seen:
            seen.add(node.id)
            nodes += [input_.node for input_ in node.inputs]
            sources |= {node.name} if node.source is not None else set()
    return " ".join([when, *sorted(sources)])


def _up_to_source(output: NodeOutput) -> list[Node] | None:
    """Return the steps between `output` and the source whose subtask they share; None if there is none."""
    input_ = output.as_input()
    nodes: list[Node] = []
    while isinstance(input_.partitioning, Forward) and input_.node.chaining is not Chaining.NEVER:
        if input_.node.source is not None:
            return nodes
        if input_.node.chaining is Chaining.HEAD or len(input_.node.inputs) != 1:
            return None
        nodes.append(input_.node)
        (input_,) = input_.node.inputs
    return None


def _source_of(output: NodeOutput) -> Source | None:
    """Return the source whose subtask runs the node of `output` as well, if there is one."""
    nodes = _up_to_source(output)
    if nodes is None:
        return None
    first = nodes[-1].inputs[0].node if nodes else output.as_input().node
    return first.source


def _optional_ms(value: Duration | None, what: str, origin: Origin) -> int | None:
    return None if value is None else parse_duration(value, what, str(origin))
