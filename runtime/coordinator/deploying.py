"""State: get workers, hand out subtasks with their state, wait until all are ready."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from ...errors import FencedError, HeadgateError, InternalError, JobNotReady
from ..control.messages import Deploy, Deployed, RestoreProgress, SubtaskAssignment, SubtaskFailed
from ..job_checks import check_restored_pickles
from ..options.registry import Options
from ..options.state import RESTORE_FALLBACK, WITHOUT_CHANNEL_STATE
from ..plan import Vertex
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.failover import RegionId
from ..protocol.failure_history import RestoreFigures
from ..protocol.failures import FailureKind, as_headgate_error
from ..protocol.ids import SubtaskId
from ..savepoint.compare import accepted_changes
from ..savepoint.store import opened
from ..storage.base import CheckpointStore
from .adopting import log_deployment
from .context import AttemptFailed, ClientWish, Failure, JobContext, JobEvent, Prepared
from .in_flight import assign_in_flight, check_in_flight
from .job_spans import restored as restored_span
from .manifests import size_of
from .placement import worker_groups
from .restore import assign_state, check_restorable, finished_subtasks
from .restored import Restored, find_restored, plan_for, reader_of
from .source_runs import source_run
from .states import State, deploying, ended_by_wish, ends_at_once, failing, running
from .workers import SILENT, FromWorker, Worker, WorkerLost

PROGRESS_S = 1.0
"""The progress of a restore is announced this often; never, if the restore takes less."""
FAILURE_KINDS = {kind.value: kind for kind in FailureKind}


class Deploying(State):
    """One attempt, from nothing to all subtasks ready."""

    def __init__(self) -> None:
        self._next_progress = 0.0

    async def run(self, job: JobContext) -> State:
        job.set_status("RESTARTING" if job.restarts or job.rescale else "INITIALIZING")
        job.next_attempt()
        job.restoring.clear()
        job.deployment_events = 0
        job.figures = RestoreFigures()
        job.restored = None
        preparing = asyncio.get_running_loop().create_task(self._prepare(job), name="deploy")
        # Its end is an event like others, so that wishes and deaths are not kept waiting for it.
        prepared = Prepared(job.attempt)
        preparing.add_done_callback(lambda _: job.events.put_nowait(prepared))
        try:
            return await self._await_deployed(job, preparing)
        finally:
            job.deployment_events = None
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _prepare(self, job: JobContext) -> list[Worker]:
        restored = await find_restored(job)
        plan, parallelism = plan_for(job, restored)
        if restored is not None:
            check_restorable(
                restored.manifest,
                plan,
                allow_non_restored=job.spec.allow_non_restored_state,
                accepted=accepted_changes(Options(job.spec.options)),
            )
            check_restored_pickles(restored.manifest, Options(job.spec.options))
            if _with_channel_state(job, restored.manifest):
                check_in_flight(restored.manifest, plan)
        job.adopt(plan, parallelism)
        job.warm_spares()
        needed = worker_groups(plan, job.spec)
        asked = job.clock.monotonic()
        await job.pool.ensure(needed)
        job.figures.workers_ms = round(1000 * (job.clock.monotonic() - asked))
        live = dict(sorted(job.pool.staying.items()))
        hosts = {worker_id: worker.host_id for worker_id, worker in live.items()}
        groups = {worker_id: worker.group for worker_id, worker in live.items()}
        workers = [live[worker_id] for worker_id in job.seats.order(hosts, groups, needed)]
        job.pool.retire(workers)
        await job.checkpoints.swept()
        await self._deploy(job, workers, restored)
        job.orphaned_ms = await log_deployment(job, workers)
        return workers

    async def _deploy(
        self, job: JobContext, workers: list[Worker], restored: Restored | None
    ) -> None:
        executions = job.executions
        executions.place([worker.worker_id for worker in workers], job.spec)
        job.restored = restored
        everything = executions.failover.everything
        self._next_progress = job.clock.monotonic() + PROGRESS_S
        await deploy_regions(job, restored, workers, everything, partial=False)

    async def _await_deployed(
        self, job: JobContext, preparing: asyncio.Task[list[Worker]]
    ) -> State:
        workers: list[Worker] | None = None
        deployed: set[str] = set()
        lost: dict[str, str] = {}
        while workers is None or not deployed.issuperset(worker.worker_id for worker in workers):
            event = await job.events.get()
            job.deployment_events = (job.deployment_events or 0) + moves(job, event)
            match event:
                case AttemptFailed(attempt, failure) if attempt == job.attempt:
                    return failing(failure)
                case Prepared(attempt) if attempt == job.attempt:
                    try:
                        workers = preparing.result()
                    except FencedError:
                        raise  # another coordinator leads: nothing here is to fail, or to restart
                    except HeadgateError as error:
                        return self._failed(job, failure_from(error, "deployment"))
                case FromWorker(worker_id, Deployed(attempt=attempt) as done) if (
                    attempt == job.attempt
                ):
                    deployed.add(worker_id)
                    job.figures.add(
                        done.fetching_ms, done.opening_ms, done.local_bytes, done.read_bytes
                    )
                case FromWorker(worker_id, RestoreProgress() as progress):
                    self._progressed(job, worker_id, progress)
                case FromWorker(worker_id, SubtaskFailed() as message) if (
                    message.attempt == job.attempt
                ):
                    return self._failed(job, failure_of_subtask(message, worker_id))
                case WorkerLost(worker_id, reason):
                    lost[worker_id] = reason
                case ClientWish() as wish if ends_at_once(wish):
                    return ended_by_wish(wish)
                case ClientWish() as wish:
                    wish.refuse(JobNotReady("the job is starting", fix="try again in a moment"))
            for worker in workers or ():
                if worker.worker_id in lost:
                    return failing(failure_of_worker(worker.worker_id, lost[worker.worker_id]))
        publish_restored(job)
        return running(workers)

    def _progressed(self, job: JobContext, worker_id: str, progress: RestoreProgress) -> None:
        """Show how far the restore is, now and then."""
        if progress.attempt != job.attempt:
            return
        job.restoring[worker_id, progress.region] = (progress.done_bytes, progress.total_bytes)
        now = job.clock.monotonic()
        if now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_S
        done = sum(done for done, _ in job.restoring.values())
        total = sum(total for _, total in job.restoring.values())
        percent = 100 * done // total if total else 100
        job.publish(
            "restoring",
            f"restoring: {percent}% ({done:,} of {total:,} bytes)",
            done_bytes=done,
            total_bytes=total,
            percent=percent,
        )

    def _failed(self, job: JobContext, failure: Failure) -> State:
        """Restore the checkpoint before, if state of this one cannot be read and the user allows it.

        Some state is read here, some by workers. What the job cannot take from any checkpoint is found
        before `job.restored` is set.
        """
        fallback = fallback_of(job, failure)
        if fallback is None:
            return failing(failure)
        job.record(failure)
        job.publish("fallback", fallback)
        return deploying()


_UNREADABLE: Final = (FailureKind.STATE, FailureKind.CORRUPT)


def fallback_of(job: JobContext, failure: Failure) -> str | None:
    """If state could not be read, and an older checkpoint may be restored instead: says so."""
    restored, allowed = job.restored, job.options.get(RESTORE_FALLBACK)
    if failure.kind not in _UNREADABLE or restored is None or not allowed:
        return None
    if job.log is None or not restored.own:
        return None
    job.unreadable.add(restored.manifest.checkpoint_id)
    left = [logged.checkpoint_id for logged in job.log.view.restorable]
    older = [id_ for id_ in left if id_ not in job.unreadable]
    if not older:
        return None
    return (
        f"{restored.text} cannot be restored; trying checkpoint {older[-1]}, "
        f"as {RESTORE_FALLBACK.key} allows"
    )


def publish_restored(job: JobContext) -> None:
    """All that was deployed is ready."""
    text = job.restored.text if job.restored is not None else ""
    job.failures.deployed(job.clock.now_ms(), text, job.figures)
    if job.restored is not None:
        job.restored_at_ms = job.clock.now_ms()
        figures = job.figures
        job.observed.restored(
            figures.fetching_ms + figures.opening_ms, figures.local_bytes, figures.storage_bytes
        )
        size = size_of(job.restored.manifest)
        restored_span(job, size)
        job.publish(
            "restored",
            f"restored {job.restored.text} ({size:,} bytes)",
            checkpoint=job.restored_checkpoint,
            size_bytes=size,
            attempt=job.attempt,
        )


async def deploy_regions(
    job: JobContext,
    restored: Restored | None,
    workers: Sequence[Worker],
    regions: Collection[RegionId],
    *,
    partial: bool,
) -> frozenset[str]:
    """Tell workers to prepare the subtasks of `regions`, where `job.executions` places them.

    Args:
        job: whose.
        restored: what they begin with.
        workers: all that the job runs on.
        regions: which ones.
        partial: workers keep what else they run, and those that get nothing are not told.

    Returns:
        Ids of the workers that were told.

    Raises:
        StateError: state cannot be read.
    """
    await job.old_output.idle()
    wanted = job.executions.failover.subtasks_of(regions)
    assignments = await _assignments(job, restored, frozenset(wanted))
    placement, checkpoint = job.executions.placement, job.spec.checkpoint
    told = set()
    for worker in workers:
        mine = [each for each in wanted if placement[each] == worker.worker_id]
        if partial and not mine:
            continue
        told.add(worker.worker_id)
        worker.send(
            Deploy(
                attempt=job.attempt,
                generation=job.generation,
                plan=job.plan.fingerprint(),
                job=job.plan_blob,
                subtasks=tuple(msgspec.msgpack.encode(assignments[each]) for each in mine),
                peers={peer.worker_id: peer.address for peer in workers},
                placement={f"{s.vertex}:{s.index}": owner for s, owner in placement.items()},
                settings=job.spec.options,
                partial=partial,
                storage=checkpoint.storage if checkpoint else "",
                restored_checkpoint=job.restored_checkpoint,
                state_root=restored.root if restored is not None else "",
            )
        )
    return frozenset(told)


def moves(job: JobContext, event: JobEvent) -> bool:
    """True for a message of this deployment: it shows that the deployment goes on."""
    if isinstance(event, FromWorker):
        return getattr(event.message, "attempt", None) == job.attempt
    return isinstance(event, Prepared)


async def _assignments(
    job: JobContext, restored: Restored | None, wanted: frozenset[SubtaskId]
) -> dict[SubtaskId, SubtaskAssignment]:
    """Assign restored state, or fresh splits, to each subtask."""
    if restored is None or restored.own:
        return await _assignments_from(job, restored, wanted, job.store)
    options = job.spec.options
    async with opened(job.open_at, restored.root, options, writable=False) as store:
        return await _assignments_from(job, restored, wanted, store)


async def _assignments_from(
    job: JobContext,
    restored: Restored | None,
    wanted: frozenset[SubtaskId],
    store: CheckpointStore | None,
) -> dict[SubtaskId, SubtaskAssignment]:
    plan, read = job.plan, reader_of(store)
    manifest = restored.manifest if restored is not None else None
    known = {operator.name for operator in manifest.operators} if manifest else set()
    assignments: dict[SubtaskId, SubtaskAssignment] = {}
    vertices = {subtask.vertex for subtask in wanted}
    for vertex in plan.vertices:
        if vertex.id not in vertices:
            continue
        states = await assign_state(manifest, plan, vertex, read) if manifest else None
        finished = finished_subtasks(manifest, vertex) if manifest else frozenset()
        in_flight = None
        if manifest and _with_channel_state(job, manifest):
            in_flight = assign_in_flight(manifest, plan, vertex)
        splits = None
        if vertex.head.source is not None and vertex.head.name not in known:
            splits = await _fresh_splits(job, vertex)
        for index in range(vertex.parallelism):
            subtask = SubtaskId(vertex.id, index)
            if subtask not in wanted:
                continue
            own = None if splits is None else tuple(splits[index :: vertex.parallelism])
            assignments[subtask] = SubtaskAssignment(
                vertex=vertex.id,
                index=index,
                region=job.executions.failover.region_of(subtask),
                state=states[index] if states else (),
                splits=own,
                finished=index in finished,
                in_flight=in_flight.by_subtask[index] if in_flight else (),
                in_flight_parallelism=in_flight.parallelism if in_flight else 0,
            )
    return assignments


def _with_channel_state(job: JobContext, manifest: Manifest) -> bool:
    """False if the user gives up the records that were on their way in this checkpoint."""
    return job.options.get(WITHOUT_CHANNEL_STATE) != manifest.checkpoint_id


async def _fresh_splits(job: JobContext, vertex: Vertex) -> list[bytes]:
    """Cut a source into splits, once in the coordinator's life."""
    name = vertex.head.name
    if name not in job.splits:
        source = vertex.head.source
        if source is None:
            raise InternalError(f"vertex has no source vertex=`{vertex.name}`")
        try:
            configured = source.configure(job.options.effective())
            prepared = await configured.prepare(source_run(job, vertex.head))
            job.splits[name] = await asyncio.to_thread(prepared.splits, vertex.parallelism)
        except HeadgateError:
            raise
        except Exception as error:
            what = f"source `{name}` cannot be cut into splits"
            raise as_headgate_error(error, what, str(vertex.head.origin)) from error
    return job.splits[name]


def failure_from(error: HeadgateError, where: str) -> Failure:
    """A failure of the coordinator's own making."""
    return Failure(str(error), where, FailureKind.of(error), error, error.detail)


def failure_of_subtask(message: SubtaskFailed, worker_id: str) -> Failure:
    """The failure that a worker reported."""
    try:
        error = pickle.loads(message.error)
    except Exception:
        error = HeadgateError(message.text)
    where = message.task_name
    if message.index >= 0:
        where = f"{where} ({message.index})"
    kind = FAILURE_KINDS[message.kind]
    return Failure(message.text, where, kind, error, message.detail, worker_id)


def failure_of_worker(worker_id: str, reason: str) -> Failure:
    """A worker died or went silent."""
    text = f"worker lost: {reason}"
    silent = reason.startswith(SILENT)
    kind = FailureKind.HEARTBEAT_TIMEOUT if silent else FailureKind.WORKER_LOST
    return Failure(
        text, worker_id, kind, HeadgateError(f"{text} worker=`{worker_id}`"), worker=worker_id
    )
