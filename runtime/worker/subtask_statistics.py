"""The statistics that a subtask sends to the coordinator every second."""

from __future__ import annotations

from collections.abc import Sequence

from ...operators.async_io.in_flight import InFlight
from ...operators.watermarks.operator import EventTimeOperator
from ..control.statistics import StepTime, SubtaskStatistics
from ..exchange.key_group_sampler import KeyGroupSampler
from ..protocol.backpressure import HotGroup, Level, WaitsFor, level_of
from ..protocol.drops import Dropped
from ..task.input_subtask import InputSubtask
from ..task.subtask import Subtask


def statistics_of(subtask: Subtask, samplers: Sequence[KeyGroupSampler]) -> SubtaskStatistics:
    """The statistics of a subtask so far. This begins a new window of its samples."""
    operators = subtask.chain.operators
    busy, idle, backpressured, full = subtask.time.rates()
    sinks = {node.id for node in subtask.env.vertex.nodes if node.sink is not None}
    return SubtaskStatistics(
        vertex=subtask.env.vertex.id,
        index=subtask.env.index,
        records_in=operators[0].records_in,
        records_out=sum(each.output.records_out for each in operators if each.output.partitions),
        busy_ms_per_second=busy,
        idle_ms_per_second=idle,
        backpressured_ms_per_second=backpressured,
        watermark=max(chained.current_watermark for chained in operators),
        records_written=sum(each.records_in for each in operators if each.node_id in sinks),
        times=tuple(
            StepTime(chained.name, *chained.operator.status())
            for chained in operators
            if isinstance(chained.operator, EventTimeOperator)
        ),
        waits_for=_waits_for(subtask),
        queued=subtask.gate.queued_buffers if isinstance(subtask, InputSubtask) else 0,
        hot_groups=_hot_groups(samplers, told=level_of(backpressured) is not Level.OK),
        history=subtask.env.splits.history,
        full_ms_per_second=full,
        committed=subtask.committed,
        dropped=tuple(
            Dropped(each.name, kind.value, count)
            for each in operators
            for kind, count in each.output.drops.counts.items()
        ),
    )


def _waits_for(subtask: Subtask) -> WaitsFor:
    head = subtask.chain.head.operator
    if isinstance(head, InFlight) and head.full():
        return WaitsFor.CALLS
    if isinstance(subtask, InputSubtask) and subtask.gate.blocks:
        return WaitsFor.BARRIERS
    return WaitsFor.NOTHING


def _hot_groups(samplers: Sequence[KeyGroupSampler], *, told: bool) -> tuple[HotGroup, ...]:
    for sampler in samplers:
        sampler.next_window()
    if not told:
        return ()
    return tuple(hot for sampler in samplers if (hot := sampler.hottest()) is not None)
