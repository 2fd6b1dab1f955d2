"""State: an attempt failed. Stop what is left of it, and decide whether and when to try again."""

from __future__ import annotations

import asyncio

from ...errors import ExchangeError, JobNotReady
from ..control.messages import Cancel, Cancelled, CheckpointAcked, SubtaskFailed
from ..options.monitoring import CANCELLATION_TIMEOUT
from ..protocol.failure_history import FailureEntry
from ..protocol.joblog import JobStatus
from ..protocol.restart import GiveUp, RestartDecision
from .checkpointing import PublishResult
from .context import ClientWish, Failure, JobContext, JobEvent
from .deploying import failure_of_subtask, failure_of_worker
from .placement import worker_groups
from .states import End, State, deploying, ended, ended_by_wish, ends_at_once
from .workers import FromWorker, WorkerLost

ROOT_CAUSE_S = 0.2
"""How long a broken connection waits for the news that the worker behind it died."""


class Failing(State):
    """From the first failure to the next attempt, or the end."""

    def __init__(
        self, failure: Failure, decision: RestartDecision | None, *, merged: bool, why: str
    ) -> None:
        self._failure = failure
        self._decision = decision
        self._merged = merged
        self._why = why
        self._wish: ClientWish | None = None
        self._also: list[FailureEntry] = []
        """Failures of the same attempt that came after the first."""

    async def run(self, job: JobContext) -> State:
        job.set_status("FAILING")
        job.checkpoints.job_failed()
        if isinstance(self._failure.error, ExchangeError):
            await self._find_root_cause(job)
        if self._decision is None:
            self._failure = job.judge(self._failure)
        job.record(self._failure, merged=self._merged)
        job.restarting = frozenset()
        await self._cancel_all(job)
        await self._settle_publications(job)
        job.failures.cancelled(job.clock.now_ms(), self._also)
        if self._wish is not None:
            return ended_by_wish(self._wish)
        decision = self._decision or job.strategy.on_failure(
            job.steady_clock.now_ms(), recoverable=self._failure.kind.recoverable
        )
        if isinstance(decision, GiveUp):
            job.failures.decided(f"the job failed: {decision.reason}")
            end = End(JobStatus.FAILED, decision.reason, failure=self._failure)
            return ended(end)
        if not self._merged:
            job.count_restart()
        job.pool.prepare(worker_groups(job.plan, job.spec))
        everything = job.executions.failover.everything
        tasks = job.executions.tasks(everything)
        job.restarted_tasks += len(tasks)
        delay_ms = max(0, decision.at_ms - job.steady_clock.now_ms())
        job.set_status("RESTARTING")
        text = f"restart {decision.number} in {delay_ms} ms: {job.executions.describe(everything)}"
        text += f", since {self._why}" if self._why else ""
        job.failures.decided(text, tasks, len(tasks))
        job.publish(
            "restart",
            text,
            number=decision.number,
            delay_ms=delay_ms,
            tasks=len(tasks),
            tasks_total=len(tasks),
        )
        wish = await self._sleep(job, delay_ms / 1000)
        job.failures.waited(job.clock.now_ms())
        return deploying() if wish is None else ended_by_wish(wish)

    async def _find_root_cause(self, job: JobContext) -> None:
        """When a worker dies its peers see their connections break before we see it gone."""
        used = set(job.executions.placement.values())  # a spare has no connections
        try:
            async with asyncio.timeout(ROOT_CAUSE_S):
                while True:
                    event = await job.events.get()
                    if isinstance(event, WorkerLost) and event.worker_id in used:
                        self._failure = failure_of_worker(event.worker_id, event.reason)
                        return
                    self._aside(job, event)
        except TimeoutError:
            pass  # a connection can break all by itself

    async def _cancel_all(self, job: JobContext) -> None:
        """Have every live worker drop the attempt; kill those that do not in time."""
        waiting = set(job.pool.live)
        for worker in job.pool.live.values():
            worker.send(Cancel(attempt=job.attempt))
        try:
            async with asyncio.timeout(job.options.get(CANCELLATION_TIMEOUT) / 1000):
                while waiting:
                    event = await job.events.get()
                    match event:
                        case FromWorker(worker_id, Cancelled(attempt=attempt, regions=None)):
                            if attempt == job.attempt:
                                waiting.discard(worker_id)
                        case WorkerLost(worker_id, _):
                            waiting.discard(worker_id)
                        case _:
                            self._aside(job, event)
        except TimeoutError:
            for worker_id in waiting:
                job.pool.lose(worker_id, "it did not cancel its subtasks in time")

    async def _settle_publications(self, job: JobContext) -> None:
        """A checkpoint being published may complete yet: wait, for it decides what is restored."""
        while job.checkpoints.publishing:
            self._aside(job, await job.events.get())

    def _aside(self, job: JobContext, event: JobEvent) -> None:
        match event:
            case PublishResult():
                job.checkpoints.publish_result(event)
            case FromWorker(_, CheckpointAcked() as late):
                # Its files belong to nothing any more.
                if job.executions.is_current(late):
                    job.checkpoints.acked(late)
            case FromWorker(worker_id, SubtaskFailed() as also):
                if job.executions.is_current(also):
                    self._also.append(job.entry(failure_of_subtask(also, worker_id)))
            case ClientWish() as wish if self._wish is None and ends_at_once(wish):
                self._wish = wish
            case ClientWish() as wish:
                wish.refuse(JobNotReady("the job is restarting", fix="try again in a moment"))
            case _:
                pass  # what subtasks of the failed attempt still say does not matter

    async def _sleep(self, job: JobContext, delay_s: float) -> ClientWish | None:
        try:
            async with asyncio.timeout(delay_s):
                while self._wish is None:
                    self._aside(job, await job.events.get())
        except TimeoutError:
            pass
        return self._wish
