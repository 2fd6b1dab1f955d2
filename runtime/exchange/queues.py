"""Queues of the elements of a channel, at either end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from ...errors import ExchangeError
from ...operators.elements import (
    Batch,
    CheckpointBarrier,
    ColumnBatch,
    Control,
    Element,
    LatencyMarker,
    ObjectBatch,
    Watermark,
    WatermarkStatus,
)

BATCHES: Final = (ColumnBatch, ObjectBatch)


def append_control(queue: deque[Element], control: Control, controls_max: int) -> None:
    """Append `control`, merging it with those it makes obsolete.

    The order relative to batches and barriers is kept. Of adjacent watermarks and statuses at most three
    remain; of latency markers the oldest of each source, since it has measured most of the wait.

    Raises:
        ExchangeError: `controls_max` control elements are queued already.
    """
    if isinstance(control, Watermark | WatermarkStatus):
        append_progress(queue, control)
    elif not (isinstance(control, LatencyMarker) and _has_marker_of(queue, control)):
        queue.append(control)
    # Counting is left out while the queue is short, which it always is in good health.
    if len(queue) > controls_max:
        count = sum(not isinstance(element, BATCHES) for element in queue)
        if count > controls_max:
            raise ExchangeError(
                f"too many control elements wait on one channel count=`{count}` "
                f"queued_controls_max=`{controls_max}`",
                fix="the receiver takes no records: look for a user function that hangs",
            )


def append_progress(queue: deque[Element], newest: Watermark | WatermarkStatus) -> None:
    """Append `newest`, and bring the progress at the end into the form: active, watermark, idle.

    `active` comes first because a valve ignores watermarks of an idle channel, `idle` last for the same
    reason.
    """
    run: list[Watermark | WatermarkStatus] = [newest]
    while queue and isinstance(element := queue[-1], Watermark | WatermarkStatus):
        run.append(element)
        queue.pop()
    watermark = next((each for each in run if isinstance(each, Watermark)), None)
    statuses = [each.idle for each in run if isinstance(each, WatermarkStatus)]
    if False in statuses:
        queue.append(WatermarkStatus(idle=False))
    if watermark is not None:
        queue.append(watermark)
    if statuses and statuses[0]:
        queue.append(WatermarkStatus(idle=True))


def _has_marker_of(queue: deque[Element], marker: LatencyMarker) -> bool:
    return any(
        isinstance(element, LatencyMarker)
        and element.source_id == marker.source_id
        and element.subtask_index == marker.subtask_index
        for element in queue
    )


def barrier_index(queue: deque[Element], checkpoint_id: int) -> int | None:
    """Return the position of a checkpoint's barrier in a queue; None: it is not there."""
    for index, element in enumerate(queue):
        if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
            return index
    return None


def batches_before(queue: deque[Element], index: int) -> Iterator[Batch]:
    """Yield the batches among the first `index` elements."""
    for element in islice(queue, index):
        if isinstance(element, BATCHES):
            yield element
