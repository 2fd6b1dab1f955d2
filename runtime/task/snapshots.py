"""The snapshot of one subtask: a short synchronous cut, then upload and acknowledgement beside the flow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ...errors import HeadgateError
from ...operators.elements import CheckpointBarrier
from ...state.snapshot import OperatorSnapshot, StateSnapshot
from ..protocol import names
from ..protocol.failures import CheckpointFailure
from ..protocol.ids import CheckpointId
from ..protocol.snapshot_guard import SnapshotGuard, SnapshotVerdict
from .chain import OperatorChain, with_context
from .environment import SnapshotTiming, TaskEnvironment
from .state_files import encode_snapshot, store_pieces
from .threads import to_the_end


class SnapshotRunner:
    """Runs the snapshots of one subtask. Every running asynchronous part has an owner: this."""

    def __init__(self, env: TaskEnvironment, chain: OperatorChain) -> None:
        self._env = env
        self._chain = chain
        self._guard = SnapshotGuard()
        self._running: dict[int, asyncio.Task[None]] = {}
        self.start_delay_ms = 0.0
        """Of the last snapshot: from the trigger to the first barrier here."""
        self.alignment_ms = 0.0
        """Of the last snapshot: from the first barrier to the last."""

    def begin(self, checkpoint_id: int) -> SnapshotVerdict:
        """All barriers are here: take the snapshot, or cancel or ignore it."""
        return self._guard.on_trigger(CheckpointId(checkpoint_id))

    def decline(self, checkpoint_id: int, reason: str, text: str) -> None:
        """The alignment was given up: tell the coordinator."""
        self._guard.on_declined(CheckpointId(checkpoint_id))
        self._env.reports.declined(checkpoint_id, reason, text)

    def prepare(self, checkpoint_id: int) -> None:
        """Before the barrier goes out, head to tail: operators may still emit into the epoch."""
        for chained in self._chain.operators:
            with_context(chained, chained.operator.prepare_snapshot, checkpoint_id)

    def take(
        self,
        barrier: CheckpointBarrier,
        alignment_ms: float,
        finished: bool,
        extra_items: Callable[[], dict[str, list[bytes]]],
    ) -> None:
        """The synchronous part, tail to head; the rest goes on in a task of its own."""
        started = self._env.clock.monotonic()
        self.alignment_ms = alignment_ms
        since_trigger_ms = self._env.clock.now_ms() - barrier.trigger_ms
        self.start_delay_ms = max(0.0, since_trigger_ms - alignment_ms)
        cuts: list[tuple[str, StateSnapshot]] = []
        head = self._chain.head
        for chained in reversed(self._chain.operators):
            cut = with_context(chained, chained.operator.snapshot, barrier.checkpoint_id)
            if chained is head and (extra := extra_items()):
                cut = cut or StateSnapshot()
                cut.items.update(extra)
            if cut is not None:
                cuts.append((chained.name, cut))
        sync_ms = 1000 * (self._env.clock.monotonic() - started)
        task = asyncio.get_running_loop().create_task(
            self._complete(barrier.checkpoint_id, cuts, sync_ms, alignment_ms, finished),
            name=f"snapshot {barrier.checkpoint_id} of {self._env.task_name}",
        )
        self._running[barrier.checkpoint_id] = task
        task.add_done_callback(lambda _: self._running.pop(barrier.checkpoint_id, None))

    async def _complete(
        self,
        checkpoint_id: int,
        cuts: list[tuple[str, StateSnapshot]],
        sync_ms: float,
        alignment_ms: float,
        finished: bool,
    ) -> None:
        started = self._env.clock.monotonic()
        begun: list[str] = []
        try:
            snapshots = [await self._write(checkpoint_id, name, cut, begun) for name, cut in cuts]
        except asyncio.CancelledError:
            await self._discard(begun)
            raise
        except Exception as error:
            await self._discard(begun)
            ours = isinstance(error, HeadgateError)
            reason = CheckpointFailure.IO if ours else CheckpointFailure.ASYNC_EXCEPTION
            text = f"{type(error).__name__}: {error}"
            self._env.reports.declined(checkpoint_id, reason.value, text)
            return
        async_ms = 1000 * (self._env.clock.monotonic() - started)
        timing = SnapshotTiming(sync_ms, async_ms, alignment_ms, finished)
        self._env.reports.acked(checkpoint_id, snapshots, timing)

    async def _write(
        self, checkpoint_id: int, name: str, cut: StateSnapshot, begun: list[str]
    ) -> OperatorSnapshot:
        """Encode and store one operator's cut; names of files go to `begun` before they are written."""
        env = self._env
        loop = asyncio.get_running_loop()
        pieces = await to_the_end(loop.run_in_executor(env.io_threads, encode_snapshot, cut))

        def name_of(state: str, kind: str) -> str:
            file = names.checkpoint_file(
                env.generation, checkpoint_id, name, env.index, state, kind
            )
            begun.append(file)
            return file

        if env.store is None:
            return OperatorSnapshot(operator=name, handles=())
        return await store_pieces(env.store, name, pieces, name_of)

    async def _discard(self, begun: list[str]) -> None:
        """Delete the files of a snapshot that nobody will ever hear of."""
        if begun and self._env.store is not None:
            # Whatever goes wrong here is only untidy.
            with contextlib.suppress(HeadgateError):
                await self._env.store.delete_files(begun)

    def abort(self, checkpoint_id: int) -> None:
        """Give up the asynchronous part, or never start it if its barrier is still to come."""
        task = self._running.get(checkpoint_id)
        if task is not None:
            task.cancel()
        self._guard.on_abort_notice(CheckpointId(checkpoint_id))

    async def drain(self) -> None:
        """Wait until all running asynchronous parts are done."""
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel all running asynchronous parts and wait for them to be gone."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
