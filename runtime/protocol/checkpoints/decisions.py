"""The decisions about checkpoints, as values. The shell carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NewType, TypeAlias, TypeVar, final

from ....operators.elements import CheckpointOptions
from ..failures import CheckpointFailure
from ..ids import CheckpointId, SubtaskId

Payload = TypeVar("Payload")
"""The content of a subtask's acknowledgement: handles of its state files."""

RequestToken = NewType("RequestToken", str)
"""Identifies a request, so that its answer reaches the requester."""


@final
@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """Tell all source subtasks to send the barrier of a new checkpoint."""

    checkpoint_id: CheckpointId
    trigger_ms: int
    options: CheckpointOptions


@final
@dataclass(frozen=True, slots=True)
class Publish(Generic[Payload]):
    """All subtasks acknowledged: write the checkpoint's entry, or the metadata of the savepoint.

    Then answer `published` or `publish_failed`. Exactly one answer is due, also after the job
    failed.

    Attributes:
        acks: the payload of each subtask, in order of the subtasks.
        final: all data has ended; after this checkpoint the job is finished.
    """

    checkpoint_id: CheckpointId
    trigger_ms: int
    options: CheckpointOptions
    final: bool
    acks: Mapping[SubtaskId, Payload]


@final
@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """Tell all subtasks that the checkpoint is durable: sinks may commit."""

    checkpoint_id: CheckpointId


@final
@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """Tell all subtasks (those that still run) that the checkpoint was aborted."""

    checkpoint_id: CheckpointId
    reason: CheckpointFailure


@final
@dataclass(frozen=True, slots=True)
class Discard(Generic[Payload]):
    """Delete the files that were written for this checkpoint only: nothing will ever refer to them.

    Files that it shares with its base stay. A savepoint shares nothing; its metadata is deleted
    first.
    """

    checkpoint_id: CheckpointId
    options: CheckpointOptions
    payloads: tuple[Payload, ...]


@final
@dataclass(frozen=True, slots=True)
class RequestDone:
    """The requested checkpoint is complete.

    For a stop with savepoint the id is that of the last checkpoint, taken after the savepoint.
    """

    token: RequestToken
    checkpoint_id: CheckpointId


@final
@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The requested checkpoint will not be taken, or failed.

    If the job failed while it was being published, a checkpoint may exist all the same; a savepoint
    does not.

    Attributes:
        savepoint_done: for a stop with savepoint: the savepoint is complete, only the last
            checkpoint after it failed.
    """

    token: RequestToken
    reason: CheckpointFailure
    savepoint_done: bool = False


@final
@dataclass(frozen=True, slots=True)
class FailJob:
    """Fail the attempt: it must be restarted from the last completed checkpoint.

    This coordinator has already ended the attempt, as if `job_failed` had been called.
    """

    reason: CheckpointFailure
    message: str
    stopping: bool = False
    """The last checkpoint, or the savepoint before it, failed: the sources are already silent."""


@final
@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `tick` at this time; replaces the previous request."""

    at_ms: int


CheckpointDecision: TypeAlias = (
    StartCheckpoint
    | Publish[Payload]
    | NotifyComplete
    | NotifyAborted
    | Discard[Payload]
    | RequestDone
    | RequestFailed
    | FailJob
    | WakeAt
)
