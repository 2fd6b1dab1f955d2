"""State: get workers, assign subtasks with their state to them, and wait until all are ready."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import final

import msgspec

from ...errors import FencedError, HeadgateError, JobNotReady
from ...state.snapshot import StateHandle
from ..control.messages import (
    Deploy,
    DeployCommon,
    Deployed,
    RestoreProgress,
    SubtaskAssignment,
    SubtaskFailed,
)
from ..exchange.hub import addresses_for_peers
from ..job_checks import check_restored_pickles
from ..options.registry import Options
from ..options.state import WITHOUT_CHANNEL_STATE
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.failover import RegionId
from ..protocol.ids import SubtaskId
from ..savepoint.compare import accepted_changes
from ..savepoint.describe import SPLITS
from ..savepoint.store import opened
from ..slots import worker_groups
from ..storage.base import CheckpointStore
from .attempt import Attempt
from .context import JobContext, ToDeploying, ToFailing, ToRunning, Transition, end_by, ends_at_once
from .discovery import check_keys_kept, going_on, ledger_start
from .environment import (
    AttemptFailed,
    ClientCommand,
    DeploymentPrepared,
    FromWorker,
    JobEnvironment,
    JobEvent,
    WorkerLost,
)
from .failures import Failure, failure_from, failure_of_subtask, failure_of_worker
from .reporting import report_restored
from .restore import (
    Restored,
    assign_in_flight,
    assign_state,
    check_in_flight,
    check_restorable,
    finished_subtasks,
    reader_of,
    sent_packs,
    split_items,
)
from .workers import LiveWorker

PROGRESS_S = 1.0
"""The progress of a restore is announced this often; never, if the restore takes less time."""


@final
class Deploying:
    """The state from the begin of an attempt until all its subtasks are ready."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._env = job.env
        self._attempt = job.attempt
        self._next_progress = 0.0

    async def run(self) -> Transition:
        job, attempt = self._job, self._attempt
        before = job.lifecycle.restarts or job.lifecycle.rescale
        job.set_status("RESTARTING" if before else "INITIALIZING")
        attempt.begin()
        preparing = asyncio.get_running_loop().create_task(self._prepare(), name="deploy")
        # Its end is an event like others, so that client commands and losses are handled meanwhile.
        prepared = DeploymentPrepared(attempt.number)
        preparing.add_done_callback(lambda _: self._env.events.put_nowait(prepared))
        try:
            return await self._await_deployed(preparing)
        finally:
            attempt.deployment_events = None
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _prepare(self) -> list[LiveWorker]:
        job, env, attempt = self._job, self._env, self._attempt
        restored = await job.restore_points.find()
        plan, parallelism = attempt.plan_for(restored)
        if restored is not None:
            check_restorable(
                restored.manifest,
                plan,
                allow_non_restored=env.spec.allow_non_restored_state,
                accepted=accepted_changes(Options(env.spec.options)),
            )
            check_restored_pickles(restored.manifest, Options(env.spec.options))
            if _with_channel_state(env, restored.manifest):
                check_in_flight(restored.manifest, plan)
        attempt.use(plan, parallelism)
        attempt.restored = restored
        await job.commits.restored(restored)
        job.warm_spares()
        await ensure_workers(job)
        workers = choose_workers(job, job.pool.staying)
        await job.checkpoints.swept()
        await self._deploy(workers, restored)
        await attempt.log_deployment([worker.worker_id for worker in workers])
        return workers

    async def _deploy(self, workers: list[LiveWorker], restored: Restored | None) -> None:
        env, attempt = self._env, self._attempt
        attempt.executions.place([worker.worker_id for worker in workers], env.spec)
        everything = attempt.executions.failover.everything
        self._next_progress = env.clock.monotonic() + PROGRESS_S
        await deploy_regions(self._job, restored, workers, everything, partial=False)

    async def _await_deployed(self, preparing: asyncio.Task[list[LiveWorker]]) -> Transition:
        attempt = self._attempt
        workers: list[LiveWorker] | None = None
        deployed: set[str] = set()
        lost: dict[str, str] = {}
        while workers is None or not deployed.issuperset(worker.worker_id for worker in workers):
            event = await self._env.events.get()
            attempt.deployment_events = (attempt.deployment_events or 0) + is_progress(
                attempt, event
            )
            match event:
                case AttemptFailed(number, failure) if number == attempt.number:
                    return ToFailing(failure)
                case DeploymentPrepared(number) if number == attempt.number:
                    try:
                        workers = preparing.result()
                    except FencedError:
                        raise  # another coordinator leads: nothing here may fail or restart
                    except HeadgateError as error:
                        return self._failed(failure_from(error, "deployment"))
                case FromWorker(worker_id, Deployed(attempt=number) as done) if (
                    number == attempt.number
                ):
                    deployed.add(worker_id)
                    attempt.figures.add(
                        done.fetching_ms,
                        done.opening_ms,
                        done.local_bytes,
                        done.read_bytes,
                        done.kept_bytes,
                    )
                case FromWorker(worker_id, RestoreProgress() as progress):
                    self._progressed(worker_id, progress)
                case FromWorker(worker_id, SubtaskFailed() as message) if (
                    message.attempt == attempt.number
                ):
                    return self._failed(failure_of_subtask(message, worker_id))
                case WorkerLost(worker_id, reason):
                    lost[worker_id] = reason
                case ClientCommand() as command if ends_at_once(command):
                    return end_by(command)
                case ClientCommand() as command:
                    command.refuse(JobNotReady("the job is starting", fix="try again in a moment"))
            for worker in workers or ():
                if worker.worker_id in lost:
                    return ToFailing(failure_of_worker(worker.worker_id, lost[worker.worker_id]))
        report_restored(self._job)
        return ToRunning(workers)

    def _progressed(self, worker_id: str, progress: RestoreProgress) -> None:
        """Publish the progress of the restore from time to time."""
        env, attempt = self._env, self._attempt
        if progress.attempt != attempt.number:
            return
        attempt.restoring[worker_id, progress.region] = (progress.done_bytes, progress.total_bytes)
        now = env.clock.monotonic()
        if now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_S
        done, total = attempt.restored_bytes
        percent = 100 * done // total if total else 100
        env.publish(
            "restoring",
            f"restoring: {percent}% ({done:,} of {total:,} bytes)",
            done_bytes=done,
            total_bytes=total,
            percent=percent,
        )

    def _failed(self, failure: Failure) -> Transition:
        """Restore the checkpoint before, if this one cannot be read and the user allows it.

        Some state is read here, and some by workers. State that does not fit the job, which no other
        checkpoint would change, is found before `Attempt.restored` is set.
        """
        fallback = self._job.restore_points.fall_back(self._attempt.restored, failure)
        if fallback is None:
            return ToFailing(failure)
        self._job.record(failure)
        self._env.publish("fallback", fallback)
        return ToDeploying()


