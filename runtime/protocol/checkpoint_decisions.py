"""What the checkpoint coordinator is told to do, as values. The shell carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NewType, TypeAlias, TypeVar, final

from ...operators.elements import CheckpointOptions
from .failures import CheckpointFailure
from .ids import CheckpointId, SubtaskId

Payload = TypeVar("Payload")
"""What a subtask hands over with its acknowledgement: handles of its state files."""

RequestToken = NewType("RequestToken", str)
"""Names a request, so that its answer finds whoever asked."""


@final
@dataclass(frozen=True, slots=True)
class Trigger:
    """Tell all source subtasks to send the barrier of a new checkpoint."""

    checkpoint_id: CheckpointId
    trigger_ms: int
    options: CheckpointOptions


@final
@dataclass(frozen=True, slots=True)
class Publish(Generic[Payload]):
    """All subtasks acknowledged: write the checkpoint's entry, then answer `published` or
    `publish_failed`. Exactly one answer is due, also after the job failed or was shut down.

    Attributes:
        acks: what each subtask handed over, in order of the subtasks.
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
    """Tell all subtasks (those that still run) that the checkpoint will never complete."""

    checkpoint_id: CheckpointId
    reason: CheckpointFailure


@final
@dataclass(frozen=True, slots=True)
class Discard(Generic[Payload]):
    """Delete the files that were written for this checkpoint only: nothing will ever refer to them."""

    checkpoint_id: CheckpointId
    payloads: tuple[Payload, ...]


@final
@dataclass(frozen=True, slots=True)
class RequestDone:
    """The requested checkpoint is complete."""

    token: RequestToken
    checkpoint_id: CheckpointId


@final
@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The requested checkpoint will not be taken, or failed.

    If the job failed while it was being published, it may exist all the same.
    """

    token: RequestToken
    reason: CheckpointFailure


@final
@dataclass(frozen=True, slots=True)
class FailJob:
    """Fail the attempt: it must be restarted from the last completed checkpoint.

    The coordinator itself has ended the attempt already, as if `job_failed` had been called.
    """

    reason: CheckpointFailure
    message: str


@final
@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `tick` at this time; replaces what was asked for before."""

    at_ms: int


CheckpointDecision: TypeAlias = (
    Trigger
    | Publish[Payload]
    | NotifyComplete
    | NotifyAborted
    | Discard[Payload]
    | RequestDone
    | RequestFailed
    | FailJob
    | WakeAt
)
