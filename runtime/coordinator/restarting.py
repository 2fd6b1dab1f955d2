"""States between two attempts: one failed, or stopped to go on at another parallelism."""

from __future__ import annotations

import asyncio
from typing import final

from ...errors import ExchangeError, HeadgateError, JobNotReady
from ..control.messages import Cancel, Cancelled, CheckpointAcked, SubtaskFailed
from ..options.monitoring import CANCELLATION_TIMEOUT
from ..protocol.failure_history import FailureEntry
from ..protocol.joblog import JobStatus
from ..protocol.restart import GiveUp
from ..slots import worker_groups
from .context import EndOfJob, JobContext, ToDeploying, ToFailing, Transition, end_by, ends_at_once
from .environment import ClientCommand, FromWorker, JobEvent, PublishResult, WorkerLost
from .failures import ROOT_CAUSE_S, failure_of_subtask, failure_of_worker
from .reporting import announce_restart


@final
class Failing:
    """The state from the first failure to the next attempt, or the end.

    What is left of the attempt is stopped, and the restart strategy decides whether and when the next
    one begins.
    """

    def __init__(self, job: JobContext, cause: ToFailing) -> None:
        self._job = job
        self._env = job.env
        self._attempt = job.attempt
        self._failure = cause.failure
        self._decision = cause.decision
        self._merged = cause.merged
        self._why = cause.why
        self._command: ClientCommand | None = None
        """The command that ends the job, or this coordinator, once all has stopped."""
        self._also: list[FailureEntry] = []
        """Failures of the same attempt that came after the first."""

    async def run(self) -> Transition:
        job, history = self._job, self._job.failures.history
        job.set_status("FAILING")
        job.checkpoints.job_failed()
        if isinstance(self._failure.error, ExchangeError):
            await self._find_root_cause()
        if self._decision is None:
            self._failure = job.checked(self._failure)
        job.record(self._failure, merged=self._merged)
        self._attempt.restarting = frozenset()
        await self._cancel_all()
        await self._settle_publications()
        history.cancelled(self._env.clock.now_ms(), self._also)
        if self._command is not None:
            return end_by(self._command)
        decision = self._decision or job.failures.strategy.on_failure(
            self._env.steady_clock.now_ms(), recoverable=self._failure.kind.recoverable
        )
        if isinstance(decision, GiveUp):
            history.decided(f"the job failed: {decision.reason}")
            return EndOfJob(JobStatus.FAILED, decision.reason, failure=self._failure)
        if not self._merged:
            job.count_restart()
        job.pool.prepare(worker_groups(self._attempt.plan, self._env.spec))
        everything = self._attempt.executions.failover.everything
        delay_ms, tasks = announce_restart(job, decision, everything, self._why)
        job.lifecycle.restarted_tasks += tasks
        await self._sleep(delay_ms / 1000)
        history.waited(self._env.clock.now_ms())
        return ToDeploying() if self._command is None else end_by(self._command)

    async def _find_root_cause(self) -> None:
        """Wait a moment for the loss of a worker: its peers see their connections break before that."""
        used = set(self._attempt.executions.placement.values())  # a spare has no connections
        try:
            async with asyncio.timeout(ROOT_CAUSE_S):
                while True:
                    event = await self._env.events.get()
                    if isinstance(event, WorkerLost) and event.worker_id in used:
                        self._failure = failure_of_worker(event.worker_id, event.reason)
                        return
                    self._handle(event)
        except TimeoutError:
            pass  # a connection can break without another failure

    async def _cancel_all(self) -> None:
        """Cancel the attempt on every live worker; kill workers that do not answer in time."""
        pool, attempt = self._job.pool, self._attempt.number
        waiting = set(pool.live)
        for worker in pool.live.values():
            worker.send(Cancel(attempt=attempt))
        try:
            async with asyncio.timeout(self._env.options.get(CANCELLATION_TIMEOUT) / 1000):
                while waiting:
                    event = await self._env.events.get()
                    match event:
                        case FromWorker(worker_id, Cancelled(attempt=number, regions=None)):
                            if number == attempt:
                                waiting.discard(worker_id)
                        case WorkerLost(worker_id, _):
                            waiting.discard(worker_id)
                        case _:
                            self._handle(event)
        except TimeoutError:
            for worker_id in waiting:
                pool.lose(worker_id, "it did not cancel its subtasks in time")

    async def _settle_publications(self) -> None:
        """Wait for checkpoints that are being published: they decide what is restored."""
        while self._job.checkpoints.publishing:
            self._handle(await self._env.events.get())

    def _handle(self, event: JobEvent) -> None:
        job = self._job
        match event:
            case PublishResult():
                job.checkpoints.publish_result(event)
            case FromWorker(_, CheckpointAcked() as late):
                # No checkpoint will need its files.
                if self._attempt.executions.is_current(late):
                    job.checkpoints.acked(late)
            case FromWorker(worker_id, SubtaskFailed() as also):
                if self._attempt.executions.is_current(also):
                    failure = failure_of_subtask(also, worker_id)
                    self._also.append(failure.entry(self._env.clock.now_ms()))
            case ClientCommand() as command if self._command is None and ends_at_once(command):
                self._command = command
            case ClientCommand() as command:
                command.refuse(JobNotReady("the job is restarting", fix="try again in a moment"))
            case _:
                pass  # other messages of the failed attempt do not matter

    async def _sleep(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                while self._command is None:
                    self._handle(await self._env.events.get())
        except TimeoutError:
            pass


@final
class Rescaling:
    """The state between two attempts of different parallelism.

    The job stopped with a checkpoint, and all subtasks have committed and left. The log entry of that
    checkpoint has the new parallelism. So nothing is lost if this coordinator dies now.
    """

    def __init__(self, job: JobContext) -> None:
        self._job = job

    async def run(self) -> Transition:
        job = self._job
        job.set_status("RESTARTING")
        job.checkpoints.job_failed()  # the attempt is over, although nothing failed
        end: ClientCommand | None = None
        while job.checkpoints.publishing:
            match await job.env.events.get():
                case PublishResult() as result:
                    job.checkpoints.publish_result(result)
                case ClientCommand() as command if end is None and ends_at_once(command):
                    end = command
                case ClientCommand() as command:
                    command.refuse(HeadgateError("the job is being rescaled", fix="try again soon"))
        return ToDeploying() if end is None else end_by(end)
