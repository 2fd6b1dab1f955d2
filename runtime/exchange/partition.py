"""The output of a subtask: batches go to the channels that the partitioner names, in buffers of good size.

Emission never blocks. A channel without credit queues, the partition is then `backlogged`, and the
subtask takes no further input until it is not: backpressure is only this.

A partly filled buffer leaves when something comes behind it that may not wait, such as a barrier, or after
the buffer timeout. It leaves earlier if neither end has anything better to do (`flush_early`): the subtask
is idle, and the receiver has taken all that was sent to it. So at most one small buffer per channel is on
its way, and a receiver that falls behind gets larger ones, as with Nagle's algorithm.

A barrier that may overtake goes to the head of each channel's queue: at once, or, if it has a timeout, when
it has waited in line for too long. The batches it passes are output state of the checkpoint; they are sent
all the same, later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...errors import ExchangeError, HeadgateError, check
from ...operators.clock import Clock
from ...operators.elements import Batch, CheckpointBarrier, Control, LatencyMarker, ObjectBatch
from ...state.snapshot import ChannelAddress
from .channel import OutputChannel
from .channel_state import InFlightRecords
from .partitioners import Partitioner
from .settings import ExchangeSettings
from .slicing import BatchSizer, Coalescer, cut, rows_within

EARLY_PAUSE_S = 0.002
"""The least time between two early flushes, per channel.

A partition sends at most 500 small buffers per second in this way, whatever its parallelism, and a
receiver gets as many on average: each of them has a price that does not depend on its rows.
"""
CLOCK_GRAIN_S = 0.000_001
"""A sleep may end slightly early by the clock."""
IDLE_LEAST = 0.01
"""The idle share of an event loop counts as at least this."""


@dataclass(slots=True)
class PartitionStats:
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
    ) -> None:
        """Nothing is sent yet.

        Args:
            channels: to the receivers, in the order the partitioner numbers them.
            partitioner: splits batches.
            settings: the limits.
            clock: for the buffer timeout.
            addresses: of the channels, if barriers may overtake records here.
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
        self._early_from = 0.0
        """The earliest time of the next early flush."""
        self._awaits_credit = False
        """True if buffers would have left early, had their receivers taken the ones before them."""
        self._sizer = BatchSizer()
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
        target = self._rows_target(batch)
        passes_through = rows >= target and len(self._channels) == 1 and not self.debloated_bytes
        size = 0 if passes_through else self._sizer.nbytes(batch)
        for index, piece in self._partitioner(batch):
            self._add(index, piece, target, size, rows)
        if self._timeout_s == 0:
            self.flush()
        self._raise_if_failed()

    def broadcast(self, element: Control) -> None:
        """Send a control element on all channels, behind everything emitted so far.

        A latency marker takes one channel, another one each time: it is a sample.

        Raises:
            ExchangeError: a channel broke.
        """
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
        """Send all partly filled buffers now."""
        for index in list(self._buffered_since):
            self._flush_channel(index)

    def _rows_target(self, batch: Batch) -> int:
        if isinstance(batch, ObjectBatch):
            return self._settings.object_rows_per_buffer
        return self._settings.rows_per_buffer_target

    def _add(self, index: int, piece: Batch, target: int, size: int, emitted: int) -> None:
        """Take a piece of what was emitted: `emitted` rows of `size` bytes; 0: that was not measured."""
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
            self._buffered_since[index] = self._clock.monotonic()
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
        if (
            isinstance(batch, ObjectBatch)
            and 0 < bytes_most <= self._sizes_max[index]
            and len(batch) < 2 * self._settings.object_rows_per_buffer
        ):
            buffers = [(batch, int(size_bytes))]  # it fits, so it need not be measured once more
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
        oldest = next(iter(self._buffered_since.values()), None)
        if oldest is None or self._timeout_s is None:
            return None
        return oldest + self._timeout_s

    def flush_due(self, now: float) -> bool:
        """True if a partly filled buffer has waited for the buffer timeout."""
        due = self.next_flush()
        return due is not None and now >= due

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
        pause_s = len(self._channels) * EARLY_PAUSE_S / max(IDLE_LEAST, 1.0 - load)
        for index in list(self._buffered_since):
            if self._channels[index].receiver_waits:
                self._flush_channel(index)
                self._early_from = now + pause_s
            else:
                self._awaits_credit = True

    def next_early(self) -> float | None:
        """Monotonic time from which `flush_early` may send something; None: not before credit comes."""
        if not self._buffered_since or self._timeout_s is None or self._awaits_credit:
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
