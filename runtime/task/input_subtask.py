"""A subtask with upstream subtasks: reads its gate, handles barriers, and combines watermarks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Final, final

import msgspec

from ...errors import check
from ...operators.base import AsyncOperator
from ...operators.elements import (
    WATERMARK_MAX,
    Batch,
    CancelCheckpointMarker,
    CheckpointBarrier,
    ColumnBatch,
    Element,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    LoopProbe,
    ObjectBatch,
    Watermark,
    WatermarkStatus,
)
from ...state.snapshot import ChannelAddress
from ..exchange.gate import InputGate, PolledBatch
from ..exchange.slicing import BatchSizer, Coalescer
from ..protocol.barriers.alternating import AlternatingBarrierHandler
from ..protocol.barriers.at_least_once import AtLeastOnceTracker
from ..protocol.barriers.handler import (
    AbortCheckpoint,
    AlignedBarrierHandler,
    AlignmentDecision,
    BarrierHandler,
    BlockChannel,
    DropCapture,
    FinishCapture,
    ForwardCancel,
    StartCapture,
    StartTimer,
    TriggerSnapshot,
    UnblockAll,
)
from ..protocol.ids import ChannelPosition, CheckpointId
from .accounting import Activity
from .chain import Outputs, with_context
from .channel_state_writer import InputCapture
from .environment import TaskEnvironment
from .subtask import Subtask
from .valve import ValveOutput, WatermarkValve

BEHIND_THE_END: Final = "records behind the end of data"
"""The error of a sender that goes on after it has said that it would not."""
FRESH_OBJECTS_MAX: Final = 1_024
"""The most records that are made of arrays at once: they, and as many results, fit into a core's cache."""
_NONE = -1


class InputBatch(msgspec.Struct):
    """Records of one channel to be processed next: a batch, or the rest of one."""

    channel: ChannelAddress
    input_index: int
    batch: Batch