async def ensure_workers(job: JobContext) -> None:
    """Start workers until the present plan has enough, and measure the time that this takes.

    Raises:
        ClusterError: a worker could not be started.
    """
    asked = job.env.clock.monotonic()
    await job.pool.ensure(worker_groups(job.attempt.plan, job.env.spec))
    spent = job.env.clock.monotonic() - asked
    job.attempt.figures.workers_ms = round(1000 * spent)


def choose_workers(job: JobContext, among: Mapping[str, LiveWorker]) -> list[LiveWorker]:
    """Choose workers for all slots of the present plan, in their order; the others leave."""
    live = dict(sorted(among.items()))
    hosts = {worker_id: worker.host_id for worker_id, worker in live.items()}
    groups = {worker_id: worker.group for worker_id, worker in live.items()}
    needed = worker_groups(job.attempt.plan, job.env.spec)
    workers = [live[worker_id] for worker_id in job.affinity.order(hosts, groups, needed)]
    job.pool.retire(workers)
    return workers


async def deploy_regions(
    job: JobContext,
    restored: Restored | None,
    workers: Sequence[LiveWorker],
    regions: Collection[RegionId],
    *,
    partial: bool,
) -> frozenset[str]:
    """Tell workers to prepare the subtasks of `regions`, as `Executions` has placed them.

    Args:
        job: the job.
        restored: the state that they begin with.
        workers: all workers that the job runs on.
        regions: the regions to deploy.
        partial: workers keep what else they run, and those without such a subtask get no message.

    Returns:
        Ids of the workers that got a message.

    Raises:
        StateError: state cannot be read.
    """
    env, attempt = job.env, job.attempt
    await job.old_output.idle()
    wanted = attempt.executions.failover.subtasks_of(regions)
    assignments = await _assignments(job, restored, frozenset(wanted))
    placement, checkpoint = attempt.executions.placement, env.spec.checkpoint
    by_worker: dict[str, list[bytes]] = {worker.worker_id: [] for worker in workers}
    for each in wanted:
        by_worker[placement[each]].append(msgspec.msgpack.encode(assignments[each]))
    packs: tuple[StateHandle, ...] = ()
    if restored is not None and _with_channel_state(env, restored.manifest):
        heads = {attempt.plan.vertices[each.vertex].head.name for each in wanted}
        packs = sent_packs(restored.manifest, heads)
    common, common_size = _common(job, workers, packs).packed()
    told = set()
    for worker in workers:
        mine = by_worker[worker.worker_id]
        if partial and not mine:
            continue
        told.add(worker.worker_id)
        worker.send(
            Deploy(
                attempt=attempt.number,
                generation=env.generation,
                plan=attempt.plan.fingerprint(),
                common=common,
                common_size=common_size,
                subtasks=tuple(mine),
                partial=partial,
                storage=checkpoint.storage if checkpoint else "",
                restored_checkpoint=attempt.restored_checkpoint,
                run=env.spec.run,
                state_root=restored.root if restored is not None else "",
            )
        )
    return frozenset(told)


