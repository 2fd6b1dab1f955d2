"""The figures of a subtask: metrics for scrapers, and statistics that the coordinator gets every second.

Both are made of numbers that the subtask keeps anyway. Metrics are read from another thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...operators.drops import DROPPED_COUNTER
from ...operators.elements import WATERMARK_MAX, WATERMARK_MIN
from ...operators.splits import History
from ...operators.watermarks.operator import EventTimeOperator
from ..control.messages import QUIET_FOR_GOOD, Sent, StepTime, SubtaskStatistics
from ..exchange.partitioners import KeyGroupSampler
from ..observe.metrics import MetricsGroup, Scope
from ..protocol.backpressure import HotGroup, Level, WaitsFor, level_of
from ..protocol.drops import Dropped
from ..task.accounting import Activity
from ..task.chain import ChainedOperator
from ..task.input_subtask import InputSubtask
from ..task.source_subtask import SourceSubtask
from ..task.subtask import Subtask


def register_task(group: MetricsGroup, subtask: Subtask, labels_max: int, splits_max: int) -> None:
    """Register the metrics of a subtask and its operators; none of them costs it anything.

    Args:
        group: where they go.
        subtask: whose.
        labels_max: tasks with more subtasks than this have no label `subtask`.
        splits_max: a source with more splits than this does not show its lag by split.
    """
    env, snapshots = subtask.env, subtask.snapshots
    partitions = subtask.partitions
    head = subtask.chain.head
    leaving = [chained.output for chained in subtask.chain.operators if chained.output.partitions]
    labelled = env.vertex.parallelism <= labels_max
    scope = group.task(env.vertex.name, env.index, labelled=labelled)
    scope.count("task_records_in", lambda: head.records_in)
    scope.count("task_records_out", lambda: sum(output.records_out for output in leaving))
    scope.count("task_bytes_out", lambda: sum(p.stats().bytes_out for p in partitions))
    scope.count("task_buffers_out", lambda: sum(p.stats().buffers_out for p in partitions))
    scope.gauge(
        "task_output_queue_buffers", lambda: sum(p.stats().queued_buffers for p in partitions)
    )
    scope.gauge("task_checkpoint_start_delay_seconds", lambda: snapshots.start_delay_ms / 1000)
    scope.gauge("task_checkpoint_alignment_seconds", lambda: snapshots.alignment_ms / 1000)
    scope.gauge("task_mailbox_mails", lambda: subtask.queued_mails)
    _register_time(scope, subtask)
    if isinstance(subtask, InputSubtask):
        _register_input(scope, subtask)
    if env.vertex.head.source is not None:
        scope.gauge("task_reading_backlog", lambda: env.splits.history is History.BEING_READ)
    for chained in subtask.chain.operators:
        _register_operator(group, subtask, chained, labelled, splits_max)


def _register_time(scope: Scope, subtask: Subtask) -> None:
    time = subtask.time
    for activity in Activity:
        scope.count(
            "task_time_seconds",
            lambda activity=activity: time.seconds_in(activity),  # type: ignore[misc]
            {"state": activity.name.lower()},
        )
    scope.gauge("task_backpressured", lambda: time.activity is Activity.BACKPRESSURED)
    scope.gauge("task_call_seconds", lambda: _call_seconds(subtask))


def _call_seconds(subtask: Subtask) -> float:
    since = subtask.time.in_call_since
    return 0.0 if since is None else max(0.0, subtask.env.clock.monotonic() - since)


def _register_input(scope: Scope, subtask: InputSubtask) -> None:
    gate, head = subtask.gate, subtask.chain.head
    scope.gauge("task_input_queue_buffers", lambda: gate.queued_buffers)
    scope.gauge("task_input_queue_ratio", lambda: gate.queued_buffers / gate.buffers_total)
    scope.gauge("task_watermark_timestamp_seconds", lambda: _time(head.current_watermark))
    if (debloater := subtask.debloater) is not None:
        sizes = debloater.sizes
        scope.gauge("task_debloated_buffer_bytes", lambda: sizes.announced)
        scope.gauge("task_debloat_time_to_consume_seconds", lambda: sizes.time_to_consume_ms / 1000)


def _register_source(scope: Scope, subtask: SourceSubtask, splits_max: int) -> None:
    reader = subtask.reader

    def by_split() -> Mapping[str, int] | None:
        lags = reader.lag_records()
        return lags if lags is not None and len(lags) <= splits_max else None

    def in_all() -> int | None:
        lags = reader.lag_records()
        return None if lags is None else sum(lags.values())

    scope.gauge("source_lag_records", in_all)
    scope.splits("source_split_lag_records", by_split)
    scope.gauge("source_lag_bytes", reader.lag_bytes)
    scope.gauge("source_lag_seconds", reader.lag_s)
    scope.gauge("source_idle_seconds", lambda: subtask.idle_s)


def _time(watermark: int) -> float | None:
    """Before the first watermark, and after the end, event time is nowhere."""
    return None if watermark in (WATERMARK_MIN, WATERMARK_MAX) else watermark / 1000


def _register_operator(
    group: MetricsGroup,
    subtask: Subtask,
    chained: ChainedOperator,
    labelled: bool,
    splits_max: int,
) -> None:
    env = subtask.env
    scope = group.operator(env.vertex.name, chained.name, env.index, labelled=labelled)
    scope.count("records_in", lambda: chained.records_in)
    scope.count("records_out", lambda: chained.output.records_out)
    scope.count(DROPPED_COUNTER, lambda: chained.output.drops.total)
    scope.gauge("input_watermark_timestamp_seconds", lambda: _time(chained.current_watermark))
    scope.gauge("output_watermark_timestamp_seconds", lambda: _time(chained.output.watermark))
    scope.gauge("timers_pending", lambda: chained.operator.pending_timers)
    node = next(node for node in env.vertex.nodes if node.id == chained.node_id)
    if isinstance(subtask, SourceSubtask) and node.source is not None:
        scope.count("source_records", lambda: chained.output.records_out)
        _register_source(scope, subtask, splits_max)
    if node.sink is not None:
        scope.count("sink_records", lambda: chained.records_in)


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
        hot_groups=_hot_groups(samplers, only_hot=level_of(backpressured) is Level.OK),
        history=subtask.env.splits.history,
        quiet_ms=_quiet_ms(subtask),
        ended_splits=subtask.ended_splits if isinstance(subtask, SourceSubtask) else (),
        full_ms_per_second=full,
        committed=subtask.committed,
        sent=tuple(
            Sent(leaving.edge, stats.records_out, stats.bytes_out)
            for leaving in subtask.leaving
            if leaving.edge is not None and (stats := leaving.partition.stats())
        ),
        dropped=tuple(
            Dropped(each.name, kind.value, count)
            for each in operators
            for kind, count in each.output.drops.counts.items()
        ),
        lost=tuple(
            lost
            for each in operators
            if (samples := each.output.drops.samples) is not None
            for lost in samples.take()
        ),
        timers={
            each.name: pending
            for each in operators
            if (pending := each.operator.pending_timers) is not None
        },
    )


def _quiet_ms(subtask: Subtask) -> int:
    if not isinstance(subtask, SourceSubtask):
        return 0
    return QUIET_FOR_GOOD if subtask.finished else subtask.quiet_ms


def _waits_for(subtask: Subtask) -> WaitsFor:
    head = subtask.chain.head.operator
    if head.makes_calls and head.full():
        return WaitsFor.CALLS
    if isinstance(subtask, InputSubtask) and subtask.gate.blocks:
        return WaitsFor.BARRIERS
    return WaitsFor.NOTHING


def _hot_groups(samplers: Sequence[KeyGroupSampler], *, only_hot: bool) -> tuple[HotGroup, ...]:
    for sampler in samplers:
        sampler.next_window()
    found = (sampler.hottest(only_hot=only_hot) for sampler in samplers)
    return tuple(hot for hot in found if hot is not None)
