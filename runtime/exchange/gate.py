"""The receiving end: all channels of all inputs of one subtask, and the credits their senders need.

Each channel owns `exclusive_buffers` credits. `floating_buffers` more belong to the gate: one is lent to
a channel whose sender announced a backlog above its credits, and comes back when a buffer is taken. So
for every channel: credits granted + buffers queued = exclusive + lent; memory is bounded by
channels × exclusive + floating buffers, whatever the senders do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from ...errors import ExchangeError, HeadgateError, check
from ...operators.elements import (
    WATERMARK_MAX,
    Batch,
    CheckpointBarrier,
    Control,
    Element,
    Watermark,
)
from ...state.snapshot import ChannelAddress
from .channel_state import GateCapture, InFlightRecords
from .partition import OutputChannel
from .queues import BATCHES, append_control, barrier_index, batches_before
from .settings import ExchangeSettings
from .wire import ChannelId

NOWHERE = ChannelAddress(source="", side="", target="", input_index=0, sender=0, receiver=0)
"""The address of a channel that is part of no checkpoint."""


class CreditReceiver(Protocol):
    """The way back to a channel's sender."""

    def add_credits(self, count: int) -> None:
        """Tell the sender that `count` more buffers are free."""
        ...

    def set_buffer_size(self, size_bytes: int) -> None:
        """Tell the sender how much its future buffers may hold."""
        ...


class InputChannelSpec(msgspec.Struct, frozen=True):
    """One channel of a gate, and the number of the operator input it belongs to."""

    channel_id: ChannelId
    input_index: int
    address: ChannelAddress = NOWHERE
    """The name of the channel in checkpoints; needed where barriers may overtake records."""


class Urgent(msgspec.Struct, frozen=True):
    """A barrier that does not wait for its turn.

    Attributes:
        position: of its channel.
        barrier: the barrier.
        read: it was taken out of the queue, past the records in front of it; False: it waits in line
            still, and is only announced.
    """

    position: int
    barrier: CheckpointBarrier
    read: bool


class _InputChannel:
    __slots__ = (
        "backlog", "blocked", "granted", "last_barrier", "lent", "queue", "queued", "sender", "spec",
        "wants_credit",
    )  # fmt: skip

    def __init__(self, spec: InputChannelSpec) -> None:
        self.spec = spec
        self.queue: deque[Element] = deque()
        self.queued = 0  # batches in the queue
        self.granted = 0  # credits the sender has, or that are on their way to it
        self.lent = 0  # floating credits among granted + queued
        self.backlog = 0  # batches the sender holds, as it said last
        self.blocked = False
        self.wants_credit = False  # stands in the line for floating credits
        self.sender: CreditReceiver | None = None
        # The last barrier taken: its checkpoint, and the number of elements in front of it.
        self.last_barrier = (0, 0)


PolledBatch: TypeAlias = tuple[int, Batch]
"""The position of a channel, and its next batch."""


