"""The output of a subtask: batches go to the channels that the partitioner names, in buffers of good size.

Small column batches are gathered before they are split (`gather_rows`), because each piece of a batch has a
price that does not depend on its rows: about ten microseconds. What is gathered leaves by the same rules as
a partly filled buffer.

Emission never blocks. A channel without credit queues, the partition is then `backlogged`, and the
subtask takes no further input until it is not: backpressure is only this.

A partly filled buffer leaves when something comes behind it that may not wait, such as a barrier, or after
the buffer timeout. It leaves earlier if neither end has anything better to do (`flush_early`): the subtask
is idle, and the receiver has taken all that was sent to it. So at most one small buffer per channel is on
its way, and a receiver that falls behind gets larger ones, as with Nagle's algorithm.

A barrier that may overtake goes to the head of each channel's queue: at once, or, if it has a timeout, when
it has waited in line for too long. The batches it passes are output state of the checkpoint; they are sent
all the same, later.

Each channel has a queue, and credits that allow batches to leave it. One credit is one free buffer at the
receiver. Batches wait in the queue for credit; control elements need none but keep their place in line.
`LocalOutputChannel` in `gate.py` and `links.py` say how an element really travels. Since control elements
cost no credit, their queues must stay short by other means: a watermark or status that was not read yet is
worth nothing once a newer one stands right behind it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

import msgspec

from ...errors import ExchangeError, HeadgateError, check
from ...operators.clock import Clock
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
from ...state.snapshot import ChannelAddress
from .channel_state import InFlightRecords
from .numbers import NumberFinder
from .partitioners import Partitioner
from .queues import BATCHES, HeldProgress, append_control, barrier_index, batches_before
from .settings import ExchangeSettings
from .slicing import BatchSizer, Coalescer, cut, cut_evenly, rows_within
from .wire import ChannelId

EARLY_PAUSE_S = 0.002
"""The least time between two early flushes, per channel.

