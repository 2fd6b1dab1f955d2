"""The states of a job, and how one leads to the next.

    Adopting ──> Running    (a takeover; otherwise, or if nothing can be adopted: Deploying)

    Deploying ──> Running ──> Ended
        ^          │   │
        ├─ Failing <┘   │   (also from Deploying; Failing may give up: Ended)
        │               │   (a failure of some regions only is handled within Running: `regional.py`)
        └─ Rescaling <──┘

A state does one thing (`adopting.py`, `deploying.py`, `running.py`, `restarting.py`, `ending.py`). What
it returns is one of the transitions below, from which `job.py` makes the next state. So no state
knows the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

from ..protocol.adoption import Adopted
from ..protocol.joblog import JobStatus
from ..protocol.restart import RestartDecision
from .events import HAND_OVER, ClientCommand
from .failures import Failure
from .workers import LiveWorker


@final
@dataclass(frozen=True, slots=True)
class ToAdopting:
    """An earlier coordinator ran the job; perhaps its attempt goes on."""


@final
@dataclass(frozen=True, slots=True)
class ToDeploying:
    """The next attempt begins."""


@final
@dataclass(frozen=True, slots=True)
class ToRunning:
    """All subtasks are ready; or they are at work already, if `adopted`."""

    workers: list[LiveWorker]
    adopted: Adopted | None = None


@final
@dataclass(frozen=True, slots=True)
class ToFailing:
    """The attempt is over, for the whole job.

    Attributes:
        failure: the failure that ended it.
        decision: what follows, if that was decided already.
        merged: it happened while regions restart after another failure, and belongs to that one.
        why: the reason why the whole job restarts and not only a part of it, if it has parts.
    """

    failure: Failure
    decision: RestartDecision | None = None
    merged: bool = False
    why: str = ""


@final
@dataclass(frozen=True, slots=True)
class ToRescaling:
    """The job stopped with a checkpoint, to go on at another parallelism."""


@final
@dataclass(frozen=True, slots=True)
class ToHandingOver:
    """The run is left to its next coordinator, as a client commanded."""

    command: ClientCommand


@final
@dataclass(frozen=True, slots=True)
class EndOfJob:
    """The job is over.

    Attributes:
        status: how it ended.
        reason: why, for the user.
        failure: the failure that ended it, if one did.
        command: the command of the client that ended it.
        savepoint: the address of the savepoint that the client wanted with the end.
        savepoint_bytes: its size.
    """

    status: JobStatus
    reason: str = ""
    failure: Failure | None = None
    command: ClientCommand | None = None
    savepoint: str = ""
    savepoint_bytes: int = 0


Transition: TypeAlias = (
    ToAdopting | ToDeploying | ToRunning | ToFailing | ToRescaling | ToHandingOver | EndOfJob
)


def ends_at_once(command: ClientCommand) -> bool:
    """Return True for a command that can be carried out while no attempt runs."""
    wants_more = "savepoint" in command.arguments or command.arguments.get("drain")
    return command.verb in ("cancel", HAND_OVER) or (command.verb == "stop" and not wants_more)


def end_by(command: ClientCommand) -> Transition:
    """End the job, or this coordinator, while no attempt runs: the last checkpoint is the newest state."""
    if command.verb == HAND_OVER:
        return ToHandingOver(command)
    status = JobStatus.CANCELED if command.verb == "cancel" else JobStatus.STOPPED
    return EndOfJob(status, f"{command.verb} by a client", command=command)
