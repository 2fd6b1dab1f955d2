"""A worker's record of its attempt, for a coordinator that takes over."""

from __future__ import annotations

from collections.abc import Sequence

from ..control.messages import (
    CheckpointAborted,
    CheckpointAcked,
    CheckpointCompleted,
    Deploy,
    FinishSources,
    Messages,
    Start,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskTerminated,
    Terminate,
    TriggerCheckpoint,
)
from ..protocol.adoption import IN_PARTS, Subtask, WorkerReport
from ..task.subtask import Subtask as Task


class AttemptRecord:
    """One attempt on one worker, by the messages that were obeyed and sent.

    What was sent may never have arrived: its coordinator was perhaps dead already.
    """

    def __init__(self, deploy: Deploy) -> None:
        self._deploy = deploy
        self._finished: set[Subtask] = set()
        self._uncommitted: set[int] = set()
        self._last = 0
        self._completed = 0
        self._running = False
        self._ending = ""
        self._failure = ""
        self._orphaned_ms = 0

    @property
    def attempt(self) -> int:
        """Its number."""
        return self._deploy.attempt

    @property
    def orphaned_ms(self) -> int:
        """The time that the attempt may go on without a coordinator; 0: there is nothing to wait for."""
        return 0 if self._ending or self._failure else self._orphaned_ms

    def broken_up(self) -> None:
        """Some of its regions end, here or elsewhere, and begin again as another attempt."""
        self._ending = self._ending or IN_PARTS

    def heard(self, message: Messages) -> None:
        """The coordinator said something; of other attempts it does not count."""
        if not self._is_ours(message):
            return
        match message:
            case Start(orphaned_ms=orphaned_ms):
                self._running = True
                self._orphaned_ms = orphaned_ms
            case TriggerCheckpoint(checkpoint_id=id_, options=options):
                self._last = max(self._last, id_)
                if options.stop:
                    self._ending = f"its sources stopped at checkpoint {id_}"
            case CheckpointCompleted(checkpoint_id=id_):
                self._completed = max(self._completed, id_)
                self._uncommitted = {other for other in self._uncommitted if other > id_}
            case CheckpointAborted(checkpoint_id=id_):
                self._uncommitted.discard(id_)
            case FinishSources():
                self._ending = "its sources were drained"
            case Terminate():
                self._ending = "its subtasks were leaving"

    def said(self, message: Messages) -> None:
        """A subtask reports something; of other attempts it does not count."""
        if not self._is_ours(message):
            return
        match message:
            case CheckpointAcked(checkpoint_id=id_) if id_ > self._completed:
                self._uncommitted.add(id_)
            case SubtaskFinished(vertex=vertex, index=index):
                self._finished.add((vertex, index))
            case SubtaskFailed(task_name=task_name, text=text):
                self._failure = self._failure or f"{task_name}: {text}"
            case SubtaskTerminated():
                self._ending = "its subtasks were leaving"

    def _is_ours(self, message: Messages) -> bool:
        return getattr(message, "attempt", None) == self.attempt

    def report(self, subtasks: Sequence[Task], orphaned_ms: int) -> WorkerReport:
        """All of it; `subtasks` are here, and were without a coordinator for `orphaned_ms`."""
        deploy = self._deploy
        return WorkerReport(
            attempt=deploy.attempt,
            plan=deploy.plan,
            restored_checkpoint=deploy.restored_checkpoint,
            running=self._running,
            subtasks=tuple((task.env.vertex.id, task.env.index) for task in subtasks),
            finished=tuple(sorted(self._finished)),
            failure=self._failure,
            ending=self._ending,
            last_checkpoint=self._last,
            completed_checkpoint=self._completed,
            uncommitted_checkpoints=tuple(sorted(self._uncommitted)),
            orphaned_ms=orphaned_ms,
        )


def adopt(subtasks: Sequence[Task], generation: int) -> None:
    """Another coordinator goes on with the attempt.

    Files of its checkpoints must bear its generation: those of older ones are swept away.
    """
    for task in subtasks:
        task.env.generation = generation
