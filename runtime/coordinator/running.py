"""State: all subtasks run. Checkpoints are taken until the data ends, somebody stops it, or it fails."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import JobError, UsageError
from ..control.messages import (
    CheckpointAcked,
    CheckpointDeclined,
    Start,
    Statistics,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskTerminated,
    Terminate,
)
from ..protocol.failures import FailureKind
from ..protocol.joblog import JobStatus
from .checkpointing import Outcome, PublishResult
from .context import ClientWish, Failure, JobContext, Tick
from .deploying import failure_of_subtask, failure_of_worker
from .states import End, State, ended, failing
from .workers import FromWorker, Worker, WorkerLost

FINAL = "final"
STOP = "stop"
FINAL_RETRY_S = 0.1
"""A final checkpoint that failed without harm is asked for again after this pause."""


class Running(State):
    """One attempt at work."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._ids = frozenset(worker.worker_id for worker in workers)
        self._unfinished: set[tuple[int, int]] = set()
        self._unterminated: set[tuple[int, int]] = set()
        self._wishes: dict[str, ClientWish] = {}
        self._tokens = 0
        self._ending: End | None = None

    async def run(self, job: JobContext) -> State:
        everyone = {
            (vertex.id, index)
            for vertex in job.spec.plan.vertices
            for index in range(vertex.parallelism)
        }
        self._unfinished, self._unterminated = set(everyone), set(everyone)
        for worker in self._workers:
            worker.send(Start(attempt=job.attempt))
        job.set_status("RUNNING")
        try:
            if job.checkpoints is not None:
                self._settle(job, job.checkpoints.start(job.attempt))
            while True:
                state = self._handle(job, await job.events.get())
                if state is not None:
                    return state
        finally:
            if self._ending is not None and self._ending.wish is not None:
                self._wishes[STOP] = self._ending.wish  # stopped, but not in good order
            for wish in self._wishes.values():
                wish.refuse(JobError("the job failed before the checkpoint was complete"))

    def _handle(self, job: JobContext, event: Any) -> State | None:
        match event:
            case FromWorker(_, message):
                if getattr(message, "attempt", None) == job.attempt:
                    return self._handle_message(job, message)
            case WorkerLost(worker_id, reason):
                if worker_id in self._ids:
                    return failing(failure_of_worker(worker_id, reason))
            case PublishResult() if job.checkpoints is not None:
                return self._settle(job, job.checkpoints.publish_result(event))
            case Tick() if job.checkpoints is not None:
                return self._settle(job, job.checkpoints.tick())
            case ClientWish():
                return self._handle_wish(job, event)
        return None

    def _handle_message(self, job: JobContext, message: Any) -> State | None:
        checkpoints = job.checkpoints
        match message:
            case Statistics(subtasks=subtasks):
                for subtask in subtasks:
                    job.statistics[subtask.vertex, subtask.index] = subtask
            case CheckpointAcked() if checkpoints is not None:
                return self._settle(job, checkpoints.acked(message))
            case CheckpointDeclined() if checkpoints is not None:
                return self._settle(job, checkpoints.declined(message))
            case SubtaskFailed():
                return failing(failure_of_subtask(message))
            case SubtaskFinished(vertex=vertex, index=index):
                self._unfinished.discard((vertex, index))
                if not self._unfinished:
                    return self._all_finished(job)
            case SubtaskTerminated(vertex=vertex, index=index):
                self._unterminated.discard((vertex, index))
                if not self._unterminated and self._ending is not None:
                    ending, self._ending = self._ending, None
                    return ended(ending)
        return None

    # -- ends ---------------------------------------------------------------------------------------

    def _all_finished(self, job: JobContext) -> State | None:
        """All data is through: one more checkpoint commits the sinks' tail (CKP-17)."""
        if self._ending is not None or STOP in self._wishes:
            return None
        if job.checkpoints is None:
            self._terminate(job, End(JobStatus.FINISHED))
            return None
        return self._settle(job, job.checkpoints.request(FINAL, final=True))

    def _terminate(self, job: JobContext, end: End) -> None:
        """Everything is durable and the commit notices are out: let the subtasks leave."""
        self._ending = end
        for worker in self._workers:
            worker.send(Terminate(attempt=job.attempt))

    # -- checkpoints --------------------------------------------------------------------------------

    def _settle(self, job: JobContext, outcome: Outcome) -> State | None:
        """Draw the consequences of what the checkpoint protocol decided."""
        for done in outcome.done:
            wish = self._wishes.pop(done.token, None)
            if done.token == FINAL:
                self._terminate(job, End(JobStatus.FINISHED))
            elif done.token == STOP:
                reason = f"stopped with checkpoint {done.checkpoint_id}"
                self._terminate(job, End(JobStatus.STOPPED, reason, wish=wish))
            elif wish is not None:
                took_ms = job.checkpoints.last_duration_ms if job.checkpoints else 0
                wish.done(checkpoint=done.checkpoint_id, duration_ms=took_ms)
        for refused in outcome.refused:
            wish = self._wishes.pop(refused.token, None)
            if wish is not None:
                wish.refuse(JobError(f"no checkpoint was taken: {refused.reason.sentence}"))
            elif refused.token == FINAL and outcome.fail is None:
                loop = asyncio.get_running_loop()
                again = ClientWish(FINAL, loop.create_future())
                loop.call_later(FINAL_RETRY_S, job.events.put_nowait, again)
        if outcome.fail is None:
            return None
        message = outcome.fail.message
        kind = FailureKind.CHECKPOINTS
        error = JobError(message, fix="see the log for the subtasks that declined")
        return failing(Failure(message, "checkpoint coordinator", kind, error))

    # -- clients ------------------------------------------------------------------------------------

    def _handle_wish(self, job: JobContext, wish: ClientWish) -> State | None:
        if wish.verb == "cancel":
            return ended(End(JobStatus.CANCELED, "cancelled by a client", wish=wish))
        if job.checkpoints is None:
            return self._without_checkpoints(wish)
        if wish.verb == STOP:
            if self._ending is not None or STOP in self._wishes:
                wish.refuse(UsageError("the job is stopping already"))
                return None
            job.publish("stopping", "stopping with a final checkpoint")
            self._wishes[STOP] = wish
            return self._settle(job, job.checkpoints.request(STOP, stop=True))
        if wish.verb == FINAL:
            return self._settle(job, job.checkpoints.request(FINAL, final=True))
        self._tokens += 1
        token = f"request-{self._tokens}"
        self._wishes[token] = wish
        return self._settle(job, job.checkpoints.request(token))

    def _without_checkpoints(self, wish: ClientWish) -> State | None:
        if wish.verb == STOP:
            reason = "stopped; the job keeps no checkpoints"
            return ended(End(JobStatus.STOPPED, reason, wish=wish))
        wish.refuse(
            UsageError(
                "the job takes no checkpoints",
                fix="say where to keep them: job.checkpoint(every=..., storage=...)",
            )
        )
        return None
