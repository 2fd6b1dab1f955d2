"""Elements that wait: in the queues at either end of a channel, and in front of them (`HeldProgress`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, final

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


PAUSE_S: Final = 0.1
"""One watermark in this time may make buffers leave, on average."""
BURST: Final = 10
"""This number may do so at once. A job that keeps up with the clock has fewer: none of them waits."""


@final
class HeldProgress:
    """The watermarks and statuses of one partition that wait for partly filled buffers in front of them.

    A watermark goes to all channels behind all records, so the buffers have to leave first, however little
    is in them. At full speed watermarks come after so many records, and windows end so often, that buffers
    would never fill. So beyond a certain number per second a watermark waits until the buffers leave for
    another reason, such as a barrier, the buffer timeout, or an idle subtask. Of those that wait the newest
    is enough.

    A watermark that waits lets records pass that were emitted behind it. That is allowed: it only comes
    later, like one that was sent later. Where a subtask gets all its records from one sender, what is late
    would depend on it, so there no watermark waits.
    """

    def __init__(self, timeout_s: float) -> None:
        """Nothing waits; no watermark will wait for longer than `timeout_s`, or `PAUSE_S`."""
        self._pause_s = min(timeout_s, PAUSE_S)
        self._elements: deque[Element] = deque()
        self._counted_to = -math.inf
        """The time up to which watermarks have used what they may use, as for a leaky bucket."""

    def __bool__(self) -> bool:
        return bool(self._elements)

    @property
    def due(self) -> float:
        """The monotonic time at which the buffers leave because of a watermark that waits."""
        return self._counted_to - BURST * self._pause_s

    def hold(self, element: Watermark | WatermarkStatus, now: float) -> bool:
        """Hold `element` if it has to wait; otherwise return False: the buffers leave, and it does."""
        if not self._elements and now >= self.due:
            self._count(now)
            return False
        append_progress(self._elements, element)
        return True

    def take(self, now: float) -> list[Control]:
        """Take all that waits, which is sent now."""
        taken = [each for each in self._elements if isinstance(each, Watermark | WatermarkStatus)]
        self._elements.clear()
        self._count(now)
        return list(taken)

    def _count(self, now: float) -> None:
        self._counted_to = max(self._counted_to, now) + self._pause_s
