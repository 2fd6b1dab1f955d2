"""State: a new coordinator finds out what runs, and goes on with it if it is the complete attempt.

Workers process records even while they have no coordinator. A coordinator that takes over knows their
ids from the job log. It adopts the attempt as it is, or stops it everywhere and deploys the next one.
`protocol/adoption.py` decides between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import final

from ...api.resources import DEFAULT_GROUP
from ...errors import FencedError, HeadgateError, JobNotReady, StorageError
from ..control.messages import (
    Inventory,
    SubtaskFailed,
    SubtaskFinished,
)
from ..plan import PhysicalPlan
from ..protocol.adoption import Adopted, Refused, WorkerReport, decide, refusal_by_log
from ..protocol.ids import SubtaskId
from ..protocol.joblog import DeploymentRecord
from ..slots import worker_groups
from .context import JobContext, ToDeploying, ToRunning, Transition, end_by, ends_at_once
from .environment import (
    ClientCommand,
    DeploymentPrepared,
    FromWorker,
    JobEnvironment,
    JobEvent,
    WorkerLost,
)
from .workers import LiveWorker

REPORT_TIMEOUT_S = 10.0
"""A worker that is connected and has not reported by then what it runs counts as lost: it may hang in
a cancellation."""


@final
class Adopting:
    """The state from the start of a generation until it is clear whether the attempt goes on."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._env = job.env
        self._attempt = job.attempt
        self._reports: dict[str, WorkerReport] = {}
        self._lost: dict[str, str] = {}
        self._kept: list[JobEvent] = []
        """Events for the state that goes on with the attempt."""

    async def run(self) -> Transition:
        self._job.set_status("RECONCILING")
        command, verdict = await self._judge()
        if command is not None:
            return end_by(command)
        if isinstance(verdict, Refused):
            await _confirm(self._env)  # a worker that obeys another coordinator is not gone
            self._env.publish(
                "adopted",
                f"generation {self._env.generation} takes over and restarts the job: {verdict.reason}",
                adopted=False,
                reason=verdict.reason,
            )
            await self._job.pool.close()  # nothing of the old attempt may run beside the next
            return ToDeploying()
        self._job.lifecycle.adopted_after_ms = verdict.orphaned_ms
        for event in self._kept:
            self._env.events.put_nowait(event)
        self._env.publish(
            "adopted",
            f"generation {self._env.generation} takes over and goes on with attempt "
            f"{self._attempt.number}; its workers were without a coordinator for {verdict.orphaned_ms} ms",
            adopted=True,
            orphaned_ms=verdict.orphaned_ms,
            generation=self._env.generation,
            attempt=self._attempt.number,
            workers=self._job.pool.describe(),
        )
        log = self._env.log
        newest = log.view.newest if log is not None else None
        if newest is not None and newest.checkpoint_id == verdict.base:
            self._job.commits.begin(newest.manifest)
        workers = list(self._job.pool.live.values())
        self._job.warm_spares()
        self._job.pool.retire(workers)  # none leaves; spares are started again
        return ToRunning(workers, verdict)

    async def _judge(self) -> tuple[ClientCommand | None, Adopted | Refused]:
        log = self._env.log
        deployment = log.view.deployment if log is not None else None
        if log is None or deployment is None:
            return None, Refused("the log has no deployment")
        try:
            self._attempt.use(self._plan_of(deployment), deployment.parallelism)
        except HeadgateError as error:
            return None, Refused(str(error))
        groups = worker_groups(self._attempt.plan, self._env.spec)
        fits = len(groups) == len(deployment.workers)
        # The workers of another plan are looked for as well: nothing else would end them.
        groups = groups if fits else [DEFAULT_GROUP] * len(deployment.workers)
        own = dict(zip(deployment.workers, groups, strict=True))
        found = asyncio.get_running_loop().create_task(
            self._job.pool.find(own), name="find workers"
        )
        silent = asyncio.get_running_loop().create_task(
            self._lose_silent(found), name="lose silent workers"
        )
        try:
            command = await self._hear(found)
        finally:
            found.cancel()
            silent.cancel()
            await asyncio.gather(found, silent, return_exceptions=True)
        if command is not None:
            return command, Refused("a client wants it to end")
        plan = self._attempt.plan
        refusal = "it has loops" if plan.loops else ""
        refusal = refusal or ("" if fits else "its workers had another number of slots")
        refusal = refusal or refusal_by_log(log.view, self._env.spec.run, plan.fingerprint())
        if refusal:
            return None, Refused(refusal)
        subtasks = [(v.id, index) for v in plan.vertices for index in range(v.parallelism)]
        live = {id_: report for id_, report in self._reports.items() if id_ in self._job.pool.live}
        verdict = decide(log.view, subtasks, live)
        if isinstance(verdict, Adopted):
            if not self._is_in_place(own, live):
                return None, Refused("the subtasks run on other workers than they should")
            self._attempt.adopt(deployment.attempt)
            # Half-written files of future checkpoints would look like those of old ones.
            await self._job.checkpoints.swept()
        return None, verdict

    async def _hear(self, found: asyncio.Task[list[LiveWorker]]) -> ClientCommand | None:
        """Wait until all workers that were found have reported, or are lost.

        Return the command that ends the job, if there was one. The wait is the same in that case,
        because a worker that is not found, or does not answer, would go on by itself.
        """
        end: ClientCommand | None = None
        done = DeploymentPrepared(0)  # it only wakes this method
        found.add_done_callback(lambda _: self._env.events.put_nowait(done))
        while not (found.done() and self._all_reported(found.result())):
            event = await self._env.events.get()
            match event:
                case FromWorker(worker_id, Inventory(report=report)):
                    self._reports[worker_id] = report
                case FromWorker(_, SubtaskFailed() | SubtaskFinished()):
                    self._kept.append(event)
                case WorkerLost(worker_id, reason):
                    self._lost[worker_id] = reason
                    self._kept.append(event)
                case ClientCommand() as command if end is None and ends_at_once(command):
                    end = command
                case ClientCommand() as command:
                    command.refuse(
                        JobNotReady("the job has a new coordinator", fix="try again in a moment")
                    )
        return end

    async def _lose_silent(self, found: asyncio.Task[list[LiveWorker]]) -> None:
        workers = await found
        await asyncio.sleep(REPORT_TIMEOUT_S)
        for worker in workers:
            if worker.worker_id not in self._reports:
                self._job.pool.lose(worker.worker_id, "it did not say what it runs")

    def _is_in_place(self, own: Mapping[str, str], reports: Mapping[str, WorkerReport]) -> bool:
        """Take the workers as they are; return False unless each subtask is where it should be."""
        hosts = {id_: self._job.pool.live[id_].host_id for id_ in own}
        # No worker had any slots before: all stay as they are.
        workers = self._job.affinity.order(hosts, own, list(own.values()))
        self._attempt.executions.place(workers, self._env.spec)
        found = {
            SubtaskId(*subtask): id_
            for id_, report in reports.items()
            for subtask in report.subtasks
        }
        return found == self._attempt.executions.placement

    def _all_reported(self, workers: list[LiveWorker]) -> bool:
        return all(w.worker_id in self._reports or w.worker_id in self._lost for w in workers)

    def _plan_of(self, deployment: DeploymentRecord) -> PhysicalPlan:
        """Return the plan of the job at the parallelism of a deployment.

        Raises:
            PlanError: the job cannot run at that parallelism.
        """
        plan = self._attempt.plan
        same = deployment.parallelism == self._attempt.parallelism
        if same and deployment.max_parallelism == plan.max_parallelism:
            return plan
        return self._env.spec.replan(deployment.parallelism, deployment.max_parallelism)


async def _confirm(env: JobEnvironment) -> None:
    """Check in the log, if it can be read, that this coordinator leads.

    Raises:
        FencedError: another coordinator leads.
    """
    if env.log is None:
        return
    try:
        await env.log.confirm()
    except FencedError:
        raise
    except StorageError:
        pass  # a coordinator that does not lead cannot deploy either
