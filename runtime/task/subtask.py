"""One subtask: a mailbox in which all user code of a vertex runs, one thing at a time.

The loop takes, in this order: mail (checkpoint notices, timers), then input, unless its outputs
are backpressured. It yields to the event loop after every buffer, so a barrier or a credit waits
for one buffer at most. The source of the input is the difference between `InputSubtask` (a gate)
and `SourceSubtask` (a reader).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from ...errors import ExchangeError, HeadgateError
from ...operators.base import AsyncOperator
from ...operators.elements import (
    WATERMARK_MAX,
    Batch,
    CancelCheckpointMarker,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
)
from ...operators.sink import SinkOperator
from ...state.chain import StateKey
from ...state.snapshot import CommitPermit, ItemsCut, KeptState, OperatorSnapshot, RestoredState
from ..exchange.partition import OutgoingBarrier
from ..protocol.barriers.handler import SnapshotVerdict
from .accounting import Activity, SliceSizer, TimeAccounting
from .chain import (
    LEAVING,
    ChainedOperator,
    Outputs,
    build_chain,
    call_and_wait,
    commit_and_wait,
    open_chain,
    with_context,
    wrap_error,
)
from .channel_state_writer import InFlightCut, InputCapture
from .concurrency import MailboxTimers, Signal, in_thread, to_the_end
from .debloater import Debloater
from .environment import TaskEnvironment
from .snapshots import SnapshotRunner

Mail = Callable[[], Awaitable[Any] | None]
LATENCY: Final = "latency_seconds"
LONG_SLICE_S = 0.01
TURNS_AFTER_LONG = 8
"""The turns of the event loop after a slice longer than that.

