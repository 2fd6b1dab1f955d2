"""State: get workers, hand out subtasks with their state, wait until all are ready."""

from __future__ import annotations

import asyncio
import pickle
import traceback

import msgspec

from ...errors import HeadgateError, InternalError, UserCodeError
from ..control.messages import Deploy, Deployed, SubtaskAssignment, SubtaskFailed
from ..protocol.failures import FailureKind
from ..protocol.joblog import LoggedCheckpoint
from .context import ClientWish, Failure, JobContext, Prepared
from .placement import place, workers_needed
from .restore import assign_state, check_restorable, finished_subtasks
from .states import State, ended_by_wish, failing, running
from .workers import SILENT, FromWorker, Worker, WorkerLost

FAILURE_KINDS = {kind.value: kind for kind in FailureKind}


class Deploying(State):
    """One attempt, from nothing to all subtasks ready."""

    async def run(self, job: JobContext) -> State:
        job.set_status("RESTARTING" if job.restarts else "INITIALIZING")
        job.next_attempt()
        job.statistics.clear()
        preparing = asyncio.get_running_loop().create_task(self._prepare(job), name="deploy")
        # Its end is an event like others, so that wishes and deaths are not kept waiting for it.
        prepared = Prepared(job.attempt)
        preparing.add_done_callback(lambda _: job.events.put_nowait(prepared))
        try:
            return await self._await_deployed(job, preparing)
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _prepare(self, job: JobContext) -> list[Worker]:
        count = workers_needed(job.spec.plan, job.spec.slots_per_worker)
        workers = await job.pool.ensure(count)
        restored = await _newest_checkpoint(job)
        await self._deploy(job, workers, restored)
        return workers

    async def _deploy(
        self, job: JobContext, workers: list[Worker], restored: LoggedCheckpoint | None
    ) -> None:
        plan = job.spec.plan
        ids = [worker.worker_id for worker in workers]
        placement = place(plan, ids, job.spec.slots_per_worker)
        if restored is not None:
            check_restorable(
                restored.manifest,
                plan,
                allow_non_restored=job.spec.allow_non_restored_state,
            )
        assignments = await _assignments(job, restored)
        job.restored_checkpoint = restored.checkpoint_id if restored else 0
        checkpoint = job.spec.checkpoint
        for worker in workers:
            mine = tuple(
                msgspec.msgpack.encode(assignments[subtask])
                for subtask, owner in placement.items()
                if owner == worker.worker_id
            )
            worker.send(
                Deploy(
                    attempt=job.attempt,
                    generation=job.generation,
                    job=job.plan_blob,
                    subtasks=mine,
                    peers={peer.worker_id: peer.address for peer in workers},
                    placement={f"{v}:{i}": owner for (v, i), owner in placement.items()},
                    settings=job.spec.options,
                    storage=checkpoint.storage if checkpoint else "",
                    restored_checkpoint=job.restored_checkpoint,
                )
            )

    async def _await_deployed(
        self, job: JobContext, preparing: asyncio.Task[list[Worker]]
    ) -> State:
        workers: list[Worker] | None = None
        deployed: set[str] = set()
        lost: dict[str, str] = {}
        while workers is None or not deployed.issuperset(worker.worker_id for worker in workers):
            event = await job.events.get()
            match event:
                case Prepared(attempt) if attempt == job.attempt:
                    try:
                        workers = preparing.result()
                    except HeadgateError as error:
                        return failing(failure_from(error, "deployment"))
                case FromWorker(worker_id, Deployed(attempt=attempt)) if attempt == job.attempt:
                    deployed.add(worker_id)
                case FromWorker(_, SubtaskFailed() as message) if message.attempt == job.attempt:
                    return failing(failure_of_subtask(message))
                case WorkerLost(worker_id, reason):
                    lost[worker_id] = reason
                case ClientWish("cancel" | "stop") as wish:
                    return ended_by_wish(wish)
                case ClientWish() as wish:
                    wish.refuse(HeadgateError("the job is starting", fix="try again in a moment"))
            for worker in workers or ():
                if worker.worker_id in lost:
                    return failing(failure_of_worker(worker.worker_id, lost[worker.worker_id]))
        self._publish_restored(job)
        return running(workers)

    def _publish_restored(self, job: JobContext) -> None:
        if job.restored_checkpoint:
            job.restored_at_ms = job.clock.now_ms()
            job.publish(
                "restored",
                f"restored checkpoint {job.restored_checkpoint}",
                checkpoint=job.restored_checkpoint,
                attempt=job.attempt,
            )


async def _newest_checkpoint(job: JobContext) -> LoggedCheckpoint | None:
    """What this attempt starts from. A checkpoint whose publication is in doubt is settled first."""
    if job.log is None:
        return None
    await job.log.settle()
    return job.log.view.newest


async def _assignments(
    job: JobContext, restored: LoggedCheckpoint | None
) -> dict[tuple[int, int], SubtaskAssignment]:
    """What each subtask gets: restored state, or fresh splits."""
    plan = job.spec.plan
    manifest = restored.manifest if restored else None
    known = {operator.name for operator in manifest.operators} if manifest else set()
    assignments: dict[tuple[int, int], SubtaskAssignment] = {}
    for vertex in plan.vertices:
        states = assign_state(manifest, plan, vertex) if manifest else None
        finished = finished_subtasks(manifest, vertex) if manifest else frozenset()
        splits = None
        if vertex.head.source is not None and vertex.head.name not in known:
            splits = await _fresh_splits(job, vertex.id)
        for index in range(vertex.parallelism):
            own = None if splits is None else tuple(splits[index :: vertex.parallelism])
            assignments[vertex.id, index] = SubtaskAssignment(
                vertex=vertex.id,
                index=index,
                state=states[index] if states else (),
                splits=own,
                finished=index in finished,
            )
    return assignments


async def _fresh_splits(job: JobContext, vertex_id: int) -> list[bytes]:
    """Cut a source into splits, once in the coordinator's life."""
    if vertex_id not in job.splits:
        vertex = job.spec.plan.vertices[vertex_id]
        source = vertex.head.source
        if source is None:
            raise InternalError(f"vertex has no source vertex=`{vertex.name}`")
        try:
            configured = source.configure(job.options.effective())
            job.splits[vertex_id] = await asyncio.to_thread(configured.splits, vertex.parallelism)
        except HeadgateError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"source `{vertex.head.name}` cannot be cut into splits: "
                f"{type(error).__name__}: {error}",
                where=str(vertex.head.origin),
                detail="".join(traceback.format_exception(error)),
            ) from error
    return job.splits[vertex_id]


def failure_from(error: HeadgateError, where: str) -> Failure:
    """A failure of the coordinator's own making."""
    return Failure(str(error), where, FailureKind.of(error), error)


def failure_of_subtask(message: SubtaskFailed) -> Failure:
    """What a worker reported."""
    try:
        error = pickle.loads(message.error)
    except Exception:
        error = HeadgateError(message.text)
    where = message.task_name
    if message.index >= 0:
        where = f"{where} ({message.index})"
    return Failure(message.text, where, FAILURE_KINDS[message.kind], error, message.detail)


def failure_of_worker(worker_id: str, reason: str) -> Failure:
    """A worker died or went silent."""
    text = f"worker lost: {reason}"
    silent = reason.startswith(SILENT)
    kind = FailureKind.HEARTBEAT_TIMEOUT if silent else FailureKind.WORKER_LOST
    return Failure(text, worker_id, kind, HeadgateError(f"{text} worker=`{worker_id}`"))
