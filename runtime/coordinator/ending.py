"""The last states of a coordinator: the job is over, or the run is left to the next coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import final

from ...errors import FencedError, HeadgateError, JobError
from ..control.job_client import ENDED
from ..control.messages import CheckpointAcked
from ..options.state import CHECKPOINT_RETENTION
from ..protocol.failures import FailureKind
from ..protocol.job_result import JobFailure, JobOutcome
from ..protocol.joblog import JobEnded, JobStatus
from ..storage.stored_jobs import sweep_orphans, withdraw_token
from .context import EndOfJob, JobContext
from .environment import ClientCommand, FromWorker, PublishResult
from .failures import Failure
from .sources import discard_source_data
from .status import describe

STATUS = "HANDED_OVER"
REASON = "left to the next start of the same run"
CLOSE_S = 1.0
"""Log writes and deletions that take longer than this are given up when a coordinator hands over."""
_log = logging.getLogger("headgate.job")


@final
class Ended:
    """The last state of a job: record its end, keep or drop its checkpoints, shut its workers down."""

    def __init__(self, job: JobContext, end: EndOfJob) -> None:
        self._job = job
        self._end = end

    async def run(self) -> None:
        job, log, lifecycle = self._job, self._job.env.log, self._job.lifecycle
        checkpoints = job.checkpoints
        checkpoints.job_failed()
        await self._settle_publications()
        await checkpoints.close()
        if lifecycle.rescale is not None:
            reason = self._end.reason or self._end.status.value
            lifecycle.rescale.command.refuse(JobError(f"the job ended: {reason}"))
        await job.pool.close()
        await job.commits.finish()
        end = await self._replace_output()
        if log is not None:
            checkpoints.last_completed = await log.end_job(
                end.status,
                end.reason,
                checkpoint=checkpoints.last_completed,
                failure=logged_failure(end.failure),
            )
            try:
                await self._clean_up(end.status)
            except HeadgateError as error:
                _log.warning("checkpoints were not all deleted: %s", error)
        lifecycle.end = end
        logged = None if log is None else log.view.last_end
        lifecycle.ended_ms = job.env.clock.now_ms() if logged is None else logged.ended_ms
        job.attempt.announce_dropped(at_the_end=True)
        job.env.publish("progress", "", **describe(job))  # the final counts
        job.set_status(end.status.status_name)
        if end.command is not None:
            end.command.done(
                status=lifecycle.status,
                reason=end.reason,
                checkpoint=checkpoints.last_completed,
                duration_ms=checkpoints.last_duration_ms,
                savepoint=end.savepoint,
                size_bytes=end.savepoint_bytes,
            )

    async def _settle_publications(self) -> None:
        """Wait until all publications under way have succeeded or failed."""
        job = self._job
        while job.checkpoints.publishing:
            match await job.env.events.get():
                case PublishResult() as result:
                    job.checkpoints.publish_result(result)
                case FromWorker(_, CheckpointAcked() as late):
                    if job.attempt.executions.is_current(late):
                        job.checkpoints.acked(late)  # no checkpoint will need its files
                case ClientCommand() as command:
                    command.refuse(JobError(ENDED))

    async def _replace_output(self) -> EndOfJob:
        """Delete the output of earlier runs that this run has replaced; if that fails, the job failed."""
        job, end = self._job, self._end
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
            return EndOfJob(JobStatus.FAILED, text, failure, end.command)
        return end

    async def _clean_up(self, status: JobStatus) -> None:
        """Delete everything that no retained checkpoint needs: perhaps this job never starts again.

        This happens only after the end is in the log: then an append in doubt is settled, and no worker
        of this job writes.
        """
        job, log, store = self._job, self._job.env.log, self._job.env.store
        if log is None or store is None:
            return
        await withdraw_token(store, job.env.generation)
        if self._drops_checkpoints(status) and job.checkpoints.trimmer is not None:
            await job.checkpoints.trimmer.trim(0)
            await discard_source_data(job.env)
        await sweep_orphans(store, log.view.files, job.env.generation + 1)

    def _drops_checkpoints(self, status: JobStatus) -> bool:
        """Return whether checkpoints are deleted: a finished job needs none, a stopped one keeps one."""
        if status is JobStatus.FINISHED:
            return True
        retention = self._job.env.options.get(CHECKPOINT_RETENTION)
        if status is JobStatus.CANCELED:
            return retention != "RETAIN_ON_CANCELLATION"
        if status is JobStatus.FAILED:
            return retention == "NO_EXTERNALIZED_CHECKPOINTS"
        return False


@final
class HandingOver:
    """The last state of a coordinator that leaves, while the run goes on under the next coordinator.

    Nothing follows the last checkpoint in the log, so that the next start of the same run finds it open
    and resumes.
    """

    def __init__(self, job: JobContext, command: ClientCommand) -> None:
        self._job = job
        self._command = command

    async def run(self) -> None:
        job = self._job
        job.checkpoints.job_failed()
        # What is being written to the log may be there or not, as after a crash: the successor finds out.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(job.checkpoints.close(), CLOSE_S)
        await job.pool.close()
        job.lifecycle.handed_over = True
        job.env.publish("progress", "", **describe(job))  # the final counts
        job.set_status(STATUS)
        self._command.done(status=STATUS, reason=REASON, checkpoint=job.checkpoints.last_completed)


def end_from_log(job: JobContext, logged: JobEnded) -> EndOfJob:
    """Return the end that an earlier coordinator of this run recorded: what it left is cleaned up."""
    job.checkpoints.last_completed = logged.checkpoint or job.checkpoints.last_completed
    if logged.failure is None:
        return EndOfJob(logged.status, logged.reason)
    found = logged.failure
    kinds = {kind.value: kind for kind in FailureKind}
    kind = kinds.get(found.kind, FailureKind.INTERNAL)
    failure = Failure(found.text, found.vertex, kind, found.as_error())
    job.record(failure)  # this coordinator is asked for the history as well
    return EndOfJob(logged.status, logged.reason, failure)


def outcome_of_end(end: JobEnded) -> JobOutcome:
    """Return the outcome of a job from the log entry of its end."""
    return JobOutcome(
        end.status.status_name,
        end.reason,
        None if end.failure is None else end.failure.as_error(),
        end.checkpoint,
        run=end.run,
        began_ms=end.history.began_ms,
        ended_ms=end.ended_ms,
        restarts=end.history.restarts,
    )


def logged_failure(failure: Failure | None) -> JobFailure | None:
    """Return a failure in the form for the job log and clients."""
    if failure is None:
        return None
    return JobFailure.of(failure.kind.value, failure.text, failure.where, failure.error)