A partition sends at most 500 small buffers per second in this way, whatever its parallelism, and a
receiver gets as many on average: each of them has a price that does not depend on its rows.
"""
GATHERED_SHARE = 16
"""What is gathered is split when it fills this part of a buffer for each channel, by rows or bytes."""
GATHERED_ROW_BYTES_MAX = 8_192
"""Batches of larger rows are not gathered: one more copy of them costs more than a split."""
GATHERED_BYTES_MAX = 64 << 20
"""What is gathered is split from this size on, whatever the number of channels."""
CLOCK_GRAIN_S = 0.000_001
"""A sleep may end slightly early by the clock."""
IDLE_LEAST = 0.01
"""The idle share of an event loop counts as at least this."""


class PartitionStats(msgspec.Struct):
    """Counts of what left a partition so far, per receiving channel, and of what waits for credit."""

    records_out: int = 0
    bytes_out: int = 0
    buffers_out: int = 0
    queued_buffers: int = 0


class ResultPartition:
    """One output of a subtask: the channels to the subtasks of one downstream vertex."""

    def __init__(
        self,
        channels: Sequence[OutputChannel],
        partitioner: Partitioner,
        settings: ExchangeSettings,
        clock: Clock,
        addresses: Sequence[ChannelAddress] | None = None,
        gather_rows: int = 0,
        may_hold_watermarks: bool = False,
    ) -> None:
        """Nothing is sent yet.

        Args:
            channels: to the receivers, in the order the partitioner numbers them.
            partitioner: splits batches.
            settings: the limits.
            clock: for the buffer timeout.
            addresses: of the channels, if barriers may overtake records here.
            gather_rows: column batches are gathered until they have this number of rows, and then split;
                0: each is split when it is emitted.
            may_hold_watermarks: watermarks may wait for partly filled buffers, see `HeldProgress`.
        """
        check(channels, "a result partition needs a channel")
        self._channels = list(channels)
        self._partitioner = partitioner
        self._settings = settings
        self._clock = clock
        timeout_ms = settings.buffer_timeout_ms
        self._timeout_s = None if timeout_ms is None else timeout_ms / 1000
        self._coalescers = [Coalescer() for _ in channels]
        # When each partly filled buffer got its first record; the oldest is the first.
        self._buffered_since: dict[int, float] = {}
        # Without a timeout that has to pass, gathering would only copy.
        rows_max = len(channels) * settings.rows_per_buffer_target // GATHERED_SHARE
        self._gather_rows = 0 if timeout_ms == 0 else min(gather_rows, rows_max)
        self._gathered = Coalescer()
        self._gathered_since = 0.0
        """The time at which the first of the gathered records was emitted."""
        self._held: HeldProgress | None = None
        if may_hold_watermarks and self._timeout_s is not None:
            self._held = HeldProgress(self._timeout_s)
        self._early_from = 0.0
        """The earliest time of the next early flush."""
        self._awaits_credit = False
        """True if buffers would have left early, had their receivers taken the ones before them."""
        self._sizer = BatchSizer()
        # A single receiver of this process is given the objects as they are.
        sends_numbers = len(channels) > 1 or any(channel.encodes for channel in channels)
        self._numbers = NumberFinder() if sends_numbers else None
        self._stats = PartitionStats()
        self._sizes_max: list[int] = []
        self._backlogged_channels = 0
        self.debloated_bytes: int | None = None
        """The bytes of one buffer for each channel together, while a receiver wants small buffers. The
        smallest counts for all: records are taken to be spread evenly."""
        self.emitted_bytes = 0
        """The bytes emitted, as far as they had to be measured: all of them while buffers are debloated."""
        self._markers = 0
        self._error: HeadgateError | None = None
        self._wake: Callable[[], None] = lambda: None
        self._addresses = addresses
        self._outgoing: OutgoingBarrier | None = None
        for channel in channels:
            channel.listener = self
            if channel.queued_buffers:
                self._backlogged_channels += 1
            if channel.error is not None:
                self.channel_failed(channel.error)
        self.buffer_size_changed()

    # -- sending ------------------------------------------------------------------------------------

    def emit(self, batch: Batch) -> None:
        """Send `batch`, in part later: see `flush`. Never blocks.

        Raises:
            ExchangeError: a channel broke, or a record cannot be sent.
            UserCodeError: the user's key or partition function failed.
        """
        rows = len(batch)
        if rows == 0:
            return
        if self._error is not None:
            raise self._error
        if self._numbers is not None and isinstance(batch, ObjectBatch):
            batch = self._numbers(batch)
        target = self._rows_target(batch)
        passes_through = rows >= target and len(self._channels) == 1 and not self.debloated_bytes
        size = 0 if passes_through else self._sizer.nbytes(batch)
        small = rows < self._gather_rows and size <= rows * GATHERED_ROW_BYTES_MAX
        if small and isinstance(batch, ColumnBatch):
            self._gather(batch, size)
        else:
            self._split_gathered()
            self._split(batch, target, size, None)
        if self._timeout_s == 0:
            self.flush()
        self._raise_if_failed()

    def broadcast(self, element: Control) -> None:
        """Send a control element on all channels, behind everything emitted so far.

        A latency marker takes one channel, another one each time: it is a sample.

        Raises:
            ExchangeError: a channel broke.
        """
        if self._holds(element):
            self._raise_if_failed()
            return
        self.flush()
        if isinstance(element, CheckpointBarrier):
            self._send_barrier(element)
        elif isinstance(element, LatencyMarker):
            self._markers += 1
            self._channels[self._markers % len(self._channels)].send_control(element)
        else:
            for channel in self._channels:
                channel.send_control(element)
        self._raise_if_failed()

    def _holds(self, element: Control) -> bool:
        """Return True if a watermark or status waits for the partly filled buffers in front of it."""
        nothing = not self._buffered_since and not self._gathered.pieces
        if self._held is None or nothing or not isinstance(element, Watermark | WatermarkStatus):
            return False
        return self._held.hold(element, self._clock.monotonic())

    def _send_held(self) -> None:
        """Send the watermarks that waited; all records in front of them have left."""
        if self._held:
            for element in self._held.take(self._clock.monotonic()):
                for channel in self._channels:
                    channel.send_control(element)

    def _send_barrier(self, barrier: CheckpointBarrier) -> None:
        if self._outgoing is not None:
            self._outgoing.give_up()
            self._outgoing = None
        if self._addresses is not None and barrier.options.may_overtake:
            self._outgoing = OutgoingBarrier(barrier, self._channels, self._addresses)
            self._outgoing.send()
        else:
            for channel in self._channels:
                channel.send_control(barrier)

    def outgoing_barrier(self, checkpoint_id: int) -> OutgoingBarrier | None:
        """The way out of the last barrier, if it is of this checkpoint and may overtake records here."""
        outgoing = self._outgoing
        return outgoing if outgoing and outgoing.barrier.checkpoint_id == checkpoint_id else None

    def flush(self) -> None:
        """Send all partly filled buffers now, and the watermarks that wait for them."""
        self._split_gathered()
        for index in list(self._buffered_since):
            self._flush_channel(index)
        self._send_held()

    def _gather(self, batch: Batch, size: int) -> None:
        """Take a batch of `size` bytes; split what is gathered if it is enough."""
        gathered = self._gathered
        if not gathered.accepts(batch):
            self._split_gathered()
        if not gathered.pieces:
            self._gathered_since = self._clock.monotonic()
        gathered.add(batch, size, size)
        self.emitted_bytes += size
        enough = gathered.rows >= self._gather_rows
        if enough or gathered.bytes_most >= self._gathered_bytes_max:
            self._split_gathered()

    def _split_gathered(self) -> None:
        gathered = self._gathered
        if not gathered.pieces:
            return
        emitted_bytes, size = self.emitted_bytes, gathered.bytes_most
        batch = gathered.take()
        self._split(batch, self._rows_target(batch), size, self._gathered_since)
        self.emitted_bytes = emitted_bytes  # they were counted when they were emitted

    def _split(self, batch: Batch, target: int, size: int, since: float | None) -> None:
        """Split a batch of `size` bytes, emitted at the time `since`; None: now."""
        rows = len(batch)
        for index, piece in self._partitioner(batch):
            self._add(index, piece, target, size, rows, since)

    def _rows_target(self, batch: Batch) -> int:
        if isinstance(batch, ObjectBatch):
            return self._settings.object_rows_per_buffer
        return self._settings.rows_per_buffer_target

    def _add(
        self, index: int, piece: Batch, target: int, size: int, emitted: int, since: float | None
    ) -> None:
        """Take a piece of what was emitted at the time `since`, or now.

        That was `emitted` rows of `size` bytes; 0: that was not measured.
        """
        row_bytes = size / emitted
        coalescer, size_max = self._coalescers[index], self._sizes_max[index]
        rows = len(piece)
        self.emitted_bytes += int(rows * row_bytes)
        if size_max < self._settings.buffer_size_max_bytes and row_bytes:
            target = min(target, rows_within(size_max, row_bytes))
        if coalescer.pieces and (rows >= target or not coalescer.accepts(piece)):
            self._flush_channel(index)
        if rows >= target:
            self._send(index, piece, rows * row_bytes, size)
            return
        if not coalescer.pieces:
            self._buffered_since[index] = self._clock.monotonic() if since is None else since
        coalescer.add(piece, rows * row_bytes, size)
        if coalescer.size_bytes >= size_max or coalescer.rows >= target:
            self._flush_channel(index)

    def _flush_channel(self, index: int) -> None:
        del self._buffered_since[index]
        coalescer = self._coalescers[index]
        size, most = coalescer.size_bytes, coalescer.bytes_most
        self._send(index, coalescer.take(), size, most)

    def _send(self, index: int, batch: Batch, size_bytes: float, bytes_most: int) -> None:
        stats, channel = self._stats, self._channels[index]
        buffers: Iterable[tuple[Batch, int]]
        if isinstance(batch, ObjectBatch) and 0 < bytes_most <= self._sizes_max[index]:
            # Each part of it fits, so that nothing needs to be measured once more.
            buffers = cut_evenly(batch, self._settings.object_rows_per_buffer, size_bytes)
        else:
            buffers = cut(batch, self._settings, self._sizer, self._sizes_max[index])
        for buffer, size in buffers:
            stats.records_out += len(buffer)
            stats.bytes_out += size
            stats.buffers_out += 1
            channel.send(buffer)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    # -- time ---------------------------------------------------------------------------------------

    def next_flush(self) -> float | None:
        """Monotonic time at which `flush` is due; None: nothing to flush, or no timeout."""
        # What is gathered is younger than any buffer: all that was emitted before it has been split.
        gathered_since = self._gathered_since if self._gathered.pieces else None
        oldest = next(iter(self._buffered_since.values()), gathered_since)
        if self._timeout_s is None:
            return None
        due = None if oldest is None else oldest + self._timeout_s
        if not self._held:
            return due
        return self._held.due if due is None else min(due, self._held.due)

    def flush_due(self, now: float) -> bool:
        """True if a partly filled buffer has waited for the buffer timeout."""
        due = self.next_flush()
        return due is not None and now >= due - CLOCK_GRAIN_S

    def flush_early(self, now: float, load: float) -> None:
        """Send partly filled buffers to receivers that wait for records. Call it when nothing is to do.

        Args:
            now: the monotonic time.
            load: the share of the time for which this event loop is at work, from 0 to 1. Small buffers
                cost time of others, so they may take a part of what is left only: above a certain load
                buffers wait for the timeout, or until they are full.
        """
        self._awaits_credit = False
        if self._timeout_s is None or now < self._early_from - CLOCK_GRAIN_S:
            return
        self._split_gathered()
        pause_s = len(self._channels) * EARLY_PAUSE_S / max(IDLE_LEAST, 1.0 - load)
        for index in list(self._buffered_since):
            if self._channels[index].receiver_waits:
                self._flush_channel(index)
                self._early_from = now + pause_s
            else:
                self._awaits_credit = True
        if not self._buffered_since:
            self._send_held()

    def next_early(self) -> float | None:
        """Monotonic time from which `flush_early` may send something; None: not before credit comes."""
        nothing = not self._buffered_since and not self._gathered.pieces and not self._held
        if nothing or self._timeout_s is None or self._awaits_credit:
            return None
        return self._early_from

    # -- backpressure -------------------------------------------------------------------------------

    @property
    def backlogged(self) -> bool:
        """True if a channel holds batches it may not send yet.

        Raises:
            ExchangeError: a channel broke, so that waiting would never end.
        """
        if self._error is not None:
            raise self._error
        return self._backlogged_channels > 0

    def set_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the backlog ends, a channel breaks, or credit came for which a buffer waits."""
        self._wake = wake

    def backlog_changed(self, change: int) -> None:
        """Note that a channel began (+1) or ceased (-1) to be backlogged."""
        self._backlogged_channels += change
        if self._backlogged_channels == 0:
            self._wake()

    def credit_came(self) -> None:
        """Note that a receiver has taken a batch: perhaps it waits for the next."""
        if self._awaits_credit:
            self._awaits_credit = False
            self._wake()

    def buffer_size_changed(self) -> None:
        """Note that the receiver of a channel wants buffers of another size."""
        largest = self._settings.buffer_size_max_bytes
        self._sizes_max = [
            min(each.buffer_size_bytes or largest, largest) for each in self._channels
        ]
        share = sum(self._sizes_max) // GATHERED_SHARE
        self._gathered_bytes_max = min(GATHERED_BYTES_MAX, share)
        smallest = min(self._sizes_max)
        self.debloated_bytes = smallest * len(self._channels) if smallest < largest else None

    def channel_failed(self, error: HeadgateError) -> None:
        """Note that a channel is broken. The first error stays."""
        if self._error is None:
            self._error = error
            self._wake()

    def barrier_left(self, channel: OutputChannel, barrier: CheckpointBarrier) -> None:
        """Note that the barrier is on its way on a channel."""
        outgoing = self.outgoing_barrier(barrier.checkpoint_id)
        if outgoing is not None:
            outgoing.left(channel)

    # -- the rest -----------------------------------------------------------------------------------

    def stats(self) -> PartitionStats:
        """Counters since the start, and the queue length now."""
        self._stats.queued_buffers = sum(channel.queued_buffers for channel in self._channels)
        return self._stats

    def close(self) -> None:
        """Release the channels. After the end of the partition they still send the batches that they hold;
        otherwise these are dropped. Safe to call twice."""
        if self._outgoing is not None:
            self._outgoing.give_up()
        for channel in self._channels:
            channel.release()
        self._coalescers = [Coalescer() for _ in self._channels]
        self._gathered = Coalescer()
        self._held = None
        self._buffered_since.clear()
        if self._error is None:
            self.channel_failed(ExchangeError("the result partition is closed"))


