"""The deployments of one worker: one attempt of a region each, with its subtasks, gates and channels.

Each is begun and dropped without the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from concurrent.futures import Executor
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from ...operators.clock import Clock
from ...operators.elements import CheckpointOptions
from ...operators.splits import SourceSplits
from ...state.chain import StateKey
from ...state.keygroups import KeyGroupRange, key_group_range
from ...state.snapshot import (
    ChannelAddress,
    CommitPermit,
    KeptState,
    OperatorSnapshot,
    RestoredState,
    StateHandle,
)
from ..control.messages import (
    Deploy,
    DeployCommon,
    Deployed,
    RestoreProgress,
    SplitsOffered,
    Statistics,
    SubtaskAssignment,
    SubtaskStatistics,
)
from ..exchange.hub import ExchangeHub, WorkerAddress
from ..exchange.partitioners import KeyGroupSampler
from ..exchange.settings import exchange_settings
from ..observe.metrics import MetricsRegistry
from ..options.monitoring import SPLIT_SERIES_MAX, SUBTASK_LABELS_MAX, USER_SERIES_MAX
from ..options.recovery import KEEP_STATE, KEEP_STATE_TIMEOUT
from ..options.registry import Options
from ..options.state import ALLOW_PICKLE, UNALIGNED, UNALIGNED_FORCED
from ..plan import PhysicalPlan
from ..slots import Placement, SlotsByGroup
from ..storage.base import CheckpointStore
from ..storage.open_store import SharedStores
from ..task.accounting import Activity, LoopLoad
from ..task.chain import NodePartition
from ..task.concurrency import all_of
from ..task.environment import TaskEnvironment, task_settings
from ..task.input_subtask import InputBatch, InputSubtask
from ..task.iteration import FeedbackPartition, FeedbackPorts, IterationSubtask
from ..task.local_files import LocalCopies
from ..task.segments import SegmentWriter
from ..task.source_subtask import SourceSubtask
from ..task.state_restore import PackLists, StateReader, is_needed
from ..task.subtask import Subtask
from .channels import ChannelMap, receivers_before, recovered_batches
from .kept_states import KeptStates, KeptSubtask, Place, code_digest, handles_of, without
from .local_directories import LocalDirectories
from .reports import MessageSender, RestoreMeter, SubtaskReporter, bytes_in_files
from .subtask_metrics import register_task, statistics_of
from .watch import StepWatch

T = TypeVar("T")


class WorkerResources(msgspec.Struct, frozen=True):
    """The resources that a worker lends to the deployments of one attempt.

    Attributes:
        worker_id: of the worker.
        hub: makes channels.
        clock: of the worker.
        store: checkpoints go there; None: the job keeps none.
        stores: opens savepoints.
        directories: for local state.
        copies: of state files, on this machine; None: none are kept.
        io_threads: for calls that block.
        transfers: bounds the state files that are read or written at once.
        segments: writes small state of all subtasks together.
        kept: states of cancelled subtasks that wait for the next attempt.
        metrics: of the process.
        sender: takes messages to the coordinator.
        load: of the event loop.
    """

    worker_id: str
    hub: ExchangeHub
    clock: Clock
    store: CheckpointStore | None
    stores: SharedStores
    directories: LocalDirectories
    copies: LocalCopies | None
    io_threads: Executor
    transfers: asyncio.Semaphore
    segments: SegmentWriter
    kept: KeptStates
    metrics: MetricsRegistry
    sender: MessageSender
    load: LoopLoad


class Deployment:
    """Prepares, starts, steers and cancels the subtasks of one attempt of a region on this worker.

    Args:
        message: what all regions of the attempt have in common on this worker.
        common: what they have in common on all workers.
        plan: of the whole job.
        region: which one.
        assignments: its subtasks here.
        resources: of the worker.
        kept: the states of earlier subtasks that are in memory.
    """

    def __init__(
        self,
        message: Deploy,
        common: DeployCommon,
        plan: PhysicalPlan,
        region: int,
        assignments: Sequence[SubtaskAssignment],
        resources: WorkerResources,
        kept: Mapping[Place, KeptSubtask],
    ) -> None:
        self.attempt = message.attempt
        self.region = region
        self.started = False
        self.deployed = Deployed(attempt=message.attempt)
        """The report for the time when all is prepared."""
        self._message = message
        self._plan = plan
        self._assignments = assignments
        self._options = Options(common.settings)
        self._peers = [WorkerAddress.decode(data) for data in common.workers]
        self._placement = Placement(
            plan, [peer.worker_id for peer in self._peers], SlotsByGroup(common.slots)
        )
        self._worker = resources
        self._code = code_digest(common) if self._options.get(KEEP_STATE) else ""
        places = {(each.vertex, each.index) for each in assignments}
        self._kept = {place: found for place, found in kept.items() if place in places}
        self._subtask_labels_max = self._options.get(SUBTASK_LABELS_MAX)
        self._metrics = resources.metrics.group(
            job_name=self._plan.job_name, user_series_max=self._options.get(USER_SERIES_MAX)
        )
        self._sent_packs = common.sent_packs
        self._pack_lists = PackLists()
        self._subtasks: list[Subtask] = []
        self._samplers: dict[tuple[int, int], list[KeyGroupSampler]] = {}
        self._overtaken = frozenset(
            vertex.id
            for vertex in self._plan.vertices
            if self._options.get(UNALIGNED)
            and self._plan.overtaken_inputs(vertex, forced=self._options.get(UNALIGNED_FORCED))
        )

    async def prepare(self) -> None:
        """Build all subtasks, open their operators and restore their state."""
        assignments = self._assignments
        channels = ChannelMap(
            self._plan,
            self.attempt,
            self._peers,
            self._placement,
            self.region,
            self._worker.hub,
            self._worker.clock,
            exchange_settings(self._options),
            overtaken=self._overtaken,
        )
        channels.check_closed({(a.vertex, a.index) for a in assignments}, self._worker.worker_id)
        ports = FeedbackPorts()
        # Gates first, all of them: a local sender's channel needs its receiver's gate.
        gates = {(a.vertex, a.index): channels.gate(a.vertex, a.index) for a in assignments}
        for assignment in assignments:
            gate = gates[assignment.vertex, assignment.index]
            env = self._environment(assignment)
            outputs = channels.outputs(assignment.vertex, assignment.index)
            for loop in self._plan.loops:
                if loop.tail == assignment.vertex:
                    back = FeedbackPartition(ports, loop.name, assignment.index)
                    outputs.setdefault(loop.tail_node, []).append(NodePartition(None, back))
            subtask: Subtask
            if gate is None:
                subtask = SourceSubtask(env, outputs, assignment.splits, assignment.ledger)
            elif self._plan.loop_from(env.vertex) is not None:
                subtask = IterationSubtask(env, outputs, gate, ports)
            else:
                subtask = InputSubtask(env, outputs, gate)
            register_task(
                self._metrics,
                subtask,
                self._subtask_labels_max,
                self._options.get(SPLIT_SERIES_MAX),
            )
            self._subtasks.append(subtask)
        self._samplers = channels.samplers
        if self._message.state_root:
            async with self._worker.stores.at(self._message.state_root, writable=False) as store:
                await self._restore_all(assignments, store)
        else:
            await self._restore_all(assignments, self._worker.store)

    def _environment(self, assignment: SubtaskAssignment) -> TaskEnvironment:
        vertex = self._plan.vertices[assignment.vertex]
        reports = SubtaskReporter(
            self.attempt, assignment, vertex.name, self._worker.sender, self._worker.copies
        )
        splits = SourceSplits()
        splits.report = reports.reached
        splits.on_history = self._tell
        return TaskEnvironment(
            plan=self._plan,
            vertex=vertex,
            index=assignment.index,
            generation=self._message.generation,
            attempt=self.attempt,
            restored_checkpoint=self._message.restored_checkpoint,
            run=self._message.run,
            options=self._options.effective(),
            settings=task_settings(self._options),
            clock=self._worker.clock,
            store=self._worker.store,
            store_at=self._worker.stores.at,
            io_threads=self._worker.io_threads,
            transfers=self._worker.transfers,
            directory=self._worker.directories.subtask(self.attempt, vertex.id, assignment.index),
            reports=reports,
            metrics_of=partial(
                self._metrics.operator, labelled=vertex.parallelism <= self._subtask_labels_max
            ),
            splits=splits,
            overtaking=vertex.id in self._overtaken,
            copies=self._worker.copies,
            segments=self._worker.segments,
            load=self._worker.load,
        )

    async def _restore_all(
        self, assignments: Sequence[SubtaskAssignment], store: CheckpointStore | None
    ) -> None:
        ranges = [
            key_group_range(
                assignment.index,
                self._plan.vertices[assignment.vertex].parallelism,
                self._plan.max_parallelism,
            )
            for assignment in assignments
        ]
        taken = [
            self._taken_over(assignment, own)
            for assignment, own in zip(assignments, ranges, strict=True)
        ]
        self._kept.clear()
        reading = [
            msgspec.structs.replace(assignment, state=without(assignment.state, found))
            for assignment, found in zip(assignments, taken, strict=True)
        ]
        needed = [
            handle
            for assignment, own in zip(reading, ranges, strict=True)
            for handle in _handles(assignment)
            if is_needed(handle, own)
        ]
        total = sum(handle.size_bytes for handle in needed)
        meter = RestoreMeter(total, self._worker.clock, self._restoring)
        await all_of(
            [
                self._restore(subtask, assignment, found, own, store, meter)
                for subtask, assignment, found, own in zip(
                    self._subtasks, assignments, taken, ranges, strict=True
                )
            ]
        )
        copies = None if self._message.state_root else self._worker.copies
        self.deployed = Deployed(
            attempt=self.attempt,
            fetching_ms=meter.fetching_ms,
            opening_ms=meter.opening_ms,
            local_bytes=0 if copies is None else copies.bytes_read,
            read_bytes=bytes_in_files(needed) + meter.more_in_files,
            kept_bytes=sum(
                handle.size_bytes
                for assignment, found in zip(assignments, taken, strict=True)
                for key in found
                for handle in handles_of(assignment.state, key)
            ),
        )

    def _taken_over(
        self, assignment: SubtaskAssignment, own: KeyGroupRange
    ) -> dict[StateKey, KeptState]:
        """Return the states that a subtask takes over from the one before."""
        kept = self._kept.get((assignment.vertex, assignment.index))
        if kept is None or not self._message.restored_checkpoint:
            return {}
        return kept.taken_over(
            self._code,
            own,
            self._message.restored_checkpoint,
            assignment.state,
            of_this_job=not self._message.state_root,
        )

    async def _restore(
        self,
        subtask: Subtask,
        assignment: SubtaskAssignment,
        taken: Mapping[StateKey, KeptState],
        own: KeyGroupRange,
        store: CheckpointStore | None,
        meter: RestoreMeter,
    ) -> None:
        if not self._message.restored_checkpoint:
            began = meter.fetched()
            await _prepare(subtask, None, assignment)
            meter.opened(began)
            return
        reader = StateReader(
            store,
            subtask=subtask.env.task_name,
            own=own,
            threads=self._worker.io_threads,
            transfers=self._worker.transfers,
            directory=subtask.env.directory,
            progress=meter.advance,
            copies=None if self._message.state_root else self._worker.copies,
        )
        by_operator: dict[str, list[OperatorSnapshot]] = {}
        for snapshot in without(assignment.state, taken):
            by_operator.setdefault(snapshot.operator, []).append(snapshot)
        loaded = await all_of([reader.load(name, found) for name, found in by_operator.items()])
        states = dict(zip(by_operator, loaded, strict=True))
        for (operator, name), found in taken.items():
            state = states.setdefault(operator, RestoredState())
            state.kept[name] = found
            state.checkpoint_id = self._message.restored_checkpoint
        mine = () if self._message.state_root else assignment.state
        began = meter.fetched()
        await _prepare(subtask, states, assignment, mine)
        meter.opened(began)
        await reader.delete_downloads()
        if isinstance(subtask, InputSubtask):
            subtask.recover(await self._recovered(subtask, assignment, reader, meter))

    async def _recovered(
        self,
        subtask: Subtask,
        assignment: SubtaskAssignment,
        reader: StateReader,
        meter: RestoreMeter,
    ) -> list[InputBatch]:
        """The records that were on their way to a subtask."""
        own, head = assignment.in_flight, subtask.env.vertex.head.name
        sent = [h for h in self._sent_packs if h.channel is not None and h.channel.target == head]
        handles = [*own, *sent]
        if not handles:
            return []
        # For a given exchange they are the same for all senders.
        find = cache(
            partial(
                receivers_before,
                self._plan,
                subtask.env.vertex,
                assignment.index,
                before=assignment.in_flight_parallelism,
            )
        )

        def receivers(channel: ChannelAddress) -> Set[int]:
            return find(channel.exchange)

        runs = await reader.runs_in_flight(handles, receivers, self._pack_lists)
        meter.expect(own, runs)
        data = await reader.load_in_flight(runs)
        pieces = list(zip(runs, data, strict=True))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._worker.io_threads,
            lambda: recovered_batches(
                self._plan,
                subtask.env.vertex,
                assignment.index,
                pieces,
                before=assignment.in_flight_parallelism,
                allow_pickle=self._options.get(ALLOW_PICKLE),
            ),
        )

    def _restoring(self, done_bytes: int, total_bytes: int) -> None:
        self._worker.sender.send(
            RestoreProgress(
                attempt=self.attempt,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                region=self.region,
            )
        )

    @property
    def restored(self) -> tuple[int, list[StateHandle]]:
        """The checkpoint of this job that was restored, and what it consists of here; 0: none."""
        if self._message.state_root or not self._message.restored_checkpoint:
            return 0, []
        handles = [handle for assignment in self._assignments for handle in _handles(assignment)]
        return self._message.restored_checkpoint, [*handles, *self._sent_packs]

    async def start(self) -> None:
        """Connect to the peers of the attempt and begin to process."""
        await self._worker.hub.connect(self._peers, self.attempt, self.region)
        for subtask in self._subtasks:
            subtask.start()
        self.started = True

    @property
    def subtasks(self) -> Sequence[Subtask]:
        """The subtasks that were made so far; also for other threads."""
        return self._subtasks

    @property
    def _sources(self) -> Iterator[SourceSubtask]:
        return (each for each in self._subtasks if isinstance(each, SourceSubtask))

    # -- commands of the coordinator -----------------------------------------------------------------------

    def trigger(self, checkpoint_id: int, trigger_ms: int, options: CheckpointOptions) -> None:
        """Have the sources inject a barrier."""
        for source in self._sources:
            source.trigger_checkpoint(checkpoint_id, trigger_ms, options)

    def limit(self, group: str, limit: int) -> None:
        """Have the splits of an alignment group wait that are above `limit`."""
        for source in self._sources:
            source.announce(group, limit)

    def finish_sources(self) -> None:
        """Have the sources end as if their data had ended."""
        for source in self._sources:
            source.end_early()

    def loop_round_over(self, loop: str, number: int, records: int) -> None:
        """Notify the heads of a loop of the number of records that came back at all of them."""
        for subtask in self._subtasks:
            if isinstance(subtask, IterationSubtask) and subtask.loop == loop:
                subtask.loop_round_over(number, records)

    def completed(self, permit: CommitPermit) -> None:
        """Tell all subtasks that a checkpoint is durable."""
        for subtask in self._subtasks:
            subtask.checkpoint_completed(permit)
        if self._worker.copies is not None:
            self._in_thread(partial(self._worker.copies.completed, permit.checkpoint_id))

    def aborted(self, checkpoint_id: int) -> None:
        """Tell all subtasks that a checkpoint will never complete."""
        for subtask in self._subtasks:
            subtask.checkpoint_aborted(checkpoint_id)
        if self._worker.copies is not None:
            self._in_thread(partial(self._worker.copies.aborted, checkpoint_id))

    def _in_thread(self, call: Callable[[], None]) -> None:
        """Run a call in a thread, without waiting for it."""
        asyncio.get_running_loop().run_in_executor(self._worker.io_threads, call)

    def terminate(self) -> None:
        """Have all subtasks leave in good order."""
        for subtask in self._subtasks:
            subtask.terminate()

    async def cancel(self) -> None:
        """Stop all subtasks at once, and drop their state."""
        self._metrics.close()
        await asyncio.gather(*(subtask.cancel() for subtask in self._subtasks))
        for subtask in self._subtasks:
            if subtask.kept:
                kept = KeptSubtask(self._code, subtask)
                self._worker.kept.keep(kept, self._options.get(KEEP_STATE_TIMEOUT))
            subtask.forget()
        self._subtasks = []

    def history_over(self, vertex: int) -> None:
        """Have a source go live."""
        for source in self._sources:
            if source.env.vertex.id == vertex:
                source.history_over()

    def end_source(self, vertex: int) -> None:
        """Have a source end, as if its data had ended, when it has nothing to read."""
        for source in self._sources:
            if source.env.vertex.id == vertex:
                source.end_when_quiet()

    def offer(self, vertex: int, offer: SplitsOffered) -> None:
        """Offer the splits that may be read now to the subtasks of a source; ask for the end of others."""
        for source in self._sources:
            if source.env.vertex.id == vertex:
                source.offer(offer.splits, offer.awaited, more=offer.more)

    def _tell(self) -> None:
        """Something that the coordinator waits for has changed."""
        self._worker.sender.send(Statistics(attempt=self.attempt, subtasks=self.statistics()))

    def statistics(self) -> tuple[SubtaskStatistics, ...]:
        """The statistics of the subtasks so far."""
        return tuple(
            statistics_of(
                subtask, self._samplers.get((subtask.env.vertex.id, subtask.env.index), ())
            )
            for subtask in self._subtasks
        )


async def _prepare(
    subtask: Subtask,
    states: dict[str, RestoredState] | None,
    assignment: SubtaskAssignment,
    own: Sequence[OperatorSnapshot] = (),
) -> None:
    """Open a subtask. It counts as one call, so that one that does not come to an end is noticed."""
    subtask.time.switch(Activity.BUSY)
    try:
        await subtask.prepare(states, assignment.finished, own)
    finally:
        subtask.time.switch(Activity.IDLE)


def _handles(assignment: SubtaskAssignment) -> Iterator[StateHandle]:
    for snapshot in assignment.state:
        yield from snapshot.handles
    yield from assignment.in_flight


class RunningRegions:
    """The deployments of a worker, and the tasks that prepare and start them."""

    def __init__(self, hub: ExchangeHub, watch: StepWatch) -> None:
        self._hub = hub
        self._watch = watch
        self._deployments: dict[int, Deployment] = {}
        self._tasks: dict[asyncio.Task[Any], frozenset[int]] = {}
        self._leaving: dict[asyncio.Task[None], frozenset[int]] = {}

    def __iter__(self) -> Iterator[Deployment]:
        return iter(list(self._deployments.values()))

    def of_attempt(self, attempt: int) -> list[Deployment]:
        """The deployments of one attempt; none if it is over."""
        return [each for each in self if each.attempt == attempt]

    def add(self, deployment: Deployment) -> None:
        """Add the deployment of a region, of whose earlier attempt nothing is left."""
        self._deployments[deployment.region] = deployment
        self._watch.begin(deployment.region, deployment.subtasks)

    def spawn(
        self, regions: Collection[int], work: Coroutine[Any, Any, T], name: str
    ) -> asyncio.Task[T]:
        """Run work for some regions beside the messages; it is cancelled with any of them."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = frozenset(regions)
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def stop(self, regions: Collection[int]) -> None:
        """Cancel what was spawned for some regions, and wait for its end."""
        wanted = frozenset(regions)
        await _cancelled([task for task, own in self._tasks.items() if own & wanted])

    def drop(self, regions: Collection[int], done: Callable[[], None]) -> None:
        """Cancel some regions. They get no message any more; `done` is called once they are gone."""
        wanted = frozenset(regions)
        tasks = [task for task, own in self._tasks.items() if own & wanted]
        dropped = [own for r in wanted if (own := self._deployments.pop(r, None)) is not None]
        # Cancelled once more, it is not gone before the first time is over: that resets the hub, too.
        before = [leaving for leaving, own in self._leaving.items() if own & wanted]

        async def leave() -> None:
            await asyncio.gather(*before, return_exceptions=True)
            await _cancelled(tasks)
            await asyncio.gather(*(deployment.cancel() for deployment in dropped))
            self._watch.end(wanted)
            await self._hub.reset(wanted)
            done()

        leaving = asyncio.get_running_loop().create_task(leave(), name="drop regions")
        self._leaving[leaving] = wanted
        leaving.add_done_callback(lambda gone: self._leaving.pop(gone, None))

    async def drop_all(self) -> None:
        """Cancel everything that runs here."""
        await _cancelled(list(self._tasks))
        await asyncio.gather(*self._leaving, return_exceptions=True)
        dropped, self._deployments = list(self._deployments.values()), {}
        await asyncio.gather(*(deployment.cancel() for deployment in dropped))
        self._watch.end({deployment.region for deployment in dropped})
        await self._hub.reset()


def deployed(attempt: int, deployments: Sequence[Deployment]) -> Deployed:
    """The report for the time when all of an attempt is prepared here."""
    parts = [deployment.deployed for deployment in deployments]
    return Deployed(
        attempt=attempt,
        fetching_ms=max((part.fetching_ms for part in parts), default=0),
        opening_ms=max((part.opening_ms for part in parts), default=0),
        # Copies are counted for the worker as a whole.
        local_bytes=max((part.local_bytes for part in parts), default=0),
        read_bytes=sum(part.read_bytes for part in parts),
        kept_bytes=sum(part.kept_bytes for part in parts),
    )


async def _cancelled(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