class InputSubtask(Subtask):
    """Input from an exchange."""

    def __init__(
        self,
        env: TaskEnvironment,
        outputs: Outputs,
        gate: InputGate,
    ) -> None:
        super().__init__(env, outputs)
        self.gate = gate
        gate.set_listener(self.signal.set)
        if self.debloater is not None:
            self.debloater.watch(gate)
        self._valve = WatermarkValve(len(gate))
        self._barriers_in = _barrier_handler(env, len(gate))
        self._probes = ProbeAlignment(env.plan.loops_through(env.vertex))
        self._with_data = set(range(len(gate)))
        # Records that were in flight in the restored checkpoint come first.
        self._recovered: deque[InputBatch] = deque()
        self._current: InputBatch | None = None
        self._capture: InputCapture | None = None
        self._barrier_timer: asyncio.TimerHandle | None = None
        self._sizer = BatchSizer()
        self._merger = BatchMerger(gate, self._with_data)

    def recover(self, batches: Iterable[InputBatch]) -> None:
        """Process `batches` before anything from the gate. Call it before `start`."""
        self._recovered.extend(batches)

    async def step(self) -> bool:
        if self._current is None and not self._next_batch():
            return await self._next_control()
        await self._process_some()
        return True

    def _next_batch(self) -> bool:
        """Take restored records, if any are left."""
        if self._recovered and not self._holds_back():
            self._current = self._recovered.popleft()
        return self._current is not None

    async def _next_control(self) -> bool:
        """Take the next element of the gate; return False if there is none that may be read now."""
        if self._recovered:
            return False  # nothing may pass it, watermarks included
        polled = self.gate.poll_control() if self._holds_back() else self.gate.poll()
        if polled is None:
            return False
        self.time.switch(Activity.BUSY)
        position, element = polled
        if isinstance(element, ColumnBatch | ObjectBatch):
            check(position in self._with_data, BEHIND_THE_END, channel=position)
            self._current = InputBatch(
                self.gate.address_of(position), self.gate.input_index_of(position), element
            )
            await self._process_some()
        elif isinstance(element, EndOfData):
            await self._end_of_data(position)
        else:
            self._control(position, element)
        return True

    async def _process_some(self) -> None:
        """Process a slice worth about `slice_ms`: of the current batch, and of others if it is small.

        Between slices mail is read, backpressure is checked, and a barrier may overtake the rest.
        """
        current = self._current
        assert current is not None  # the caller has checked
        batch, rows = current.batch, self._rows_at_once(current.batch)
        # A coroutine yields by itself, and keeps more calls in flight the more records it is given.
        if isinstance(self.chain.head.operator, AsyncOperator):
            self._current = None
        elif len(batch) > rows:
            current.batch = batch.slice(rows, len(batch) - rows)
            batch = batch.slice(0, rows)
        else:
            self._current = None
            if not self._recovered:  # nothing may pass those
                batch = self._merge(batch, current.input_index, rows)
        if self._barriers_in.pending or self._capture is not None:
            self._processed_bytes += self._sizer.nbytes(batch)
        await self._process_slice(batch, current.input_index)

    def _rows_at_once(self, batch: Batch) -> int:
        rows = self._slice_rows()
        made_here = isinstance(batch, ObjectBatch) and batch.numbers is not None
        return min(rows, FRESH_OBJECTS_MAX) if made_here else rows

    def _merge(self, batch: Batch, input_index: int, rows: int) -> Batch:
        """Put batches of the gate behind `batch`, up to `rows` records; the rest is the current batch."""
        batch, rest = self._merger.merge(batch, input_index, rows)
        if rest is not None:
            position, unread = rest
            self._current = InputBatch(self.gate.address_of(position), input_index, unread)
        return batch

    def _holds_back(self) -> bool:
        """Return True if no records may be read for now."""
        operator = self.chain.head.operator
        if not operator.full():
            return False
        waits = self._barriers_in.pending or self.gate.holds_barrier
        return not (waits and operator.stores_what_waits)

    def _control(self, position: int, element: Element) -> None:
        channel = ChannelPosition(position)
        now_ms = self.env.clock.now_ms()
        match element:
            case Watermark():
                self._take_watermarks(channel, element)
            case WatermarkStatus(idle):
                self._advance(self._valve.on_status(channel, idle))
            case CheckpointBarrier():
                self._obey(self._barriers_in.on_barrier(channel, element, now_ms))
            case CancelCheckpointMarker(checkpoint_id):
                self._obey(self._barriers_in.on_cancel(channel, CheckpointId(checkpoint_id)))
            case EndOfPartition():
                self._obey(self._barriers_in.on_end_of_partition(channel, now_ms))
            case LatencyMarker():
                self.mark_latency(element)
            case LoopProbe():
                self._probes.on_probe(position, element)
                self._pass_probes()

    def _take_watermarks(self, channel: ChannelPosition, first: Watermark) -> None:
        """Advance once for a watermark and those that are the next elements of other channels.

        With many senders, most of them move time by a little, and each step has a price of its own.
        """
        output = self._valve.on_watermark(channel, first.timestamp)
        if first.timestamp != WATERMARK_MAX:
            for position, watermark in self.gate.poll_watermarks():
                later = self._valve.on_watermark(ChannelPosition(position), watermark.timestamp)
                output = output if later.watermark is None else later
        self._advance(output)

    async def _end_of_data(self, position: int) -> None:
        self._with_data.discard(position)
        if self._with_data:
            self._advance(self._valve.on_end(ChannelPosition(position)))
            self._pass_probes()
        else:
            await self.finish()

    def _pass_probes(self) -> None:
        """Forward the probes that have arrived on all channels, after everything still to be emitted."""
        if self._probes.in_a_loop and self.chain.settled():
            for probe in self._probes.due(self._with_data):
                self.chain.broadcast(probe)

    async def _run_mail(self) -> None:
        await super()._run_mail()
        self._pass_probes()  # the chain may have settled just now

    def _advance(self, output: ValveOutput) -> None:
        head = self.chain.head
        if output.idle is False:
            with_context(head, head.operator.on_idle, False)
        if output.watermark is not None:
            head.current_watermark = output.watermark
            with_context(head, head.operator.on_watermark, output.watermark)
        if output.idle:
            with_context(head, head.operator.on_idle, True)

    # -- barriers -----------------------------------------------------------------------------------

    def urgent(self) -> bool:
        found = self.gate.poll_urgent()
        if found is None:
            return False
        self.time.switch(Activity.BUSY)
        position, now_ms = ChannelPosition(found.position), self.env.clock.now_ms()
        if found.read:
            self._obey(self._barriers_in.on_barrier(position, found.barrier, now_ms))
        else:
            self._obey(self._barriers_in.on_announced(position, found.barrier, now_ms))
        return True

    def _obey(self, decisions: list[AlignmentDecision]) -> None:
        for decision in decisions:
            match decision:
                case BlockChannel(position):
                    self.gate.block(position)
                case UnblockAll():
                    self.gate.unblock_all()
                case TriggerSnapshot(barrier, alignment_ms):
                    if not self.take_snapshot(barrier, float(alignment_ms)):
                        self._end_capture()
                    if self._capture is None:
                        self._processed_bytes = 0
                case AbortCheckpoint(checkpoint_id, reason):
                    self.snapshots.decline(checkpoint_id, reason.value, reason.sentence)
                case ForwardCancel(checkpoint_id):
                    self._processed_bytes = 0
                    self.chain.broadcast(CancelCheckpointMarker(checkpoint_id))
                case StartTimer(at_ms):
                    self._start_timer(at_ms)
                case StartCapture(checkpoint_id):
                    self._start_capture(checkpoint_id)
                case FinishCapture(_, alignment_ms):
                    if self._capture is not None:
                        self._capture.finish(alignment_ms, self._processed_bytes)
                    self._end_capture()
                case DropCapture(checkpoint_id):
                    self._end_capture()
                    self.snapshots.give_up(checkpoint_id)

    def _start_timer(self, at_ms: int) -> None:
        if self._barrier_timer is not None:
            self._barrier_timer.cancel()

        def due() -> None:
            self._obey(self._barriers_in.on_timer(self.env.clock.now_ms()))

        delay_ms = max(0, at_ms - self.env.clock.now_ms())
        loop = asyncio.get_running_loop()
        self._barrier_timer = loop.call_later(delay_ms / 1000, lambda: self.put_mail(due))

    def _start_capture(self, checkpoint_id: int) -> None:
        """Capture records; those taken from the gate and not processed come before those in it."""
        unread = [*self._recovered] if self._current is None else [self._current, *self._recovered]
        records = self.gate.start_capture(
            checkpoint_id, [(each.channel, each.batch) for each in unread]
        )
        self._capture = InputCapture(records)

    def _end_capture(self) -> None:
        self.gate.end_capture()
        self._capture = None
        self._processed_bytes = 0

    def _input_capture(self) -> InputCapture | None:
        return self._capture

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        super().checkpoint_aborted(checkpoint_id)
        self.put_mail(
            lambda: self._obey(self._barriers_in.on_abort_notice(CheckpointId(checkpoint_id)))
        )

    async def _release(self) -> None:
        if self._barrier_timer is not None:
            self._barrier_timer.cancel()
        await super()._release()


