"""State: a new coordinator asks for what runs, and goes on with it if it is all that there should be.

Workers go on with records while they have no coordinator. One that takes over has their ids from the job
log. It adopts the attempt as it is, or has it dropped everywhere and deploys the next one. Why it does what
is decided in `protocol/adoption.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from ...api.resources import DEFAULT_GROUP
from ...errors import FencedError, HeadgateError, JobNotReady, StorageError
from ..control.messages import (
    Adopt,
    CheckpointAborted,
    CheckpointCompleted,
    Inventory,
    SubtaskFailed,
    SubtaskFinished,
)
from ..options.recovery import ORPHANED_MAX
from ..plan import PhysicalPlan
from ..protocol.adoption import Adopted, Refused, WorkerReport, decide, refusal_by_log
from ..protocol.ids import SubtaskId
from ..protocol.joblog import Deployment
from .context import ClientWish, JobContext, JobEvent, Prepared
from .placement import worker_groups
from .restore import continues
from .states import State, deploying, ended_by_wish, ends_at_once, running
from .workers import FromWorker, Worker, WorkerLost

REPORT_TIMEOUT_S = 10.0
"""A worker that has greeted and not said by then what it runs is lost: it may hang in a cancellation."""


class Adopting(State):
    """From the start of a generation until it is clear whether the attempt goes on."""

    def __init__(self) -> None:
        self._reports: dict[str, WorkerReport] = {}
        self._lost: dict[str, str] = {}
        self._kept: list[JobEvent] = []
        """For the state that goes on with the attempt."""

    async def run(self, job: JobContext) -> State:
        job.set_status("RECONCILING")
        wish, verdict = await self._judge(job)
        if wish is not None:
            return ended_by_wish(wish)
        if isinstance(verdict, Refused):
            await _confirm(job)  # a worker that obeys another coordinator is not gone
            job.publish(
                "adopted",
                f"generation {job.generation} takes over and restarts the job: {verdict.reason}",
                adopted=False,
                reason=verdict.reason,
            )
            await job.pool.close()  # nothing of the old attempt may run beside the next
            return deploying()
        job.adopted_after_ms = verdict.orphaned_ms
        for event in self._kept:
            job.events.put_nowait(event)
        job.publish(
            "adopted",
            f"generation {job.generation} takes over and goes on with attempt {job.attempt}; "
            f"its workers were without a coordinator for {verdict.orphaned_ms} ms",
            adopted=True,
            orphaned_ms=verdict.orphaned_ms,
            generation=job.generation,
            attempt=job.attempt,
            workers=job.pool.describe(),
        )
        workers = list(job.pool.live.values())
        job.warm_spares()
        job.pool.retire(workers)  # none goes; spares are started anew
        return running(workers, verdict)

    async def _judge(self, job: JobContext) -> tuple[ClientWish | None, Adopted | Refused]:
        log = job.log
        deployment = log.view.deployment if log is not None else None
        if log is None or deployment is None:
            return None, Refused("the log has no deployment")
        try:
            job.adopt(plan_of(job, deployment), deployment.parallelism)
        except HeadgateError as error:
            return None, Refused(str(error))
        groups = worker_groups(job.plan, job.spec)
        fits = len(groups) == len(deployment.workers)
        # Those of another plan are looked for as well: nobody else would end them.
        groups = groups if fits else [DEFAULT_GROUP] * len(deployment.workers)
        own = dict(zip(deployment.workers, groups, strict=True))
        found = asyncio.get_running_loop().create_task(job.pool.find(own), name="find workers")
        silent = asyncio.get_running_loop().create_task(
            self._lose_silent(job, found), name="lose silent workers"
        )
        try:
            wish = await self._hear(job, found)
        finally:
            found.cancel()
            silent.cancel()
            await asyncio.gather(found, silent, return_exceptions=True)
        if wish is not None:
            return wish, Refused("a client wants it to end")
        plan = job.plan
        refusal = "it has loops" if plan.loops else ""
        refusal = refusal or ("" if fits else "its workers had another number of slots")
        refusal = refusal or refusal_by_log(log.view, job.spec.run, plan.fingerprint())
        if refusal:
            return None, Refused(refusal)
        subtasks = [(v.id, index) for v in plan.vertices for index in range(v.parallelism)]
        live = {id_: report for id_, report in self._reports.items() if id_ in job.pool.live}
        verdict = decide(log.view, subtasks, live)
        if isinstance(verdict, Adopted):
            if not self._is_in_place(job, own, live):
                return None, Refused("the subtasks run on other workers than they should")
            job.attempt = deployment.attempt
            job.executions.begin(job.executions.failover.everything, deployment.attempt)
            # Half written files of checkpoints to come would look like those of old ones.
            await job.checkpoints.swept()
        return None, verdict

    async def _hear(self, job: JobContext, found: asyncio.Task[list[Worker]]) -> ClientWish | None:
        """Until all workers that were found have reported, or are lost; returns how it is to end.

        Also if it is to end: a worker that is not found, or does not answer, would work on by itself.
        """
        end: ClientWish | None = None
        done = Prepared(0)  # only to wake us
        found.add_done_callback(lambda _: job.events.put_nowait(done))
        while not (found.done() and self._all_reported(found.result())):
            event = await job.events.get()
            match event:
                case FromWorker(worker_id, Inventory(report=report)):
                    self._reports[worker_id] = report
                case FromWorker(_, SubtaskFailed() | SubtaskFinished()):
                    self._kept.append(event)
                case WorkerLost(worker_id, reason):
                    self._lost[worker_id] = reason
                    self._kept.append(event)
                case ClientWish() as wish if end is None and ends_at_once(wish):
                    end = wish
                case ClientWish() as wish:
                    wish.refuse(
                        JobNotReady("the job has a new coordinator", fix="try again in a moment")
                    )
        return end

    async def _lose_silent(self, job: JobContext, found: asyncio.Task[list[Worker]]) -> None:
        workers = await found
        await asyncio.sleep(REPORT_TIMEOUT_S)
        for worker in workers:
            if worker.worker_id not in self._reports:
                job.pool.lose(worker.worker_id, "it did not say what it runs")

    def _is_in_place(
        self, job: JobContext, own: Mapping[str, str], reports: Mapping[str, WorkerReport]
    ) -> bool:
        """Take the workers as they are; False if not each subtask is where they say."""
        hosts = {id_: job.pool.live[id_].host_id for id_ in own}
        # Nobody sits anywhere yet: all stay as they are.
        workers = job.seats.order(hosts, own, list(own.values()))
        job.executions.place(workers, job.spec)
        found = {
            SubtaskId(*subtask): id_
            for id_, report in reports.items()
            for subtask in report.subtasks
        }
        return found == job.executions.placement

    def _all_reported(self, workers: list[Worker]) -> bool:
        return all(w.worker_id in self._reports or w.worker_id in self._lost for w in workers)


async def _confirm(job: JobContext) -> None:
    """Look into the log, if it can be read, who leads.

    Raises:
        FencedError: another coordinator does.
    """
    if job.log is None:
        return
    try:
        await job.log.confirm()
    except FencedError:
        raise
    except StorageError:
        pass  # who does not lead cannot deploy either


def plan_of(job: JobContext, deployment: Deployment) -> PhysicalPlan:
    """The plan of the job at the parallelism of a deployment.

    Raises:
        PlanError: it cannot run at that.
    """
    plan = job.plan
    same = deployment.parallelism == job.parallelism
    if same and deployment.max_parallelism == plan.max_parallelism:
        return plan
    return job.spec.replan(deployment.parallelism, deployment.max_parallelism)


def go_on(job: JobContext, workers: list[Worker], adopted: Adopted) -> None:
    """Tell the workers of an adopted attempt who leads now, and what became of its checkpoints."""
    for worker in workers:
        worker.send(Adopt(attempt=job.attempt))
        if adopted.completed:
            worker.send(
                CheckpointCompleted(
                    attempt=job.attempt,
                    checkpoint_id=adopted.completed,
                    generation=job.generation,
                )
            )
        for checkpoint_id in adopted.aborted:
            worker.send(CheckpointAborted(attempt=job.attempt, checkpoint_id=checkpoint_id))


def ids_before(job: JobContext, adopted: Adopted | None) -> tuple[int, int]:
    """The checkpoints before those of an attempt that begins, or is adopted.

    Returns:
        No id up to this one may be used again; and what the next checkpoint may build on; 0: nothing.
    """
    if adopted is None:
        restored, used = job.restored, job.restored_checkpoint
        own = restored.manifest if restored is not None and restored.own else None
        return used, used if own is not None and continues(own, job.plan) else 0
    newest = job.log.view.newest if job.log is not None else None
    if newest is None or newest.checkpoint_id != adopted.base:
        return adopted.last_checkpoint, 0
    base = adopted.base if continues(newest.manifest, job.plan) else 0
    return adopted.last_checkpoint, base


async def log_parts(job: JobContext) -> None:
    """Write down that some regions restart: a successor that knows of the deployment restarts it all.

    Only to say why. Should it not get there: all workers know it too, and do not wait for a successor.

    Raises:
        FencedError: a newer coordinator leads; nothing may begin.
    """
    deployment = job.log.view.deployment if job.log is not None else None
    if job.log is None or deployment is None or deployment.in_parts:
        return
    try:
        await job.log.deploy(msgspec.structs.replace(deployment, in_parts=True))
    except FencedError:
        raise
    except StorageError as error:
        job.publish("unlogged", f"the log does not have the restart of regions: {error}")


async def log_deployment(job: JobContext, workers: list[Worker]) -> int:
    """Write down what is about to run; returns for how many ms it may go on without a coordinator.

    If that fails the attempt runs all the same, but no successor will know of it.

    Raises:
        FencedError: a newer coordinator leads; nothing may begin.
    """
    orphaned_ms = job.options.get(ORPHANED_MAX)
    if job.log is None or not orphaned_ms or job.plan.loops:
        return 0
    deployment = Deployment(
        attempt=job.attempt,
        workers=tuple(worker.worker_id for worker in workers),
        plan=job.plan.fingerprint(),
        parallelism=job.parallelism,
        max_parallelism=job.plan.max_parallelism,
        restored_checkpoint=job.restored_checkpoint,
    )
    try:
        await job.log.deploy(deployment)
    except FencedError:
        raise
    except StorageError as error:
        job.publish("unlogged", f"a takeover would restart attempt {job.attempt}: {error}")
        return 0
    return orphaned_ms