The result of a thread takes three turns to reach its waiter: with one turn per slice, every await
would take three slices.
"""


class Subtask:
    """The common part of subtasks: mailbox, chain, checkpoints, life cycle."""

    def __init__(
        self,
        env: TaskEnvironment,
        outputs: Outputs,
    ) -> None:
        self.env = env
        self.signal = Signal()
        self.time = TimeAccounting(env.clock.monotonic, env.load)
        self._mails: deque[Mail] = deque()
        self.timers = MailboxTimers(self.put_mail)
        self.chain = build_chain(env, outputs)
        self.leaving = [leaving for found in outputs.values() for leaving in found]
        self.partitions = [leaving.partition for leaving in self.leaving]
        for partition in self.partitions:
            partition.set_listener(self.signal.set)
        operators = [chained.operator for chained in self.chain.operators]
        self._sinks = [each for each in operators if isinstance(each, SinkOperator)]
        self.snapshots = SnapshotRunner(env, self.chain)
        self.committed = 0
        """The newest checkpoint whose output is visible, as far as this subtask is concerned."""
        self.finished = False
        self._ending = False
        self._terminated = False
        self._stopping = False
        self._slices = SliceSizer(env.settings.slice_ms)
        self._slice_s = 0.0
        """The duration of the last slice, in seconds."""
        self._barrier_timers: set[asyncio.Handle] = set()
        self._processed_bytes = 0
        """The bytes of records since the first barrier of the current checkpoint."""
        self.debloater: Debloater | None = None
        if env.settings.debloat is not None:
            self.debloater = Debloater(env.settings.debloat, self.time, self.partitions)
        self._task: asyncio.Task[None] | None = None
        self._processing: asyncio.Task[None] | None = None
        """The task that processes, also while it is being cancelled."""
        self._released = False
        self._whole = False
        """True while all state is as records have made it: it was restored, and nothing has failed here."""
        self.kept: dict[StateKey, KeptState] = {}
        """After `cancel`: the states that can go back to a checkpoint, which the operators have no more."""
        self._at_rest = False

    # -- life ---------------------------------------------------------------------------------------

    async def prepare(
        self,
        states: dict[str, RestoredState] | None,
        finished: bool,
        own: Sequence[OperatorSnapshot] = (),
    ) -> None:
        """Open all operators and restore their state. Raising fails the attempt.

        Args:
            states: by operator; None for a fresh start.
            finished: the subtask had reached the end of its data.
            own: the restored state, if it is all of one old subtask: checkpoints may build on it.
        """
        await open_chain(self.chain, self.env, self.timers, self.time.backpressured_s)
        if states is not None:
            restored = CommitPermit(self.env.plan.job_name, 0, self.env.restored_checkpoint)
            for chained in reversed(self.chain.operators):
                state = states.get(chained.name, RestoredState())
                operator, retries = chained.operator, self.env.settings.commit_retries
                await commit_and_wait(chained, operator.restore, state, restored, retries)
            described = {
                chained.name: with_context(chained, chained.operator.states)
                for chained in self.chain.operators
            }
            self.snapshots.restored(own, described)
            self.committed = self.env.restored_checkpoint
        self._was_finished = finished
        self._whole = True

    def start(self) -> None:
        """Start processing; reports go to `env.reports` from here on."""
        name = f"subtask {self.env.task_name}"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)
        self._processing = self._task
        if self.debloater is not None:
            self.debloater.start()

    async def cancel(self) -> None:
        """Stop at once, without flushing. Safe at any time, also twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._release()

    def forget(self) -> None:
        """Drop the state of the operators and what refers back to the subtask.

        It has been cancelled. Without this call its state would stay in memory until the garbage
        collector runs. Other threads may still look at its times.
        """
        self.chain.forget()
        self.timers.forget()
        self._mails.clear()

    def _take_states_out(self) -> None:
        """Take the states out that can go back to a checkpoint. What failed half-way does not know it."""
        if not self._whole:
            return
        for chained in self.chain.operators:
            for state, kept in chained.operator.keep().items():
                self.kept[chained.name, state] = kept

    async def _release(self) -> None:
        if self._released:
            return
        self._released = True
        if self.debloater is not None:
            self.debloater.stop()
        self.timers.cancel_all()
        for timer in self._barrier_timers:
            timer.cancel()
        await self.snapshots.cancel()
        for partition in self.partitions:
            partition.close()
        self._take_states_out()
        self.chain.close()
        await to_the_end(self.chain.close_functions())
        await in_thread(self.env.io_threads, self.env.directory.delete)

    async def _run(self) -> None:
        try:
            await self._loop()
            self.chain.broadcast(EndOfPartition())
            await self._drain_outputs()
            await self.snapshots.drain()
            self._whole = False  # the end was reached: no attempt follows
            await self._release()
            self.env.reports.terminated()
        except LEAVING:
            raise
        except ExchangeError as error:  # a peer has failed, and no state is half-way to another
            self.env.reports.failed(error)
        except HeadgateError as error:
            self._whole = False
            self.env.reports.failed(error)
        except BaseException as error:  # this task is not awaited elsewhere, so the job would hang
            self._whole = False
            self.env.reports.failed(wrap_error(self.env.task_name, error))
        finally:
            self.time.rest()

    # -- mailbox ------------------------------------------------------------------------------------

    def put_mail(self, mail: Mail) -> None:
        """Run `mail` in the mailbox; if it returns an awaitable, it is awaited there."""
        self._mails.append(mail)
        self.signal.set()

    @property
    def at_rest(self) -> bool:
        """True while the loop waits for input, mail or room: no record is half processed."""
        return self._at_rest and not self._mails

    def run_at_rest(self, work: Callable[[], None]) -> bool:
        """Run `work` now, as a mail would, if the loop waits; return False if it does not.

        That is the faster way for work that comes often and does not wake up the loop.
        """
        if not self.at_rest or self._processing is None or self._processing.done():
            return False
        before = self.time.activity
        self.time.switch(Activity.BUSY)
        work()
        self.time.switch(before)
        return True

    @property
    def awaits(self) -> asyncio.Task[None] | None:
        """The task that processes; None before the start."""
        return self._processing

    @property
    def queued_mails(self) -> int:
        """The number of mails that wait to run."""
        return len(self._mails)

    async def _loop(self) -> None:
        while not self._terminated:
            if self._mails:
                await self._run_mail()
                if self._ending:
                    await self._end()
            elif self.urgent():
                pass
            elif self._backlogged():
                await self._wait_between(self._sleep(Activity.BACKPRESSURED))
            elif self._sinks_backlogged():
                await self._wait_between(self._sleep(Activity.FULL))
            elif await self.step():
                self._flush_if_due()
                # otherwise sleep at once: the time of others does not count as our work
                if not self._backlogged() and not self._sinks_backlogged():
                    await self._give_way()
            else:
                await self._wait_between(self._idle())

    async def _wait_between(self, wait: Awaitable[None]) -> None:
        """Wait between two pieces of work."""
        self._at_rest = True
        try:
            await wait
        finally:
            self._at_rest = False

    async def _give_way(self) -> None:
        """Let others in this event loop run; after a long slice, until they are done."""
        self.time.rest()
        turns = 1 if self._slice_s < LONG_SLICE_S else TURNS_AFTER_LONG
        for _ in range(turns):
            await asyncio.sleep(0)

    async def _run_mail(self) -> None:
        self.time.switch(Activity.BUSY)
        waiting = self._mails.popleft()()
        if waiting is not None:
            await waiting

    async def step(self) -> bool:
        """Handle one input, if there is one now; return False if there is nothing to do."""
        raise NotImplementedError

    def urgent(self) -> bool:
        """Handle a barrier that does not wait for its turn; return False if there is none."""
        return False

    def _sinks_backlogged(self) -> bool:
        """Return True while a sink of the chain has too much to do: upstream waits for this subtask."""
        return bool(self._sinks) and any(sink.backlogged() for sink in self._sinks)

    def _backlogged(self) -> bool:
        return any(partition.backlogged for partition in self.partitions)

    async def _idle(self) -> None:
        """Wait for input or mail, and meanwhile send partly filled buffers that somebody waits for."""
        # Calls of the head continue outside the mailbox: upstream waits for them.
        activity = Activity.FULL if self.chain.head.operator.full() else Activity.IDLE
        if any(p.next_flush() is not None for p in self.partitions):
            await self._flush_early(activity)
        await self._sleep(activity)

    async def _flush_early(self, activity: Activity) -> None:
        """Flush early, unless input or mail comes while the others in this event loop have a turn."""
        self.time.switch(activity)
        self.time.rest()
        await asyncio.sleep(0)
        if self.signal.raised:
            return
        now = self.env.clock.monotonic()
        load = self.env.load.share(now)
        for partition in self.partitions:
            partition.flush_early(now, load)

    async def _sleep(self, activity: Activity) -> None:
        """Wait for a signal, and send partly filled buffers when they are due.

        They are sent even while one channel is blocked: the receivers of the others wait for them.
        """
        self.time.switch(activity)
        self.time.rest()
        times = [partition.next_flush() for partition in self.partitions]
        if activity is not Activity.BACKPRESSURED:
            times += [partition.next_early() for partition in self.partitions]
        deadline = min((due for due in times if due is not None), default=None)
        if deadline is None:
            await self.signal.wait()
            return
        loop = asyncio.get_running_loop()
        delay = max(0.0, deadline - self.env.clock.monotonic())
        handle = loop.call_later(delay, self.signal.set)
        try:
            await self.signal.wait()
        finally:
            handle.cancel()
        self._flush_if_due()

    def _flush_if_due(self) -> None:
        now = self.env.clock.monotonic()
        for partition in self.partitions:
            if partition.flush_due(now):
                partition.flush()

    async def _drain_outputs(self) -> None:
        while self._backlogged():
            await self._sleep(Activity.BACKPRESSURED)

    # -- records ------------------------------------------------------------------------------------

    async def process(self, batch: Batch, input_index: int) -> None:
        """Run a batch through the chain, in slices worth about `slice_ms` of user code each.

        Between slices other subtasks of the worker run and backpressure is checked, but no mail is
        taken: for a source the position is already past the whole batch.
        """
        rows = len(batch)
        # A coroutine yields by itself, and keeps more calls in flight the more records it is given.
        if rows <= self._slice_rows() or isinstance(self.chain.head.operator, AsyncOperator):
            await self._process_slice(batch, input_index)
            return
        offset = 0
        while offset < rows:
            length = min(self._slice_rows(), rows - offset)
            await self._process_slice(batch.slice(offset, length), input_index)
            offset += length
            await self._give_way()
            await self._drain_outputs()

    def _slice_rows(self) -> int:
        rows = None if self.debloater is None else self.debloater.rows_at_once()
        return self._slices.rows if rows is None else min(rows, self._slices.rows)

    async def _process_slice(self, batch: Batch, input_index: int) -> None:
        self.time.switch(Activity.BUSY)
        head = self.chain.head
        head.records_in += len(batch)
        if self.debloater is not None:
            self.debloater.slice_begins()
        started = self.env.clock.monotonic()
        if isinstance(head.operator, AsyncOperator):
            await self._process_async(head, batch, input_index)
        else:
            with_context(head, head.operator.process, batch, input_index)
            self._slice_s = self.env.clock.monotonic() - started
            self._slices.took(len(batch), self._slice_s)
        if self.debloater is not None:
            self.debloater.slice_over(batch, input_index)

    async def _process_async(self, head: ChainedOperator, batch: Batch, input_index: int) -> None:
        assert isinstance(head.operator, AsyncOperator)
        try:
            await head.operator.process_async(batch, input_index)
        except (HeadgateError, *LEAVING):
            raise
        except BaseException as error:
            raise wrap_error(head.name, error) from error

    def mark_latency(self, marker: LatencyMarker) -> None:
        """Forward a latency marker past all operators; sinks record how long it has travelled."""
        seconds = max(0, self.env.clock.now_ms() - marker.marked_ms) / 1000
        for chained in self.chain.operators:
            if isinstance(chained.operator, SinkOperator):
                metrics = chained.operator.context.metrics
                labels = {"source": marker.source_id}
                metrics.histogram(LATENCY, labels=labels).observe(seconds)
        self.chain.broadcast(marker)

    # -- checkpoints --------------------------------------------------------------------------------

    def take_snapshot(self, barrier: CheckpointBarrier, alignment_ms: float) -> bool:
        """Take a snapshot: prepare, send the barrier, synchronous part, asynchronous part.

        Returns:
            False if no snapshot is taken, because the checkpoint was aborted before.
        """
        verdict = self.snapshots.begin(barrier.checkpoint_id)
        if barrier.options.stop:
            # The last checkpoint follows the savepoint: it would commit whatever timers, watermarks
            # above all, emit until then, and a restore of the savepoint would emit it again.
            self.timers.stand_still()
        if verdict is SnapshotVerdict.TAKE:
            self.snapshots.prepare(barrier.checkpoint_id)
            self.chain.broadcast(barrier)
            in_flight = self.in_flight(barrier)
            self.snapshots.take(
                barrier,
                alignment_ms,
                self.finished,
                self.extra_items,
                in_flight,
                self._processed_bytes,
            )
        elif verdict is SnapshotVerdict.CANCEL:
            self.chain.broadcast(CancelCheckpointMarker(barrier.checkpoint_id))
        return verdict is SnapshotVerdict.TAKE

    def in_flight(self, barrier: CheckpointBarrier) -> InFlightCut | None:
        """Capture the records that the barrier just sent overtakes here; None if it is aligned."""
        if not barrier.options.may_overtake:
            return None
        found = [partition.outgoing_barrier(barrier.checkpoint_id) for partition in self.partitions]
        barriers = [outgoing for outgoing in found if outgoing is not None]
        for outgoing in barriers:
            self._overtake_in_time(outgoing)
        return InFlightCut(self._input_capture(), barriers)

    def _input_capture(self) -> InputCapture | None:
        """Return the capture of inputs for the current checkpoint, if its barriers overtook records."""
        return None

    def _overtake_in_time(self, outgoing: OutgoingBarrier) -> None:
        """Make a barrier that waits in line overtake once its checkpoint exceeds the aligned timeout."""
        options = outgoing.barrier.options
        if options.unaligned or options.aligned_timeout_ms is None:
            return
        # A clock that is behind the coordinator's must not delay it for longer than the timeout.
        age_ms = max(0, self.env.clock.now_ms() - outgoing.barrier.trigger_ms)
        delay_ms = max(0, options.aligned_timeout_ms - age_ms)
        # Not by mail: a subtask that waits for room in the queue does not read its mail.
        loop = asyncio.get_running_loop()

        def overtake() -> None:
            self._barrier_timers.discard(timer)
            outgoing.overtake()

        timer: asyncio.Handle = loop.call_later(delay_ms / 1000, overtake)
        self._barrier_timers.add(timer)

    def extra_items(self) -> dict[str, ItemsCut]:
        """Return state of the head beyond its operator's own: a source's positions."""
        return {}

    def checkpoint_completed(self, permit: CommitPermit) -> None:
        """Handle, as mail, that the checkpoint is durable; operators commit, in order."""

        async def complete() -> None:
            self.snapshots.completed(permit.checkpoint_id)
            for chained in self.chain.operators:
                tell = chained.operator.on_checkpoint_complete
                retries = self.env.settings.commit_retries
                await commit_and_wait(chained, tell, permit, permit, retries)
                if (life := chained.operator.function_life) is not None:
                    await call_and_wait(chained, life.on_checkpoint_complete, permit.checkpoint_id)
            self.committed = max(self.committed, permit.checkpoint_id)

        self.put_mail(complete)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Handle, as mail, that the checkpoint was aborted."""

        async def abort() -> None:
            self.snapshots.abort(checkpoint_id)
            for chained in self.chain.operators:
                with_context(chained, chained.operator.on_checkpoint_aborted, checkpoint_id)
                if (life := chained.operator.function_life) is not None:
                    await call_and_wait(chained, life.on_checkpoint_aborted, checkpoint_id)

        self.put_mail(abort)

    def terminate(self) -> None:
        """Leave normally, as mail, once everything is committed."""

        def stop() -> None:
            self._terminated = True

        self.put_mail(stop)

    async def finish(self) -> None:
        """Finish after all inputs ended: end event time, flush operators, and notify downstream."""
        if self.finished or self._ending:
            return
        head = self.chain.head
        if not self._was_finished:
            head.current_watermark = WATERMARK_MAX
            with_context(head, head.operator.on_watermark, WATERMARK_MAX)
        self._ending = True
        await self._end()

    async def _end(self) -> None:
        """Complete `finish` once the chain has settled; until then barriers and mail are handled."""
        if not self.chain.settled():
            return
        self._ending = False
        if not self._was_finished:
            await self.chain.finish()
        self.finished = True
        self.chain.broadcast(EndOfData())
        self.env.reports.finished()
