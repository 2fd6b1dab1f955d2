"""The barrier of one checkpoint as it leaves a result partition, and the batches that it overtakes.

A barrier that may overtake goes to the head of each channel's queue: at once, or, if it has a timeout, when
it has waited in line for too long. The batches it passes are output state of the checkpoint; they are sent
all the same, later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...operators.elements import CheckpointBarrier
from ...state.snapshot import ChannelAddress
from .channel import OutputChannel
from .in_flight import InFlightRecords


class BarrierOutlet:
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
        """The barrier is on its way on `channel`."""
        self._in_line.discard(channel)
        self._settle_if_done()

    def overtake(self) -> None:
        """The time of the barrier in line is over: where it still waits, it goes to the front."""
        barrier = self.barrier.overtaking()
        for channel, address in self._channels:
            if channel in self._in_line and channel.holds_barrier(barrier.checkpoint_id):
                self._overtake(channel, address, barrier)
        self.give_up()

    def give_up(self) -> None:
        """Nobody wants to know any more what the barrier overtakes: it stays where it is."""
        self._in_line.clear()
        self._settled.set()

    def forget(self) -> None:
        """Let go of what was overtaken: it is written, or not wanted."""
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
