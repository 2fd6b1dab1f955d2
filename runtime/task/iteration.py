"""The subtask at the head of a loop: sends in the external input and the feedback.

Checkpoints: the barrier goes into the loop as soon as it has arrived on all external channels. The
cut is made when it comes back; it holds the records that were in flight in between
(`operators/loops/queue.py`).

The end: when all inputs have ended, probes circulate until nothing comes back any more at any head
(`protocol/loop_rounds.py`). Then the watermark rises above all real times, which may fire windows
and timers in the loop, and probes circulate again, until the watermark rises and nothing comes
back. In a loop in rounds each probe is the end of one round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, final

from ...errors import InternalError, check
from ...operators.elements import (
    WATERMARK_MAX,
    Batch,
    CancelCheckpointMarker,
    CheckpointBarrier,
    Control,
    LoopProbe,
)
from ..exchange.gate import InputGate
from ..exchange.partition import PartitionStats
from ..protocol.barriers.handler import SnapshotVerdict
from ..protocol.ids import ChannelPosition
from .chain import Outputs, with_context
from .channel_state_writer import InFlightCut
from .environment import TaskEnvironment
from .input_subtask import InputSubtask
from .valve import ValveOutput

FEEDBACK: Final = 1
"""The number of the head's input that has no channels."""
LAST_TIMES: Final = 2**62
"""The first of the watermarks that fire everything in a loop: above every real time, with room above."""
FEEDBACK_TURNS: Final = 4
"""The number of feedback batches sent in before an external one gets its turn."""