class InputGate:
    """Takes what senders send; the subtask polls it. All calls belong in one event loop."""

    def __init__(
        self,
        channels: Sequence[InputChannelSpec],
        settings: ExchangeSettings | None = None,
        *,
        overtaking: bool = False,
    ) -> None:
        """No sender is attached yet.

        Args:
            channels: all channels, by position.
            settings: the limits.
            overtaking: barriers that may overtake records do so here; then all channels have addresses.
        """
        self.settings = settings = settings or ExchangeSettings()
        """The limits."""
        self._channels = [_InputChannel(spec) for spec in channels]
        self._position_of = {spec.channel_id: at for at, spec in enumerate(channels)}
        check(len(self._position_of) == len(channels), "a channel appears twice in one gate")
        self._exclusive = settings.exclusive_buffers
        self._floating = settings.floating_buffers
        self._pool = settings.floating_buffers
        self._controls_max = settings.queued_controls_max
        self._credit_line: deque[_InputChannel] = deque()
        # Positions that have elements and are not blocked, each once, in the order of their turn.
        self._ready: deque[int] = deque()
        self._queued = 0
        self._barriers = 0
        self._overtaking = overtaking
        self._urgent: deque[Urgent] = deque()
        self._capture: GateCapture | None = None
        self._buffers_total = len(channels) * self._exclusive + self._floating
        self._buffer_size: int | None = None
        self._error: HeadgateError | None = None
        self._lending = False
        self._wake: Callable[[], None] = lambda: None

    # -- the subtask's side -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def channel_ids(self) -> list[ChannelId]:
        """The channels, by position."""
        return [channel.spec.channel_id for channel in self._channels]

    def input_index_of(self, position: int) -> int:
        """The number of the operator input that channel `position` belongs to."""
        return self._channels[position].spec.input_index

    def address_of(self, position: int) -> ChannelAddress:
        """The name of channel `position` in checkpoints."""
        return self._channels[position].spec.address

    def poll(self) -> tuple[int, Element] | None:
        """Take the next element: round robin over the channels that have one and are not blocked.

        Taking a batch returns a credit to its sender.

        Raises:
            ExchangeError: a channel broke, or the gate is closed; queued elements are given up.
        """
        if self._error is not None:
            raise self._error
        return self._take(self._ready.popleft()) if self._ready else None

    def poll_control(self) -> tuple[int, Element] | None:
        """Like `poll`, but batches stay where they are: a channel whose next element is one is left out."""
        if self._error is not None:
            raise self._error
        for position in self._ready:
            if not isinstance(self._channels[position].queue[0], BATCHES):
                self._ready.remove(position)
                return self._take(position)
        return None

    def poll_alike(
        self, input_index: int, rows: int, wanted: Callable[[Batch], bool]
    ) -> list[PolledBatch]:
        """Take batches of one operator input that `wanted` accepts, at most one of each channel.

        Channels whose next element is something else keep their turns.

        Args:
            input_index: the operator input.
            rows: no batch is taken once those before it have this number of rows.
            wanted: called for each batch in question, in order.
        """
        taken: list[PolledBatch] = []
        passed: list[int] = []
        for _ in range(len(self._ready)):
            if rows <= 0 or not self._ready:
                break
            position = self._ready.popleft()
            channel = self._channels[position]
            batch = channel.queue[0]
            alike = channel.spec.input_index == input_index
            if alike and isinstance(batch, BATCHES) and wanted(batch):
                self._take(position)
                taken.append((position, batch))
                rows -= len(batch)
            else:
                passed.append(position)
        if self._error is None:  # else there are no turns any more
            self._ready.extendleft(reversed(passed))
        return taken

    def poll_watermarks(self) -> list[tuple[int, Watermark]]:
        """Take the watermarks that are the next elements of channels; others keep their turns.

        The last watermark of a channel stays: the subtask may come to its end with it.
        """
        found: list[tuple[int, Watermark]] = []
        passed: list[int] = []
        for _ in range(len(self._ready)):
            position = self._ready.popleft()
            element = self._channels[position].queue[0]
            if isinstance(element, Watermark) and element.timestamp != WATERMARK_MAX:
                self._take(position)
                found.append((position, element))
            else:
                passed.append(position)
        self._ready.extendleft(reversed(passed))
        return found

    def _take(self, position: int) -> tuple[int, Element]:
        """The next element of a channel that has just lost its turn."""
        channel = self._channels[position]
        element = channel.queue.popleft()
        if channel.queue:
            self._ready.append(position)
        if isinstance(element, BATCHES):
            self._recycle(channel)
        elif isinstance(element, CheckpointBarrier):
            self._barriers -= 1
            channel.last_barrier = (element.checkpoint_id, 0)
        return position, element

    # -- barriers that overtake ---------------------------------------------------------------------

    def poll_urgent(self) -> Urgent | None:
        """Take the next barrier that overtakes, or notice the next that may; blocks do not hold them.

        Raises:
            ExchangeError: a channel broke, or the gate is closed.
        """
        if self._error is not None:
            raise self._error
        while self._urgent:
            urgent = self._urgent.popleft()
            queue = self._channels[urgent.position].queue
            if any(element is urgent.barrier for element in queue):  # else it has had its turn
                if urgent.read:
                    self._pull(urgent.position, urgent.barrier)
                return urgent
        return None

    def _pull(self, position: int, barrier: CheckpointBarrier) -> None:
        """Take a barrier out of the middle of a queue."""
        channel = self._channels[position]
        index = barrier_index(channel.queue, barrier.checkpoint_id)
        assert index is not None  # as the caller has seen
        del channel.queue[index]
        channel.last_barrier = (barrier.checkpoint_id, index)
        self._barriers -= 1
        if not channel.queue and not channel.blocked:
            self._ready.remove(position)

    def start_capture(
        self, checkpoint_id: int, unread: Iterable[tuple[ChannelAddress, Batch]] = ()
    ) -> InFlightRecords:
        """Keep all records in front of the barriers of a checkpoint, here and still to come.

        Call it in the same step in which the barrier was polled that is the reason. Barriers of the
        checkpoint that are here already are polled as urgent next.

        Args:
            checkpoint_id: the checkpoint.
            unread: records that were taken out of the gate and are not processed: they come first.
        """
        check(self._overtaking, "a gate in which barriers keep their turn")
        capture = self._capture = GateCapture(checkpoint_id)
        for address, batch in unread:
            capture.records.add_in_turn(address, batch)
        for position, channel in enumerate(self._channels):
            taken_id, elements = channel.last_barrier
            if taken_id == checkpoint_id:
                self._keep(capture, channel, elements)
                continue
            index = barrier_index(channel.queue, checkpoint_id)
            self._keep(capture, channel, len(channel.queue) if index is None else index)
            if index is None:
                capture.open.add(position)
            else:
                barrier = channel.queue[index]
                assert isinstance(barrier, CheckpointBarrier)
                self._urgent.append(Urgent(position, barrier, read=True))
        return capture.records

    def _keep(self, capture: GateCapture, channel: _InputChannel, elements: int) -> None:
        for batch in batches_before(channel.queue, elements):
            capture.records.add(channel.spec.address, batch)

    def end_capture(self) -> None:
        """Keep nothing more."""
        self._capture = None

    def set_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a channel gets its turn, or the gate fails: `poll` has something then."""
        self._wake = wake

    def block(self, position: int) -> None:
        """Take nothing from channel `position` until `unblock_all`; its credits run out upstream."""
        channel = self._channels[position]
        if not channel.blocked:
            channel.blocked = True
            if channel.queue:
                self._ready.remove(position)

    def unblock_all(self) -> None:
        """End all blocks."""
        for position, channel in enumerate(self._channels):
            if channel.blocked:
                channel.blocked = False
                if channel.queue:
                    self._ready.append(position)
        if self._ready:
            self._wake()

    def fail(self, error: HeadgateError) -> None:
        """A channel broke: `poll` raises `error` from now on. The first error stays."""
        if self._error is None:
            self._error = error
            self._drop()
            self._wake()

    def close(self) -> None:
        """Give up all that is queued; what still arrives is ignored. Safe to call twice."""
        self.fail(ExchangeError("the input gate is closed"))
        for channel in self._channels:
            channel.sender = None  # a local one refers to this gate

    def _drop(self) -> None:
        self._ready.clear()
        self._urgent.clear()
        self._capture = None
        self._credit_line.clear()
        self._queued = self._barriers = 0
        for channel in self._channels:
            channel.queue.clear()
            channel.queued = 0

    @property
    def blocks(self) -> bool:
        """True if there is a channel that nothing is taken from."""
        return any(channel.blocked for channel in self._channels)

    @property
    def holds_barrier(self) -> bool:
        """True if a barrier waits here, perhaps behind batches."""
        return self._barriers > 0

    @property
    def queued_buffers(self) -> int:
        """Batches that wait here."""
        return self._queued

    @property
    def buffers_total(self) -> int:
        """The largest number of batches that may wait here."""
        return self._buffers_total

    @property
    def buffers_in_use(self) -> int:
        """Batches that wait here, and those that wait at the senders for room here.

        What a sender holds beyond one buffer per channel and the room of this gate, it has emitted in one
        go: it is cut already, and smaller buffers would not make it less.
        """
        backlog = sum(channel.backlog for channel in self._channels)
        return min(self._queued + backlog, self._buffers_total + len(self._channels))

    def announce_buffer_size(self, size_bytes: int) -> None:
        """Tell all senders, and those still to come, how much their future buffers may hold."""
        self._buffer_size = size_bytes
        for channel in self._channels:
            if channel.sender is not None:
                channel.sender.set_buffer_size(size_bytes)

    # -- the senders' side --------------------------------------------------------------------------

    def attach(self, channel_id: ChannelId, sender: CreditReceiver) -> int:
        """Make `sender` the sending end of a channel; returns its position. Then call `open`."""
        position = self._position_of.get(channel_id)
        if position is None:
            raise ExchangeError(f"the gate has no such channel channel=`{channel_id}`")
        channel = self._channels[position]
        if channel.sender is not None:
            raise ExchangeError(f"the channel has a sender already channel=`{channel_id}`")
        channel.sender = sender
        return position

    def open(self, position: int) -> None:
        """Grant the first credits."""
        channel = self._channels[position]
        self._grant(channel, self._exclusive)
        if self._buffer_size is not None and channel.sender is not None:
            channel.sender.set_buffer_size(self._buffer_size)

    def receive(self, position: int, batch: Batch, backlog: int) -> None:
        """A batch arrived; `backlog` more wait at its sender."""
        if self._error is not None:
            return
        channel = self._channels[position]
        check(channel.granted > 0, "batch without credit", channel=channel.spec.channel_id)
        check(self._queued < self._buffers_total, "the gate is over its buffers")
        channel.granted -= 1
        channel.queued += 1
        self._queued += 1
        was_empty = not channel.queue
        channel.queue.append(batch)
        if self._capture is not None and position in self._capture.open:
            self._capture.records.add(channel.spec.address, batch)
        if was_empty and not channel.blocked:
            self._give_turn(position)
        self._set_backlog(channel, backlog)

    def receive_control(self, position: int, control: Control) -> None:
        """A control element arrived.

        Raises:
            ExchangeError: far too many wait already.
        """
        if self._error is not None:
            return
        channel = self._channels[position]
        was_empty = not channel.queue
        append_control(channel.queue, control, self._controls_max)
        if isinstance(control, CheckpointBarrier):
            self._barriers += 1
            if self._overtaking and control.options.may_overtake:
                self._note_urgent(position, control)
            self._wake()  # perhaps the batches in front of it were held back
        if was_empty and not channel.blocked:
            self._give_turn(position)

    def receive_backlog(self, position: int, backlog: int) -> None:
        """The sender holds `backlog` batches and has no credit left."""
        if self._error is None:
            self._set_backlog(self._channels[position], backlog)

    def _give_turn(self, position: int) -> None:
        self._ready.append(position)
        self._wake()

    def _note_urgent(self, position: int, barrier: CheckpointBarrier) -> None:
        capture = self._capture
        captured = capture is not None and capture.checkpoint_id == barrier.checkpoint_id
        if capture is not None and captured:
            capture.open.discard(position)
        read = barrier.options.unaligned or captured
        self._urgent.append(Urgent(position, barrier, read=read))

    # -- credits ------------------------------------------------------------------------------------

    def _grant(self, channel: _InputChannel, count: int) -> None:
        channel.granted += count
        if channel.sender is not None:
            channel.sender.add_credits(count)

    def _recycle(self, channel: _InputChannel) -> None:
        """A buffer is free again: back to the pool if it was lent, else to the sender as credit."""
        channel.queued -= 1
        self._queued -= 1
        if channel.lent > 0:
            channel.lent -= 1
            self._pool += 1
            self._join_credit_line(channel)
            self._lend()
        else:
            self._grant(channel, 1)

    def _set_backlog(self, channel: _InputChannel, backlog: int) -> None:
        channel.backlog = backlog
        self._join_credit_line(channel)
        self._lend()

    def _join_credit_line(self, channel: _InputChannel) -> None:
        if channel.backlog > channel.granted and not channel.wants_credit:
            channel.wants_credit = True
            self._credit_line.append(channel)

    def _lend(self) -> None:
        """Lend free floating credits one by one, so that no channel takes the pool for itself."""
        if self._lending:
            # A local sender uses its credit, and comes back here, within `_grant`.
            return
        self._lending = True
        try:
            while self._pool > 0 and self._credit_line:
                channel = self._credit_line.popleft()
                channel.wants_credit = False
                if channel.backlog > channel.granted:
                    self._pool -= 1
                    channel.lent += 1
                    self._grant(channel, 1)
                    self._join_credit_line(channel)
        finally:
            self._lending = False

    def validate(self) -> None:
        """Check all invariants of the credits; for tests and after suspicious events."""
        lent = sum(channel.lent for channel in self._channels)
        check(self._pool >= 0, "the pool is overdrawn", pool=self._pool)
        check(self._pool + lent == self._floating, "floating credits leaked", lent=lent)
        for position, channel in enumerate(self._channels):
            own = self._exclusive if channel.sender is not None else 0
            check(
                channel.granted + channel.queued == own + channel.lent,
                "credits leaked",
                channel=channel.spec.channel_id,
            )
            batches = sum(isinstance(element, BATCHES) for element in channel.queue)
            check(batches == channel.queued, "buffers miscounted", queued=channel.queued)
            expected = 1 if channel.queue and not channel.blocked else 0
            check(self._ready.count(position) == expected, "turn lost", position=position)


class LocalOutputChannel(OutputChannel):
    """Sends to a gate of the same event loop."""

    _gate: InputGate | None = None
    _position = 0

    def bind(self, gate: InputGate) -> None:
        """Connect to the gate, which grants the first credits at once."""
        check(self._gate is None, "channel is bound already", channel=self.channel_id)
        self._gate = gate
        self._position = gate.attach(self.channel_id, self)
        gate.open(self._position)

    def _can_transmit(self) -> bool:
        return self._gate is not None

    def _transmit(self, batch: Batch, backlog: int) -> None:
        assert self._gate is not None
        self._gate.receive(self._position, batch, backlog)

    def _transmit_control(self, control: Control) -> None:
        assert self._gate is not None
        self._gate.receive_control(self._position, control)

    def _announce_backlog(self, backlog: int) -> None:
        assert self._gate is not None
        self._gate.receive_backlog(self._position, backlog)