def _common(
    job: JobContext, workers: Sequence[LiveWorker], packs: tuple[StateHandle, ...]
) -> DeployCommon:
    """Return what all workers are told. `workers` are in the order of their slots."""
    plan, spec = job.attempt.plan, job.env.spec
    return DeployCommon(
        job=job.attempt.plan_blob,
        workers=tuple(addresses_for_peers([worker.address for worker in workers])),
        slots={group: spec.slots_of(group) for group in plan.slots_by_group},
        settings=spec.options,
        sent_packs=packs,
    )


def is_progress(attempt: Attempt, event: JobEvent) -> bool:
    """Return True for a message of this deployment: it shows that the deployment makes progress."""
    if isinstance(event, FromWorker):
        return getattr(event.message, "attempt", None) == attempt.number
    return isinstance(event, DeploymentPrepared)


async def _assignments(
    job: JobContext, restored: Restored | None, wanted: frozenset[SubtaskId]
) -> dict[SubtaskId, SubtaskAssignment]:
    """Assign restored state, or fresh splits, to each subtask."""
    if restored is None or restored.of_this_job:
        return await _assignments_from(job, restored, wanted, job.env.store)
    options = job.env.spec.options
    async with opened(job.env.open_at, restored.root, options, writable=False) as store:
        return await _assignments_from(job, restored, wanted, store)


async def _assignments_from(
    job: JobContext,
    restored: Restored | None,
    wanted: frozenset[SubtaskId],
    store: CheckpointStore | None,
) -> dict[SubtaskId, SubtaskAssignment]:
    plan, read = job.attempt.plan, reader_of(store)
    manifest = restored.manifest if restored is not None else None
    known = {operator.name for operator in manifest.operators} if manifest else set()
    assignments: dict[SubtaskId, SubtaskAssignment] = {}
    vertices = {subtask.vertex for subtask in wanted}
    endless = going_on(job.env, plan)
    for vertex in plan.vertices:
        if vertex.id not in vertices:
            continue
        states = await assign_state(manifest, plan, vertex, read) if manifest else None
        finished: frozenset[int] = frozenset()
        if manifest and vertex.id not in endless:
            finished = finished_subtasks(manifest, vertex)
        in_flight = None
        if manifest and _with_channel_state(job.env, manifest):
            in_flight = assign_in_flight(manifest, plan, vertex)
        splits = None
        if vertex.head.source is not None and vertex.head.name not in known:
            splits = await job.splits.of(vertex)
        ledger = None
        if vertex.head.source is not None and vertex.head.source.discovers:
            begun = splits
            if begun is None:
                assert manifest is not None  # otherwise the source has just been cut
                begun = await split_items(manifest, vertex.head.name, SPLITS, read)
                check_keys_kept(vertex, manifest, begun)
            ledger = ledger_start(job.env, vertex, begun)
        for index in range(vertex.parallelism):
            subtask = SubtaskId(vertex.id, index)
            if subtask not in wanted:
                continue
            own = None if splits is None else tuple(splits[index :: vertex.parallelism])
            assignments[subtask] = SubtaskAssignment(
                vertex=vertex.id,
                index=index,
                region=job.attempt.executions.failover.region_of(subtask),
                state=states[index] if states else (),
                splits=own,
                ledger=ledger,
                finished=index in finished,
                in_flight=in_flight.by_subtask[index] if in_flight else (),
                in_flight_parallelism=in_flight.parallelism if in_flight else 0,
            )
    return assignments


def _with_channel_state(env: JobEnvironment, manifest: Manifest) -> bool:
    """Return False if the user gives up the records that were on their way in this checkpoint."""
    return env.options.get(WITHOUT_CHANNEL_STATE) != manifest.checkpoint_id
