"""Some regions of a job restart while the others run.

This happens beside the state `Running`. The regions are cancelled on all workers. Then the pause of the
restart strategy passes, and checkpoints that are being published are settled, because they decide what is
restored. Then the regions are deployed again. A further failure meanwhile, of these regions or of others,
begins this again for all regions that are down: they are one restart. Each begin has an attempt number of
its own, so that answers to an earlier one are not taken for answers to this one.

Meanwhile no checkpoint is taken, since a checkpoint includes all subtasks; `Running` ensures that.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

import msgspec

from ...errors import ExchangeError, HeadgateError, InternalError
from ..control.messages import Cancel, Cancelled, CheckpointAcked, Deployed, Messages, SubtaskFailed
from ..options.monitoring import CANCELLATION_TIMEOUT
from ..protocol.failover import RegionId
from ..protocol.failures import as_headgate_error
from ..protocol.ids import SubtaskId
from ..protocol.restart import GiveUp, Restart, RestartDecision
from ..slots import worker_groups
from .context import JobContext, ToFailing
from .deploying import choose_workers, deploy_regions, ensure_workers
from .environment import RegionsReady, Suspected
from .failures import ROOT_CAUSE_S, Failure, failure_of_subtask
from .reporting import announce_restart, report_restored
from .workers import LiveWorker


@final
class RegionsToRestart(msgspec.Struct, frozen=True):
    """A decision: some regions restart.

    Attributes:
        failure: the failure they restart for.
        regions: the regions, including those that restart already.
        decision: when they restart.
        merged: this continues a restart that is under way for another failure.
    """

    failure: Failure
    regions: frozenset[RegionId]
    decision: Restart
    merged: bool


@final
class RegionalRestart:
    """The regions that are down, and the task that restarts them."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._env = job.env
        self._attempt = job.attempt
        self._decision: RestartDecision | None = None
        self._task: asyncio.Task[list[LiveWorker]] | None = None
        self._waiting: set[str] = set()
        """The workers whose answers are due."""
        self._news: Final = asyncio.Event()

    # -- failures -----------------------------------------------------------------------------------

    def decide(
        self, failure: Failure, regions: frozenset[RegionId], whole: str
    ) -> RegionsToRestart | ToFailing:
        """Decide whether some regions restart, or the whole job does.

        Args:
            failure: what happened.
            regions: where it happened.
            whole: the reason why the whole job has to restart; empty: it does not have to.
        """
        failover, restarting = self._attempt.executions.failover, self._attempt.restarting
        needed = failover.restart(regions | restarting)
        whole = whole or self._cannot_cut(needed)
        all_of_it = bool(whole) or needed == failover.everything
        if all_of_it and not restarting:
            return ToFailing(failure, why=whole if len(failover.everything) > 1 else "")
        failure = self._job.checked(failure)
        decision = self._decide(failure)
        merged = bool(restarting) and decision is self._decision
        if all_of_it or isinstance(decision, GiveUp) or not failure.kind.recoverable:
            return ToFailing(failure, decision, merged=merged, why=whole)
        return RegionsToRestart(failure, needed, decision, merged)

    def _decide(self, failure: Failure) -> RestartDecision:
        job, now_ms = self._job, self._env.steady_clock.now_ms()
        recoverable = failure.kind.recoverable
        decision = job.failures.strategy.on_failure(now_ms, recoverable=recoverable)
        if not recoverable:
            fallback = job.restore_points.fall_back(self._attempt.restored, failure)
            if fallback is not None:
                self._env.publish("fallback", fallback)
                return Restart(now_ms, job.lifecycle.restarts + 1)
        return decision

    def _cannot_cut(self, regions: frozenset[RegionId]) -> str:
        """Return why these regions cannot restart beside others: their sources would be cut again.

        Until its first checkpoint, a coordinator that took over does not know how the sources were cut
        into splits. If it cut them again, the result might differ from the splits that the other
        regions read: some would be read twice, and others not at all.
        """
        attempt, log = self._attempt, self._env.log
        known = set(self._job.splits.sources)
        if attempt.restored is not None:
            known.update(operator.name for operator in attempt.restored.manifest.operators)
        if log is not None and (newest := log.view.newest) is not None:
            known.update(operator.name for operator in newest.manifest.operators)
        vertices = {s.vertex for s in attempt.executions.failover.subtasks_of(regions)}
        heads = (vertex.head for vertex in attempt.plan.vertices if vertex.id in vertices)
        unknown = [
            head.name for head in heads if head.source is not None and head.name not in known
        ]
        return f"source `{unknown[0]}` has to be cut into splits again" if unknown else ""

    def begin(self, restart: RegionsToRestart) -> None:
        """Restart these regions, from the beginning."""
        job, attempt = self._job, self._attempt
        job.record(restart.failure, merged=restart.merged)
        if not restart.merged:
            job.count_restart()
        self._decision = restart.decision
        if self._task is not None:
            self._task.cancel()
        new = attempt.executions.failover.subtasks_of(restart.regions - attempt.restarting)
        job.lifecycle.restarted_tasks += len(new)
        ready = RegionsReady(attempt.begin_regions(restart.regions))
        job.pool.prepare(worker_groups(attempt.plan, self._env.spec))
        announce_restart(job, restart.decision, attempt.restarting)
        self._task = asyncio.get_running_loop().create_task(
            self._restart(restart.decision.at_ms), name="restart regions"
        )
        self._task.add_done_callback(lambda _: self._env.events.put_nowait(ready))

    # -- messages of workers ------------------------------------------------------------------------

    def answered(self, worker_id: str, message: Messages) -> None:
        """Note that a worker has cancelled, or deployed, what this attempt demands."""
        attempt = self._attempt
        if isinstance(message, Cancelled | Deployed) and message.attempt == attempt.number:
            if isinstance(message, Deployed):
                attempt.figures.add(
                    message.fetching_ms,
                    message.opening_ms,
                    message.local_bytes,
                    message.read_bytes,
                    message.kept_bytes,
                )
            self.changed(worker_id)

    def late(self, message: Messages, worker_id: str, since: int) -> None:
        """Handle a message of an attempt that is over: only files that it names are deleted.

        Args:
            message: the message.
            worker_id: its sender.
            since: the attempt with which the whole job began last.
        """
        job, attempt = self._job, self._attempt
        attempt.late_messages += 1
        if isinstance(message, CheckpointAcked) and message.attempt >= since:
            job.checkpoints.acked(message)
        elif isinstance(message, SubtaskFailed) and attempt.restarting:
            also = failure_of_subtask(message, worker_id)
            job.failures.history.also(also.entry(self._env.clock.now_ms()))

    def changed(self, worker_id: str = "") -> None:
        """Note that no answer of this worker is due any more, or that something was published."""
        self._waiting.discard(worker_id)
        self._news.set()

    # -- the restart --------------------------------------------------------------------------------

    async def _restart(self, at_ms: int) -> list[LiveWorker]:
        """Cancel, wait and deploy; return all workers of the job.

        Raises:
            HeadgateError: there is no room for a worker, or no state that can be restored.
        """
        job, env, attempt = self._job, self._env, self._attempt
        await self._cancel()
        while job.checkpoints.publishing:
            await self._next_news()
        job.failures.history.cancelled(env.clock.now_ms())
        await attempt.log_partial_restart()
        await asyncio.sleep(max(0, at_ms - env.steady_clock.now_ms()) / 1000)
        job.failures.history.waited(env.clock.now_ms())
        attempt.begin_deployment()
        restored = await job.restore_points.find()
        attempt.restored = restored
        await job.commits.restored(restored)
        workers = await self._get_workers()
        self._waiting = set(
            await deploy_regions(job, restored, workers, attempt.restarting, partial=True)
        )
        while self._waiting:
            await self._next_news()
        return workers

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _cancel(self) -> None:
        """Cancel the regions on every live worker; kill workers that do not answer in time."""
        pool, attempt = self._job.pool, self._attempt
        self._waiting = set(pool.live)
        regions = tuple(sorted(attempt.restarting))
        for worker in pool.live.values():
            worker.send(Cancel(attempt=attempt.number, regions=regions))
        try:
            async with asyncio.timeout(self._env.options.get(CANCELLATION_TIMEOUT) / 1000):
                while self._waiting:
                    await self._next_news()
        except TimeoutError:
            for worker_id in self._waiting:
                pool.lose(worker_id, "it did not cancel its subtasks in time")

    async def _get_workers(self) -> list[LiveWorker]:
        """Return the workers of all slots, with others in place of those that are lost."""
        job, attempt = self._job, self._attempt
        executions, live = attempt.executions, job.pool.live
        await ensure_workers(job)
        gone = [worker_id for worker_id in executions.slots if worker_id not in live]
        if any(executions.regions_on(worker_id) - attempt.restarting for worker_id in gone):
            # Its loss is still in the queue of events: it concerns further regions, and begins again.
            await asyncio.get_running_loop().create_future()
        workers = choose_workers(job, live)
        executions.place([worker.worker_id for worker in workers], self._env.spec)
        return workers

    def ready(self) -> list[LiveWorker]:
        """End the restart, as the regions are deployed; return all workers of the job.

        Raises:
            HeadgateError: the reason why they could not be deployed.
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
        self._attempt.end_regions()
        report_restored(self._job)
        return workers

    async def close(self) -> None:
        """Give the restart up: the attempt is over for the whole job."""
        task, self._task = self._task, None
        self._attempt.end_regions()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- where a failure happened -------------------------------------------------------------------

    def regions_of(self, message: SubtaskFailed) -> frozenset[RegionId]:
        """Return where a reported failure happened; empty if that attempt is over."""
        executions = self._attempt.executions
        current = executions.regions_of(message.attempt)
        if message.vertex >= 0:
            own = executions.failover.region_of(SubtaskId(message.vertex, message.index))
            return current & {own}
        return current if message.region < 0 else current & {RegionId(message.region)}

    def suspect(self, message: SubtaskFailed, worker_id: str) -> bool:
        """Return True for a broken connection: it may be the consequence of another failure.

        If that failure is not reported within a moment, a `Suspected` event follows.
        """
        failure = failure_of_subtask(message, worker_id)
        if not isinstance(failure.error, ExchangeError):
            return False
        suspected = Suspected(failure, message.attempt, self.regions_of(message))
        loop = asyncio.get_running_loop()
        loop.call_later(ROOT_CAUSE_S, self._env.events.put_nowait, suspected)
        return True