class IterationSubtask(InputSubtask):
    """Input from an exchange, and from the tail in the same slot."""

    def __init__(
        self,
        env: TaskEnvironment,
        outputs: Outputs,
        gate: InputGate,
        ports: FeedbackPorts,
    ) -> None:
        super().__init__(env, outputs, gate)
        from ...operators.loops.head import IterationHead  # few jobs have loops

        head = self.chain.head.operator
        assert isinstance(head, IterationHead)  # ensured by the plan
        check(len(self.chain.operators) == 1, "the head of a loop is chained", task=env.task_name)
        self._head: Final = head
        self.loop: Final = head.settings.name
        self._in_rounds: Final = head.settings.rounds is not None
        self._barriers: dict[int, tuple[CheckpointBarrier, float, bool, InFlightCut | None]] = {}
        """The barriers in the loop, each with its alignment, whether all data had been sent, and
        the records that it overtook."""
        self._turns = 0
        self._inputs_ended = False
        self._standing = False
        """True if the job stops: feedback is kept for the checkpoint, and not sent."""
        self._closed = False
        self._flush_again = True
        """True if event time was not yet at its end in the loop when the last record came back."""
        self._flushes = 0
        self._number = 0
        self._probing = False
        """True while a probe, or its answer, is awaited."""
        self._waiting = False
        self._waited = False
        ports.attach(self.loop, env.index, self)

    # -- records ------------------------------------------------------------------------------------

    async def step(self) -> bool:
        if self._may_send() and (self._restoring() or self._turns < FEEDBACK_TURNS):
            await self._send()
            return True
        self._turns = 0
        if await super().step():
            return True
        if self._may_send():
            await self._send()
            return True
        return self._probe_if_idle()

    def _may_send(self) -> bool:
        return self._head.ready and not self._standing

    def _restoring(self) -> bool:
        """Return True while records of the restored loop are left, which go first."""
        return self._head.queue.next < self._head.restored_end

    async def _send(self) -> None:
        self._turns += 1
        await self.process(self._head.queue.take(), FEEDBACK)

    def come_back(self, batch: Batch) -> None:
        """Handle a feedback batch from the tail."""
        with_context(self.chain.head, self._head.come_back, batch)
        self.signal.set()

    # -- event time ---------------------------------------------------------------------------------

    def _advance(self, output: ValveOutput) -> None:
        """Advance event time to that of the inputs; it does not end before the loop is at rest."""
        if self._in_rounds:
            return
        ends = output.watermark == WATERMARK_MAX
        super()._advance(ValveOutput(None if ends else output.watermark, output.idle))

    def _send_watermark(self, timestamp: int) -> None:
        self.chain.head.current_watermark = timestamp
        with_context(self.chain.head, self._head.on_watermark, timestamp)

    # -- the end ------------------------------------------------------------------------------------

    async def _end_of_data(self, position: int) -> None:
        self._with_data.discard(position)
        if self._with_data:
            self._advance(self._valve.on_end(ChannelPosition(position)))
        else:
            self._inputs_ended = True

    def _probe_if_idle(self) -> bool:
        busy = self._probing or self._waiting or self._standing
        if busy or not self._inputs_ended or self._closed:
            return False
        if self._in_rounds:
            self._number = self._head.round
            self._send_watermark(self._head.round)
        else:
            self._number += 1
            self._head.take_arrived()
        self._probing = True
        self.chain.broadcast(LoopProbe(self.loop, self._number))
        return True

    def probe_came_back(self, number: int) -> None:
        """Handle a probe from the tail: count the feedback before it now, and report it in mailbox
        order."""
        end, records = self._head.queue.end, self._head.take_arrived()

        def report() -> None:
            check(
                self._probing and number == self._number, "a probe nobody waits for", number=number
            )
            if self._in_rounds:
                self._head.round_came_back(end)
            self.env.reports.loop_round(self.loop, number, records)

        self.put_mail(report)

    def loop_round_over(self, number: int, records: int) -> None:
        """Handle, as mail, that probe `number` is back at all heads, after `records` in all."""

        async def end_round() -> None:
            check(self._probing and number == self._number, "not our round", number=number)
            if self._standing:
                # otherwise the end of time in the loop would be in the last checkpoint, and come
                # again
                return
            self._probing = False
            if self._in_rounds:
                await self._round_over(records)
            else:
                await self._rest(records)

        self.put_mail(end_round)

    async def _round_over(self, records: int) -> None:
        rounds = self._head.settings.rounds
        assert rounds is not None  # the caller has checked
        if records and self._head.round + 1 < rounds.most:
            self._head.next_round()
        else:
            await self._over()

    async def _rest(self, records: int) -> None:
        """Decide what follows a round; all heads come here with the same number, and decide the same."""
        wait_ms = self._head.settings.wait_ms
        if records:
            self._flush_again, self._waited = True, False
        elif wait_ms and not self._waited:
            self._waiting = self._waited = True
            self.timers.call_later(wait_ms, self._stop_waiting)
        elif self._flush_again:
            # Fired timers may send back records that set timers, for which the watermark must rise
            # again.
            self._flush_again, self._waited = False, False
            self._flushes += 1
            self._send_watermark(LAST_TIMES + self._flushes)
        else:
            await self._over()

    def _stop_waiting(self) -> None:
        self._waiting = False

    async def _over(self) -> None:
        self._closed = True
        self._head.close_loop()
        await self.finish()

    # -- checkpoints --------------------------------------------------------------------------------

    def take_snapshot(self, barrier: CheckpointBarrier, alignment_ms: float) -> bool:
        """Begin the snapshot: the barrier goes into the loop, and the log starts."""
        checkpoint_id = barrier.checkpoint_id
        verdict = self.snapshots.begin(checkpoint_id)
        if barrier.options.stop:
            self._standing = True
            self.timers.stand_still()
        if verdict is SnapshotVerdict.TAKE:
            self._head.barrier(checkpoint_id)
            self.snapshots.prepare(checkpoint_id)
            self.chain.broadcast(barrier)
            overtaken = self.in_flight(barrier)
            self._barriers[checkpoint_id] = barrier, alignment_ms, self.finished, overtaken
        elif verdict is SnapshotVerdict.CANCEL:
            self.chain.broadcast(CancelCheckpointMarker(checkpoint_id))
        return verdict is SnapshotVerdict.TAKE

    def barrier_came_back(self, checkpoint_id: int) -> None:
        """Handle a barrier from the tail: the log ends here, and the snapshot is taken in mailbox order."""
        end = self._head.queue.end

        def take() -> None:
            wanted = self._head.barrier_came_back(checkpoint_id, end)
            sent = self._barriers.get(checkpoint_id)
            # Older barriers that did not come back were aborted inside the loop.
            self._barriers = {id_: it for id_, it in self._barriers.items() if id_ > checkpoint_id}
            if wanted and sent is not None:
                barrier, alignment_ms, finished, overtaken = sent
                self.snapshots.take(barrier, alignment_ms, finished, self.extra_items, overtaken)

        self.put_mail(take)


