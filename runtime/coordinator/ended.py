"""State: the job is over. Record how, keep or drop its checkpoints, let the workers go."""

from __future__ import annotations

import logging

from ...errors import FencedError, HeadgateError, JobError
from ..control.messages import CheckpointAcked
from ..options.state import CHECKPOINT_RETENTION
from ..protocol.failures import FailureKind
from ..protocol.job_result import JobFailure, JobOutcome
from ..protocol.joblog import JobEnded, JobStatus
from ..storage.stored_jobs import sweep_orphans, withdraw_token
from .checkpointing import PublishResult
from .context import ClientWish, Failure, JobContext
from .source_runs import discard_source_data
from .states import End, State
from .workers import FromWorker

_log = logging.getLogger("headgate.job")


class Ended(State):
    """The last state."""

    def __init__(self, end: End) -> None:
        self.end = end

    async def run(self, job: JobContext) -> None:
        end = self.end
        job.checkpoints.job_failed()
        await _settle_publications(job)
        await job.checkpoints.close()
        if job.rescale is not None:
            job.rescale.wish.refuse(JobError(f"the job ended: {end.reason or end.status.value}"))
        await job.pool.close()
        end = self.end = await _replace_output(job, end)
        if job.log is not None:
            job.checkpoints.last_completed = await job.log.end_job(
                end.status,
                end.reason,
                checkpoint=job.checkpoints.last_completed,
                failure=logged_failure(end.failure),
            )
            try:
                await _clean_up(job, end.status)
            except HeadgateError as error:
                _log.warning("checkpoints were not all deleted: %s", error)
        job.end = end
        logged = None if job.log is None else job.log.view.last_end
        job.ended_ms = job.clock.now_ms() if logged is None else logged.ended_ms
        job.announce_dropped(at_the_end=True)
        job.publish("progress", "", **job.describe())  # the final counts
        job.set_status(end.status.shown)
        if end.wish is not None:
            end.wish.done(
                status=job.status,
                reason=end.reason,
                checkpoint=job.checkpoints.last_completed,
                duration_ms=job.checkpoints.last_duration_ms,
                savepoint=end.savepoint,
                size_bytes=end.savepoint_bytes,
            )


async def _replace_output(job: JobContext, end: End) -> End:
    """Delete the output of earlier runs that this run has replaced; a job that cannot has failed."""
    finished = end.status is JobStatus.FINISHED
    try:
        await job.old_output.finish(finished=finished)
    except FencedError:
        raise
    except HeadgateError as error:
        text = f"its output is complete, but that of earlier runs could not be deleted: {error}"
        if not finished:
            _log.warning("the job was stopped; %s", text)
            return end
        failure = Failure(text, "coordinator", FailureKind.of(error), error)
        job.record(failure)
        return End(JobStatus.FAILED, text, failure, end.wish)
    return end


def again(job: JobContext, logged: JobEnded) -> End:
    """The end that an earlier coordinator of this run wrote to the log: what it left is tidied up."""
    job.checkpoints.last_completed = logged.checkpoint or job.checkpoints.last_completed
    if logged.failure is None:
        return End(logged.status, logged.reason)
    found = logged.failure
    kinds = {kind.value: kind for kind in FailureKind}
    kind = kinds.get(found.kind, FailureKind.INTERNAL)
    failure = Failure(found.text, found.vertex, kind, found.as_error())
    job.record(failure)  # for those who ask this coordinator for the history
    return End(logged.status, logged.reason, failure)


def outcome_of_end(end: JobEnded) -> JobOutcome:
    """The outcome of a job, from the entry of its end in the log."""
    return JobOutcome(
        end.status.shown,
        end.reason,
        None if end.failure is None else end.failure.as_error(),
        end.checkpoint,
        run=end.run,
        began_ms=end.history.began_ms,
        ended_ms=end.ended_ms,
        restarts=end.history.restarts,
    )


def logged_failure(failure: Failure | None) -> JobFailure | None:
    """A failure as the job log and the clients get it."""
    if failure is None:
        return None
    return JobFailure.of(failure.kind.value, failure.text, failure.where, failure.error)


async def _settle_publications(job: JobContext) -> None:
    """Wait until it is known of all publications under way whether they succeeded."""
    while job.checkpoints.publishing:
        match await job.events.get():
            case PublishResult() as result:
                job.checkpoints.publish_result(result)
            case FromWorker(_, CheckpointAcked() as late) if job.executions.is_current(late):
                job.checkpoints.acked(late)  # its files belong to nothing any more
            case ClientWish() as wish:
                wish.refuse(JobError("the job has ended"))


async def _clean_up(job: JobContext, status: JobStatus) -> None:
    """Leave nothing that no retained checkpoint needs: perhaps nobody ever starts this job again.

    Only behind the end in the log: an append in doubt is settled then, and no worker of ours writes.
    """
    if job.log is None or job.store is None:
        return
    await withdraw_token(job.store, job.generation)
    if _drops_checkpoints(job, status) and job.checkpoints.trimmer is not None:
        await job.checkpoints.trimmer.trim(0)
        await discard_source_data(job)
    await sweep_orphans(job.store, job.log.view.files, job.generation + 1)


def _drops_checkpoints(job: JobContext, status: JobStatus) -> bool:
    """Retention (features.md CKP-11): a finished job needs none; a stopped one keeps its last."""
    if status is JobStatus.FINISHED:
        return True
    retention = job.options.get(CHECKPOINT_RETENTION)
    if status is JobStatus.CANCELED:
        return retention != "RETAIN_ON_CANCELLATION"
    if status is JobStatus.FAILED:
        return retention == "NO_EXTERNALIZED_CHECKPOINTS"
    return False
