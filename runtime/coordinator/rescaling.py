"""State: the job stopped with a checkpoint whose log entry names another parallelism; go on with that.

All subtasks have committed and left. Nothing is lost if this coordinator dies now: its successor finds
the new parallelism in the log.
"""

from __future__ import annotations

from ...errors import HeadgateError
from .checkpointing import PublishResult
from .context import ClientWish, JobContext
from .states import State, deploying, ended_by_wish, ends_at_once


class Rescaling(State):
    """Between two attempts of different parallelism."""

    async def run(self, job: JobContext) -> State:
        job.set_status("RESTARTING")
        job.checkpoints.job_failed()  # the attempt is over; nothing failed
        wish: ClientWish | None = None
        while job.checkpoints.publishing:
            match await job.events.get():
                case PublishResult() as result:
                    job.checkpoints.publish_result(result)
                case ClientWish() as asked if wish is None and ends_at_once(asked):
                    wish = asked
                case ClientWish() as asked:
                    asked.refuse(HeadgateError("the job is being rescaled", fix="try again soon"))
        return deploying() if wish is None else ended_by_wish(wish)