def _barrier_handler(env: TaskEnvironment, channels: int) -> BarrierHandler:
    if not env.settings.exactly_once:
        return AtLeastOnceTracker(channels)
    if env.overtaking:
        return AlternatingBarrierHandler(channels)
    return AlignedBarrierHandler(channels)


@final
class ProbeAlignment:
    """Decides when a subtask inside a loop forwards a probe; probes of other loops are ignored. Pure.

    Unlike a barrier a probe blocks nothing. Records that overtake it in another channel were sent after
    a probe, and are counted where they come back. A channel from outside the loop carries no probes:
    the probe waits until the data of that channel ends, since its records may still go round.
    """

    def __init__(self, loops: Collection[str]) -> None:
        self._seen: dict[str, dict[int, int]] = {loop: {} for loop in loops}
        self._passed = dict.fromkeys(loops, _NONE)

    @property
    def in_a_loop(self) -> bool:
        """Return False if no probe will ever be due."""
        return bool(self._seen)

    def on_probe(self, position: int, probe: LoopProbe) -> None:
        """Handle a probe read from a channel."""
        if probe.loop in self._seen:
            self._seen[probe.loop][position] = probe.number

    def due(self, positions: Collection[int]) -> Iterator[LoopProbe]:
        """Yield probes to forward now; `positions` are the channels that still have data."""
        for loop, seen in self._seen.items():
            number = min((seen.get(each, _NONE) for each in positions), default=_NONE)
            if number > self._passed[loop]:
                self._passed[loop] = number
                yield LoopProbe(loop, number)


@final
class BatchMerger:
    """Puts small batches that wait at a gate together, so that an operator is called once for all of them.

    Each call has a price that does not depend on its records: tens of microseconds. With many senders each
    of them sends a small part of the records. Nothing is waited for, and the records of a channel stay in
    order. They pass at most records and control elements of other channels: between channels there is no
    order.
    """

    def __init__(self, gate: InputGate, with_data: Collection[int]) -> None:
        """Nothing is taken yet; `with_data` are the channels whose data has not ended, now and later."""
        self._gate = gate
        self._with_data = with_data
        self._merged = Coalescer()
        self._sizer = BatchSizer()

    def merge(
        self, batch: Batch, input_index: int, rows_max: int
    ) -> tuple[Batch, PolledBatch | None]:
        """Return `batch` with what waits behind it, and the rest of the last batch that was taken, if any.

        Args:
            batch: the records that come first.
            input_index: their operator input.
            rows_max: the most rows of the result.
        """
        settings = self._gate.settings
        is_objects = isinstance(batch, ObjectBatch)
        full = settings.object_rows_per_buffer if is_objects else settings.rows_per_buffer_target
        rows_max = min(rows_max, full)
        if len(batch) >= rows_max or not self._gate.queued_buffers:
            return batch, None
        self._add(batch)
        alike = self._gate.poll_alike(input_index, rows_max - len(batch), self._add)
        for position, _ in alike:
            check(position in self._with_data, BEHIND_THE_END, channel=position)
        merged = self._merged.take()
        rows = len(merged)
        if rows <= rows_max:
            return merged, None
        rest = alike[-1][0], merged.slice(rows_max, rows - rows_max)
        return merged.slice(0, rows_max), rest

    def _add(self, batch: Batch) -> bool:
        """Add a batch if it can be part of the result; return False otherwise."""
        merged = self._merged
        if merged.size_bytes >= self._gate.settings.buffer_size_max_bytes:
            return False
        if not merged.accepts(batch):
            return False
        # Columns are copied; of Python objects only references are.
        size = 0 if isinstance(batch, ObjectBatch) else self._sizer.nbytes(batch)
        merged.add(batch, size, size)
        return True