class LoopHead(Protocol):
    """The head as its tail sees it. Calls come from the tail's mailbox, in the order of the stream."""

    def come_back(self, batch: Batch) -> None:
        """Accept a batch; never blocks."""
        ...

    def barrier_came_back(self, checkpoint_id: int) -> None:
        """Handle a barrier: everything before it has come back."""
        ...

    def probe_came_back(self, number: int) -> None:
        """Handle a probe: everything before it has come back."""
        ...


@final
class FeedbackPorts:
    """The heads on one worker, by loop and subtask, for their tails."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, int], LoopHead] = {}

    def attach(self, loop: str, index: int, head: LoopHead) -> None:
        """Register `head` for its tail."""
        self._heads[loop, index] = head

    def head(self, loop: str, index: int) -> LoopHead:
        """Return the head of a loop in slot `index`."""
        head = self._heads.get((loop, index))
        if head is None:
            raise InternalError(
                f"head and tail of a loop are on different workers loop=`{loop}` slot=`{index}`"
            )
        return head


@final
class FeedbackPartition:
    """The result partition of a tail: the edge to the head in the same slot, without a channel.

    A channel has room for some buffers. A loop whose channels are all full would deadlock, each subtask
    waiting for the next; so this edge accepts everything at once, into the head's queue. Barriers and
    probes come back here, too.
    """

    backlogged = False
    debloated_bytes: int | None = None
    emitted_bytes = 0

    def __init__(self, ports: FeedbackPorts, loop: str, index: int) -> None:
        self._ports, self._loop, self._index = ports, loop, index
        self._stats = PartitionStats()
        self._closed = False

    def emit(self, batch: Batch) -> None:
        """Pass a batch to the head."""
        if len(batch) == 0:
            return
        self._stats.records_out += len(batch)
        self._stats.buffers_out += 1
        self._head.come_back(batch)

    def broadcast(self, element: Control) -> None:
        """Pass barriers and probes to the head, and ignore the rest: the head knows time and ends
        better."""
        if self._closed:
            return
        if isinstance(element, CheckpointBarrier):
            self._head.barrier_came_back(element.checkpoint_id)
        elif isinstance(element, LoopProbe) and element.loop == self._loop:
            self._head.probe_came_back(element.number)

    def outgoing_barrier(self, checkpoint_id: int) -> None:
        """Return None: no barrier overtakes anything here."""

    @property
    def _head(self) -> LoopHead:
        return self._ports.head(self._loop, self._index)

    def set_listener(self, wake: Callable[[], None]) -> None:
        """Do nothing: there is never a backlog."""

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def next_flush(self) -> float | None:
        """Return None: nothing is held back."""
        return None

    def flush_due(self, now: float) -> bool:
        """Return False: nothing is held back."""
        return False

    def flush_early(self, now: float, load: float) -> None:
        """Do nothing: nothing is held back."""

    def next_early(self) -> float | None:
        """Return None: nothing is held back."""
        return None

    def stats(self) -> PartitionStats:
        """Return the statistics of the feedback so far."""
        return self._stats

    def close(self) -> None:
        """Close the partition at the end of the subtask."""
        self._closed = True
