"""The sending end of a channel: a queue, and credits that allow batches to leave it.

One credit is one free buffer at the receiver. Batches wait in the queue for credit; control elements
need none but keep their place in line. `hub.py` and `links.py` say how an element really travels.

Since control elements cost no credit, their queues must stay short by other means: a watermark or status
that was not read yet is worth nothing once a newer one stands right behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol, TypeAlias

from ...errors import ExchangeError, HeadgateError
from ...operators.elements import (
    Batch,
    CheckpointBarrier,
    ColumnBatch,
    Control,
    Element,
    EndOfPartition,
    LatencyMarker,
    ObjectBatch,
    Watermark,
    WatermarkStatus,
)
from .settings import ExchangeSettings

ChannelId: TypeAlias = int
"""Names a channel within one attempt; given by the planner, fits in 32 bits."""
BATCHES = (ColumnBatch, ObjectBatch)


class ChannelListener(Protocol):
    """The events of a channel that its result partition is notified of."""

    def backlog_changed(self, change: int) -> None:
        """+1: the channel began to hold batches it cannot send; -1: it holds none any more."""
        ...

    def channel_failed(self, error: HeadgateError) -> None:
        """The channel is broken for good."""
        ...

    def barrier_left(self, channel: OutputChannel, barrier: CheckpointBarrier) -> None:
        """The barrier is on its way, in line or in front of what it overtook."""
        ...

    def buffer_size_changed(self) -> None:
        """The receiver wants buffers of another size."""
        ...

    def credit_came(self) -> None:
        """The receiver has taken a batch, or lends another buffer."""
        ...


class OutputChannel(ABC):
    """The sending end. Nothing travels before the receiver has granted the first credits."""

    def __init__(self, channel_id: ChannelId, settings: ExchangeSettings) -> None:
        self.channel_id = channel_id
        self.queue: deque[Element] = deque()
        self.queued_buffers = 0
        """Batches in the queue; the receiver knows it as the backlog."""
        self.credits = 0
        self.buffer_size_bytes: int | None = None
        """The size of a buffer that the receiver asked for last; None: it has not asked for any."""
        self.error: HeadgateError | None = None
        self.finished = False
        """The end of the partition was sent: a broken connection no longer matters."""
        self.listener: ChannelListener | None = None
        self._controls_max = settings.queued_controls_max
        self._exclusive = settings.exclusive_buffers
        self._is_open = False
        self._announced = 0
        self._pumping = False
        self._was_backlogged = False

    def send(self, batch: Batch) -> None:
        """Send `batch` now or once there is credit. Never blocks, never raises: see `error`."""
        if self.error is None:
            self.queue.append(batch)
            self.queued_buffers += 1
            self.pump()

    def send_control(self, control: Control) -> None:
        """Send `control` behind all that was sent before."""
        if self.error is None:
            try:
                append_control(self.queue, control, self._controls_max)
            except ExchangeError as error:
                self.fail(error)
            self.pump()

    def overtake(self, barrier: CheckpointBarrier) -> list[Batch]:
        """Send `barrier` in front of all that waits here, and return the batches among that, in order.

        They stay in the queue. If the barrier waits in line here already, only those in front of it are
        overtaken; the one in line is replaced.
        """
        if self.error is not None:
            return []
        queue = self.queue
        in_line = barrier_index(queue, barrier.checkpoint_id)
        overtaken = list(batches_before(queue, len(queue) if in_line is None else in_line))
        if in_line is not None:
            del queue[in_line]
        queue.insert(self._overtaking_barriers(), barrier)
        self.pump()
        return overtaken

    def holds_barrier(self, checkpoint_id: int) -> bool:
        """True if the barrier of a checkpoint waits here."""
        return barrier_index(self.queue, checkpoint_id) is not None

    def _overtaking_barriers(self) -> int:
        """The number of barriers that were put in front and wait for the transport."""
        count = 0
        for element in self.queue:
            if not (isinstance(element, CheckpointBarrier) and element.options.unaligned):
                break
            count += 1
        return count

    def add_credits(self, count: int) -> None:
        """The receiver has `count` more free buffers. The first grant opens the channel."""
        self._is_open = True
        self.credits += count
        self.pump()
        if self.listener is not None:
            self.listener.credit_came()

    @property
    def receiver_waits(self) -> bool:
        """True if the receiver has taken all batches so far, and the next one can leave at once.

        A channel that has its own credits back has no batch on its way: at most some for which the gate
        had lent it more, which it does only after a backlog.
        """
        if not self._is_open or self.queue or self.error is not None:
            return False
        return self.credits >= self._exclusive and self._can_transmit()

    def set_buffer_size(self, size_bytes: int) -> None:
        """The receiver wants buffers of this size; those that wait here stay as they are."""
        self.buffer_size_bytes = size_bytes
        if self.listener is not None:
            self.listener.buffer_size_changed()

    def pump(self) -> None:
        """Send what credits and transport allow."""
        if self._pumping or self.error is not None:
            # A local receiver grants credit from within a send: the loop below picks it up.
            return
        self._pumping = True
        try:
            self._drain()
        except HeadgateError as error:
            self.fail(error)
        finally:
            self._pumping = False
        if self._was_backlogged != (self.queued_buffers > 0):
            self._was_backlogged = not self._was_backlogged
            if self.listener is not None:
                self.listener.backlog_changed(1 if self._was_backlogged else -1)

    def _drain(self) -> None:
        queue = self.queue
        while self._is_open:
            while queue and self._can_transmit():
                element = queue[0]
                if not isinstance(element, BATCHES):
                    queue.popleft()
                    self.finished = isinstance(element, EndOfPartition)
                    self._transmit_control(element)
                    if isinstance(element, CheckpointBarrier) and self.listener is not None:
                        self.listener.barrier_left(self, element)
                elif self.credits > 0:
                    queue.popleft()
                    self.credits -= 1
                    self.queued_buffers -= 1
                    self._announced = self.queued_buffers
                    self._transmit(element, self.queued_buffers)
                else:
                    break
            self._flush()
            if self.credits > 0 or self.queued_buffers <= self._announced:
                return
            # No batch can carry the news of this backlog, so it goes alone; that may earn credit.
            self._announced = self.queued_buffers
            self._announce_backlog(self.queued_buffers)

    def fail(self, error: HeadgateError) -> None:
        """The channel is broken: drop what waits, tell the partition. The first error stays."""
        if self.error is None:
            self.error = error
            self._drop()
            if self.listener is not None:
                self.listener.channel_failed(error)

    def release(self) -> None:
        """The partition is gone. What waits is dropped, unless the partition ended in good order."""
        self.listener = None
        if not (self.queue and isinstance(self.queue[-1], EndOfPartition)):
            self._drop()

    def _drop(self) -> None:
        self.queue.clear()
        self.queued_buffers = 0

    # -- how elements travel ------------------------------------------------------------------------

    @abstractmethod
    def _can_transmit(self) -> bool:
        """False while the transport has enough to do; `pump` is called when that ends."""

    @abstractmethod
    def _transmit(self, batch: Batch, backlog: int) -> None: ...

    @abstractmethod
    def _transmit_control(self, control: Control) -> None: ...

    @abstractmethod
    def _announce_backlog(self, backlog: int) -> None: ...

    def _flush(self) -> None:  # noqa: B027  only some transports collect
        """Send what `_transmit` collected."""


def append_control(queue: deque[Element], control: Control, controls_max: int) -> None:
    """Append `control`, merging it with those it makes obsolete.

    The order relative to batches and barriers is kept. Of adjacent watermarks and statuses at most three
    remain; of latency markers the oldest of each source, since it has measured most of the wait.

    Raises:
        ExchangeError: `controls_max` control elements are queued already.
    """
    if isinstance(control, Watermark | WatermarkStatus):
        _append_progress(queue, control)
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


def _append_progress(queue: deque[Element], newest: Watermark | WatermarkStatus) -> None:
    """Bring the run of watermarks and statuses at the end into the form: active, watermark, idle.

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
    """The position of a checkpoint's barrier in a queue."""
    for index, element in enumerate(queue):
        if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
            return index
    return None


def batches_before(queue: deque[Element], index: int) -> Iterator[Batch]:
    """The batches among the first `index` elements."""
    for element in islice(queue, index):
        if isinstance(element, BATCHES):
            yield element
