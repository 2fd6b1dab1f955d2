"""Sources that read a history before they go live: who still reads, and when all may go on.

Nothing of it is kept: it follows from what the subtasks say of themselves, so that a coordinator that takes
over, or a restore to the middle of a history, needs no more than their next report.
"""

from __future__ import annotations

from ...operators.splits import History
from ..control.messages import HistoryOver
from .checkpointing import Outcome
from .context import JobContext


def look_at_histories(job: JobContext) -> Outcome:
    """Tell sources whose history is over to go live, and the checkpoints whether there is a backlog.

    A subtask that has not reported may be in the middle of it.
    """
    backlog = False
    for vertex in job.plan.vertices:
        if vertex.head.source is None or not vertex.head.source.has_history:
            continue
        subtasks = [job.statistics.get((vertex.id, index)) for index in range(vertex.parallelism)]
        stages = {History.BEING_READ if each is None else each.history for each in subtasks}
        if History.BEING_READ in stages:
            backlog = True
        elif History.OVER in stages:
            job.tell(HistoryOver(attempt=job.attempt, vertex=vertex.id))
    return job.checkpoints.backlog(backlog)
