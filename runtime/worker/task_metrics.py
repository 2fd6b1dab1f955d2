"""What a subtask shows to those who scrape: numbers that it keeps anyway, read from another thread."""

from __future__ import annotations

from ...operators.drops import DROPPED_COUNTER
from ...operators.splits import History
from ..observe.catalogue import TASK
from ..observe.metrics import MetricsGroup
from ..task.accounting import Activity
from ..task.chain import ChainedOperator
from ..task.input_subtask import InputSubtask
from ..task.subtask import Subtask

_NS_PER_MS = 1_000_000


def register_task(group: MetricsGroup, subtask: Subtask) -> None:
    """Register the metrics of a subtask and its operators; none of them costs it anything."""
    env, time, snapshots = subtask.env, subtask.time, subtask.snapshots
    partitions = list(subtask.chain.partitions)
    head = subtask.chain.head
    leaving = [chained.output for chained in subtask.chain.operators if chained.output.partitions]
    scope = group.add(TASK, task_name=env.vertex.name, subtask_index=str(env.index))
    scope.count("numRecordsIn", lambda: head.records_in)
    scope.count("numRecordsOut", lambda: sum(output.records_out for output in leaving))
    scope.count("numBytesOut", lambda: sum(p.stats().bytes_out for p in partitions))
    scope.count("numBuffersOut", lambda: sum(p.stats().buffers_out for p in partitions))
    scope.gauge("busyTimeMsPerSecond", lambda: time.last_rates.busy)
    scope.gauge("idleTimeMsPerSecond", lambda: time.last_rates.idle)
    scope.gauge("backPressuredTimeMsPerSecond", lambda: time.last_rates.backpressured)
    scope.gauge("fullTimeMsPerSecond", lambda: time.last_rates.full)
    scope.gauge("isBackPressured", lambda: time.activity is Activity.BACKPRESSURED)
    scope.gauge("currentCallTimeMs", lambda: _call_ms(subtask))
    scope.gauge("outputQueueLength", lambda: sum(p.stats().queued_buffers for p in partitions))
    scope.gauge("checkpointStartDelayNanos", lambda: snapshots.start_delay_ms * _NS_PER_MS)
    scope.gauge("checkpointAlignmentTime", lambda: snapshots.alignment_ms * _NS_PER_MS)
    scope.gauge("mailboxQueueSize", lambda: subtask.queued_mails)
    if isinstance(subtask, InputSubtask):
        gate = subtask.gate
        scope.gauge("inputQueueLength", lambda: gate.queued_buffers)
        scope.gauge("inPoolUsage", lambda: gate.queued_buffers / gate.buffers_total)
        scope.gauge("currentInputWatermark", lambda: head.current_watermark)
        if (debloater := subtask.debloater) is not None:
            sizes = debloater.sizes
            scope.gauge("debloatedBufferSize", lambda: sizes.announced)
            scope.gauge("estimatedTimeToConsumeBuffersMs", lambda: sizes.time_to_consume_ms)
    if env.vertex.head.source is not None:
        scope.gauge("isProcessingBacklog", lambda: env.splits.history is History.BEING_READ)
    sinks = {node.id for node in env.vertex.nodes if node.sink is not None}
    for chained in subtask.chain.operators:
        _register_operator(group, subtask, chained, chained.node_id in sinks)


def _call_ms(subtask: Subtask) -> int:
    since = subtask.time.in_call_since
    return 0 if since is None else int(1000 * (subtask.env.clock.monotonic() - since))


def _register_operator(
    group: MetricsGroup, subtask: Subtask, chained: ChainedOperator, is_sink: bool
) -> None:
    scope = group.operator(subtask.env.vertex.name, chained.name, subtask.env.index)
    scope.count("numRecordsIn", lambda: chained.records_in)
    scope.count("numRecordsOut", lambda: chained.output.records_out)
    scope.count(DROPPED_COUNTER, lambda: chained.output.drops.total)
    scope.gauge("currentInputWatermark", lambda: chained.current_watermark)
    scope.gauge("currentOutputWatermark", lambda: chained.output.watermark)
    if is_sink:
        scope.count("numRecordsSend", lambda: chained.records_in)
