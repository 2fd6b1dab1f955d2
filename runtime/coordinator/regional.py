"""Some regions of a job restart while the others run (features.md 3.13, REC-05, REC-12).

What goes on beside `Running`: the regions are cancelled on all workers; then the pause of the restart
strategy passes, and what is being published is settled, for it decides what is restored; then they are
deployed again. A further failure meanwhile, of these regions or of others, begins this anew for all that
are down: they are one restart. Each such beginning has an attempt number of its own, so that answers to
an earlier one are not taken for answers to this.

No checkpoint is taken meanwhile, since a checkpoint is of all subtasks; `Running` sees to that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from ...errors import ExchangeError, HeadgateError, InternalError
from ..control.messages import Cancel, Cancelled, CheckpointAcked, Deployed, Messages, SubtaskFailed
from ..options.monitoring import CANCELLATION_TIMEOUT
from ..protocol.failover import RegionId
from ..protocol.failure_history import RestoreFigures
from ..protocol.failures import as_headgate_error
from ..protocol.ids import SubtaskId
from ..protocol.restart import GiveUp, Restart, RestartDecision
from .adopting import log_parts
from .context import Failure, JobContext, RegionsReady, Suspected
from .deploying import deploy_regions, failure_of_subtask, fallback_of, publish_restored
from .failing import ROOT_CAUSE_S
from .placement import worker_groups
from .restored import find_restored
from .states import State, failing
from .workers import Worker


@dataclass(frozen=True, slots=True)
class Decided:
    """A restart of some regions.

    Attributes:
        failure: why.
        regions: which ones.
        decision: when.
        merged: it goes on with a restart that is under way for another failure.
    """

    failure: Failure
    regions: frozenset[RegionId]
    decision: Restart
    merged: bool


class RegionalRestart:
    """The regions that are down, and the task that brings them back."""

    def __init__(self) -> None:
        self._decision: RestartDecision | None = None
        self._task: asyncio.Task[list[Worker]] | None = None
        self._waiting: set[str] = set()
        """Workers whose answer is due."""
        self._news: Final = asyncio.Event()

    # -- failures -----------------------------------------------------------------------------------

    def decide(
        self, job: JobContext, failure: Failure, regions: frozenset[RegionId], whole: str
    ) -> Decided | State:
        """Which regions restart, those that do already among them; the next state if all of the job does.

        Args:
            job: whose.
            failure: what happened.
            regions: where it happened.
            whole: why all of the job has to restart; empty: it does not.
        """
        everything = job.executions.failover.everything
        needed = job.executions.failover.restart(regions | job.restarting)
        whole = whole or _cut_anew(job, needed)
        all_of_it = bool(whole) or needed == everything
        if all_of_it and not job.restarting:
            return failing(failure, why=whole if len(everything) > 1 else "")
        failure = job.judge(failure)
        decision = self._decide(job, failure)
        merged = bool(job.restarting) and decision is self._decision
        if all_of_it or isinstance(decision, GiveUp) or not failure.kind.recoverable:
            return failing(failure, decision, merged=merged, why=whole)
        return Decided(failure, needed, decision, merged)

    def _decide(self, job: JobContext, failure: Failure) -> RestartDecision:
        recoverable = failure.kind.recoverable
        decision = job.strategy.on_failure(job.steady_clock.now_ms(), recoverable=recoverable)
        if not recoverable and (fallback := fallback_of(job, failure)) is not None:
            job.publish("fallback", fallback)
            return Restart(job.steady_clock.now_ms(), job.restarts + 1)
        return decision

    def begin(self, job: JobContext, decided: Decided) -> None:
        """Restart these regions, from the beginning."""
        job.record(decided.failure, merged=decided.merged)
        if not decided.merged:
            job.count_restart()
        self._decision = decided.decision
        job.deployment_events = None
        if self._task is not None:
            self._task.cancel()
        new = job.executions.failover.subtasks_of(decided.regions - job.restarting)
        job.restarted_tasks += len(new)
        job.restarting = decided.regions
        attempt = job.next_attempt_of(decided.regions)
        job.pool.prepare(worker_groups(job.plan, job.spec))
        self._announce(job, decided.decision)
        self._task = asyncio.get_running_loop().create_task(
            self._restart(job, decided.decision.at_ms), name="restart regions"
        )
        ready = RegionsReady(attempt)
        self._task.add_done_callback(lambda _: job.events.put_nowait(ready))

    def _announce(self, job: JobContext, decision: Restart) -> None:
        executions, delay_ms = job.executions, max(0, decision.at_ms - job.steady_clock.now_ms())
        everyone = len(executions.placement)
        tasks = executions.tasks(job.restarting)
        what = executions.describe(job.restarting)
        text = f"restart {decision.number} in {delay_ms} ms: {what}"
        job.failures.decided(text, tasks, everyone)
        job.set_status("RESTARTING")
        job.publish(
            "restart",
            text,
            number=decision.number,
            delay_ms=delay_ms,
            tasks=len(tasks),
            tasks_total=everyone,
        )

    # -- what is heard meanwhile --------------------------------------------------------------------

    def answered(self, job: JobContext, worker_id: str, message: Messages) -> None:
        """A worker has cancelled, or deployed, what it was told to in this attempt."""
        if isinstance(message, Cancelled | Deployed) and message.attempt == job.attempt:
            if isinstance(message, Deployed):
                job.figures.add(
                    message.fetching_ms,
                    message.opening_ms,
                    message.local_bytes,
                    message.read_bytes,
                )
            self.heard_of(worker_id)

    def late(self, job: JobContext, message: Messages, worker_id: str, since: int) -> None:
        """Something of an attempt that is over has no effect, but for files that nobody needs.

        Args:
            job: whose.
            message: what it is.
            worker_id: who said it.
            since: the attempt with which all of the job began last.
        """
        job.late_messages += 1
        if isinstance(message, CheckpointAcked) and message.attempt >= since:
            job.checkpoints.acked(message)
        elif isinstance(message, SubtaskFailed) and job.restarting:
            job.failures.also(job.entry(failure_of_subtask(message, worker_id)))

    def heard_of(self, worker_id: str = "") -> None:
        """No answer of this worker is due any more; or something was published."""
        self._waiting.discard(worker_id)
        self._news.set()

    # -- the restart --------------------------------------------------------------------------------

    async def _restart(self, job: JobContext, at_ms: int) -> list[Worker]:
        """Returns all workers of the job.

        Raises:
            HeadgateError: there is no room for a worker, or nothing that can be restored.
        """
        await self._cancel(job)
        while job.checkpoints.publishing:
            await self._next_news()
        job.failures.cancelled(job.clock.now_ms())
        await log_parts(job)
        await asyncio.sleep(max(0, at_ms - job.steady_clock.now_ms()) / 1000)
        job.failures.waited(job.clock.now_ms())
        job.restoring.clear()
        job.deployment_events = 0
        job.figures = RestoreFigures()
        restored = await find_restored(job)
        workers = await self._staff(job)
        job.restored = restored
        self._waiting = set(
            await deploy_regions(job, restored, workers, job.restarting, partial=True)
        )
        while self._waiting:
            await self._next_news()
        return workers

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _cancel(self, job: JobContext) -> None:
        """Have every live worker drop the regions; kill those that do not in time."""
        self._waiting = set(job.pool.live)
        for worker in job.pool.live.values():
            worker.send(Cancel(attempt=job.attempt, regions=tuple(sorted(job.restarting))))
        try:
            async with asyncio.timeout(job.options.get(CANCELLATION_TIMEOUT) / 1000):
                while self._waiting:
                    await self._next_news()
        except TimeoutError:
            for worker_id in self._waiting:
                job.pool.lose(worker_id, "it did not cancel its subtasks in time")

    async def _staff(self, job: JobContext) -> list[Worker]:
        """The workers of all slots, others in the place of those that are gone."""
        executions, live = job.executions, job.pool.live
        asked = job.clock.monotonic()
        groups = worker_groups(job.plan, job.spec)
        await job.pool.ensure(groups)
        job.figures.workers_ms = round(1000 * (job.clock.monotonic() - asked))
        gone = [worker_id for worker_id in executions.slots if worker_id not in live]
        if any(executions.regions_on(worker_id) - job.restarting for worker_id in gone):
            # Its loss is still in the queue of events: it takes further regions along, and begins anew.
            await asyncio.get_running_loop().create_future()
        hosts = {worker_id: live[worker_id].host_id for worker_id in sorted(live)}
        own = {worker_id: worker.group for worker_id, worker in live.items()}
        slots = job.seats.order(hosts, own, groups)
        executions.place(slots, job.spec)
        workers = [live[worker_id] for worker_id in slots]
        job.pool.retire(workers)
        return workers

    def ready(self, job: JobContext) -> list[Worker]:
        """All workers of the job, once the regions are deployed; they are not down any more.

        Raises:
            HeadgateError: why they could not be deployed.
        """
        task = self._task
        if task is None or task.cancelled():
            raise InternalError("regions are ready that nobody restarts")
        try:
            workers = task.result()
        except HeadgateError:
            raise
        except Exception as error:
            raise as_headgate_error(error, "the deployment failed") from error
        self._task = None
        job.restarting, job.deployment_events = frozenset(), None
        publish_restored(job)
        return workers

    async def close(self, job: JobContext) -> None:
        """The attempt is over, for all of the job."""
        task, self._task = self._task, None
        job.restarting, job.deployment_events = frozenset(), None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _cut_anew(job: JobContext, regions: frozenset[RegionId]) -> str:
    """Why these regions cannot restart beside others: nobody knows any more what their sources read.

    That is so from a takeover until the first checkpoint. Another cut need not be the one that the
    others go on with: some splits would be read twice, and others not at all.
    """
    known = set(job.splits)
    if job.restored is not None:
        known.update(operator.name for operator in job.restored.manifest.operators)
    if job.log is not None and (newest := job.log.view.newest) is not None:
        known.update(operator.name for operator in newest.manifest.operators)
    vertices = {subtask.vertex for subtask in job.executions.failover.subtasks_of(regions)}
    heads = (vertex.head for vertex in job.plan.vertices if vertex.id in vertices)
    unknown = [head.name for head in heads if head.source is not None and head.name not in known]
    return f"source `{unknown[0]}` has to be cut into splits anew" if unknown else ""


def regions_of(job: JobContext, message: SubtaskFailed) -> frozenset[RegionId]:
    """Where a failure happened that a worker has reported; empty if that attempt is over."""
    current = job.executions.regions_of(message.attempt)
    if message.vertex >= 0:
        own = job.executions.failover.region_of(SubtaskId(message.vertex, message.index))
        return current & {own}
    return current if message.region < 0 else current & {RegionId(message.region)}


def suspect(job: JobContext, message: SubtaskFailed, worker_id: str) -> bool:
    """True if a failure may be the consequence of another, which is waited for: a broken connection."""
    failure = failure_of_subtask(message, worker_id)
    if not isinstance(failure.error, ExchangeError):
        return False
    suspected = Suspected(failure, message.attempt, regions_of(job, message))
    asyncio.get_running_loop().call_later(ROOT_CAUSE_S, job.events.put_nowait, suspected)
    return True
