"""State: this process leaves, and the run goes on under its next coordinator.

Nothing is written to the log behind the last checkpoint, so that the next start of the same run finds it
open and resumes.
"""

from __future__ import annotations

import asyncio
import contextlib

from .context import ClientWish, JobContext
from .states import State

STATUS = "HANDED_OVER"
CLOSE_S = 1.0
"""Log writes and deletions that take longer are left alone: the time to leave is over."""
REASON = "left to the next start of the same run"


class HandingOver(State):
    """The last state of a coordinator, but not of its run."""

    def __init__(self, wish: ClientWish) -> None:
        self._wish = wish

    async def run(self, job: JobContext) -> None:
        job.checkpoints.job_failed()
        # What is being written to the log is there or not, as after a crash: the successor finds out.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(job.checkpoints.close(), CLOSE_S)
        await job.pool.close()
        job.handed_over = True
        job.publish("progress", "", **job.describe())  # the final counts
        job.set_status(STATUS)
        self._wish.done(status=STATUS, reason=REASON, checkpoint=job.checkpoints.last_completed)