class OutgoingBarrier:
    """One barrier on its way out of one partition."""

    def __init__(
        self,
        barrier: CheckpointBarrier,
        channels: Sequence[OutputChannel],
        addresses: Sequence[ChannelAddress],
    ) -> None:
        self.barrier = barrier
        self.overtaken = InFlightRecords()
        self._channels = list(zip(channels, addresses, strict=True))
        self._in_line: set[OutputChannel] = set()
        self._settled = asyncio.Event()

    def send(self) -> None:
        """Send the barrier on all channels."""
        if self.barrier.options.unaligned:
            for channel, address in self._channels:
                self._overtake(channel, address, self.barrier)
            self._settled.set()
            return
        self._in_line = {channel for channel, _ in self._channels}
        for channel, _ in self._channels:
            channel.send_control(self.barrier)
        self._settle_if_done()

    def left(self, channel: OutputChannel) -> None:
        """Note that the barrier is on its way on `channel`."""
        self._in_line.discard(channel)
        self._settle_if_done()

    def overtake(self) -> None:
        """Move the barrier to the front where it still waits in line, because its time there is over."""
        barrier = self.barrier.overtaking()
        for channel, address in self._channels:
            if channel in self._in_line and channel.holds_barrier(barrier.checkpoint_id):
                self._overtake(channel, address, barrier)
        self.give_up()

    def give_up(self) -> None:
        """Leave the barrier where it is: its checkpoint does not need what it overtakes."""
        self._in_line.clear()
        self._settled.set()

    def forget(self) -> None:
        """Release the overtaken batches: they are written, or not needed."""
        self.give_up()
        self.overtaken = InFlightRecords()

    async def settled(self) -> None:
        """Wait until it is known what the barrier overtook here."""
        await self._settled.wait()

    def _overtake(
        self, channel: OutputChannel, address: ChannelAddress, barrier: CheckpointBarrier
    ) -> None:
        for batch in channel.overtake(barrier):
            self.overtaken.add(address, batch)

    def _settle_if_done(self) -> None:
        if not self._in_line:
            self._settled.set()


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

    encodes: ClassVar[bool] = False
    """True if elements leave as bytes."""

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
