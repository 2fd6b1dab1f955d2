"""State: the job is over. Record how, keep or drop its checkpoints, let the workers go."""

from __future__ import annotations

import logging

from ...errors import HeadgateError
from ..options import CHECKPOINT_RETENTION
from ..protocol.joblog import JobStatus
from .context import JobContext
from .states import End, State

_log = logging.getLogger("headgate.job")
_SHOWN = {JobStatus.STOPPED: "SUSPENDED"}


class Ended(State):
    """The last state."""

    def __init__(self, end: End) -> None:
        self.end = end

    async def run(self, job: JobContext) -> None:
        end = self.end
        if job.checkpoints is not None:
            job.checkpoints.job_failed()
            await job.checkpoints.close()
        await job.pool.close()
        if job.log is not None and job.checkpoints is not None:
            await job.log.end_job(end.status, end.reason)
            if _drops_checkpoints(job, end.status):
                try:
                    await job.checkpoints.trimmer.trim(0)
                except HeadgateError as error:
                    _log.warning("checkpoints were not all deleted: %s", error)
        job.end = end
        job.publish("progress", "", **job.describe())  # the final counts
        job.set_status(_SHOWN.get(end.status, end.status.value))
        if end.wish is not None:
            last = job.checkpoints.last_completed if job.checkpoints else 0
            took_ms = job.checkpoints.last_duration_ms if job.checkpoints else 0
            end.wish.done(
                status=job.status, reason=end.reason, checkpoint=last, duration_ms=took_ms
            )


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
