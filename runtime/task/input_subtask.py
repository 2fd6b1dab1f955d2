"""A subtask behind other subtasks: reads its gate, aligns barriers, follows watermarks."""

from __future__ import annotations

from typing import Any

from ...operators.elements import (
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
from ..exchange.gate import InputGate
from ..protocol.alignment import (
    AbortCheckpoint,
    AlignedBarrierHandler,
    AlignmentDecision,
    Block,
    ForwardCancel,
    TriggerSnapshot,
    UnblockAll,
)
from ..protocol.ids import ChannelPosition, CheckpointId
from .accounting import Activity
from .chain import with_context
from .environment import TaskEnvironment
from .probe_alignment import ProbeAlignment
from .subtask import Subtask
from .valve import ValveOutput, WatermarkValve


class InputSubtask(Subtask):
    """Input from an exchange."""

    def __init__(
        self,
        env: TaskEnvironment,
        outputs: dict[int, list[tuple[str | None, Any]]],
        gate: InputGate,
    ) -> None:
        super().__init__(env, outputs)
        self.gate = gate
        gate.set_listener(self.signal.set)
        self._valve = WatermarkValve(len(gate))
        self._alignment = AlignedBarrierHandler(len(gate))
        self._probes = ProbeAlignment(env.plan.loops_through(env.vertex))
        self._with_data = set(range(len(gate)))

    async def step(self) -> bool:
        polled = self.gate.poll_control() if self._holds_back() else self.gate.poll()
        if polled is None:
            return False
        self.time.switch(Activity.BUSY)
        position, element = polled
        if isinstance(element, ColumnBatch | ObjectBatch):
            await self.process(element, self.gate.input_index_of(position))
        elif isinstance(element, EndOfData):
            await self._end_of_data(position)
        else:
            self._control(position, element)
        return True

    def _holds_back(self) -> bool:
        """True if no records are to be read for now."""
        operator = self.chain.head.operator
        if not operator.full():
            return False
        waits = self._alignment.pending or self.gate.holds_barrier
        return not (waits and operator.stores_what_waits)

    def _control(self, position: int, element: Element) -> None:
        channel = ChannelPosition(position)
        now_ms = self.env.clock.now_ms()
        match element:
            case Watermark(timestamp):
                self._advance(self._valve.on_watermark(channel, timestamp))
            case WatermarkStatus(idle):
                self._advance(self._valve.on_status(channel, idle))
            case CheckpointBarrier():
                self._align(self._alignment.on_barrier(channel, element, now_ms))
            case CancelCheckpointMarker(checkpoint_id):
                self._align(self._alignment.on_cancel(channel, CheckpointId(checkpoint_id)))
            case EndOfPartition():
                self._align(self._alignment.on_end_of_partition(channel, now_ms))
            case LatencyMarker():
                self.chain.broadcast(element)
            case LoopProbe():
                self._probes.on_probe(position, element)
                self._pass_probes()

    async def _end_of_data(self, position: int) -> None:
        self._with_data.discard(position)
        if self._with_data:
            self._advance(self._valve.on_end(ChannelPosition(position)))
            self._pass_probes()
        else:
            await self.finish()

    def _pass_probes(self) -> None:
        """Pass on the probes that have come on all channels, behind what is still to be emitted."""
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

    def _align(self, decisions: list[AlignmentDecision]) -> None:
        for decision in decisions:
            match decision:
                case Block(position):
                    self.gate.block(position)
                case UnblockAll():
                    self.gate.unblock_all()
                case TriggerSnapshot(barrier, alignment_ms):
                    self.take_snapshot(barrier, float(alignment_ms))
                case AbortCheckpoint(checkpoint_id, reason):
                    self.snapshots.decline(checkpoint_id, reason.value, reason.sentence)
                case ForwardCancel(checkpoint_id):
                    self.chain.broadcast(CancelCheckpointMarker(checkpoint_id))
