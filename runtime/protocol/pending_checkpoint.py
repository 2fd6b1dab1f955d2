"""A checkpoint that was triggered and is not complete yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, final

from ...operators.elements import CheckpointOptions
from .checkpoint_decisions import Payload, Publish, RequestToken
from .ids import CheckpointId, SubtaskId


@final
@dataclass(slots=True)
class PendingCheckpoint(Generic[Payload]):
    """One checkpoint or savepoint from its trigger to its end, as its coordinator keeps it."""

    checkpoint_id: CheckpointId
    trigger_ms: int
    missing: set[SubtaskId]
    token: RequestToken | None = None
    options: CheckpointOptions = field(default=CheckpointOptions())
    final: bool = False
    publishing: bool = False
    after_savepoint: bool = False
    """Whether it is the last checkpoint of a job that stops with a savepoint, which is complete."""
    acks: dict[SubtaskId, Payload] = field(default_factory=dict)

    @property
    def savepoint(self) -> bool:
        """True if it is a savepoint, not a checkpoint of the job."""
        return bool(self.options.savepoint)

    @property
    def ending(self) -> bool:
        """True if it is the last one of the job, or of this run of it."""
        return self.final or self.options.stop

    def publish(self) -> Publish[Payload]:
        """Return the decision to make it durable, as all subtasks acknowledged."""
        self.publishing = True
        acks = {subtask: self.acks[subtask] for subtask in sorted(self.acks)}
        return Publish(self.checkpoint_id, self.trigger_ms, self.options, self.final, acks)
