"""The states of a job, one file each; `run` does the state's work and returns the next state.

Adopting ──> Running    (a takeover; else, or if nothing can be adopted: Deploying)

Deploying ──> Running ──> Ended
    ^          │   │
    ├─ Failing <┘   │   (also from Deploying; Failing may give up: Ended)
    │               │   (a failure of some regions alone is dealt with in Running: `regional.py`)
    └─ Rescaling <──┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..protocol.joblog import JobStatus

if TYPE_CHECKING:
    from ..protocol.adoption import Adopted
    from ..protocol.restart import RestartDecision
    from .context import ClientWish, Failure, JobContext
    from .workers import Worker


HAND_OVER = "hand-over"
"""The verb of a client that wants this coordinator to leave, and the run to go on under the next one."""


class State(ABC):
    """A state of a job: one thing that it is doing."""

    @abstractmethod
    async def run(self, job: JobContext) -> State | None:
        """Do the work; the next state, or None when the job is over."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a job: its status and reason. `wish`: the client who asked for it."""

    status: JobStatus
    reason: str = ""
    failure: Failure | None = None
    wish: ClientWish | None = None
    savepoint: str = ""
    """Address of the savepoint that the client wanted with the end."""
    savepoint_bytes: int = 0


def adopting() -> State:
    """Another coordinator ran the job; perhaps its attempt goes on."""
    from .adopting import Adopting

    return Adopting()


def deploying() -> State:
    """The first state of an attempt."""
    from .deploying import Deploying

    return Deploying()


def running(workers: list[Worker], adopted: Adopted | None = None) -> State:
    """All subtasks are ready; or, if `adopted`, at work already."""
    from .running import Running

    return Running(workers, adopted)


def failing(
    failure: Failure,
    decision: RestartDecision | None = None,
    *,
    merged: bool = False,
    why: str = "",
) -> State:
    """The attempt is over, for all of the job.

    Args:
        failure: what ended it.
        decision: what follows, if that was decided already.
        merged: it comes while regions restart after another failure, and belongs to that.
        why: not only a part of the job restarts, if there is more than one.
    """
    from .failing import Failing

    return Failing(failure, decision, merged=merged, why=why)


def rescaling() -> State:
    """The job stopped with a checkpoint, to go on at another parallelism."""
    from .rescaling import Rescaling

    return Rescaling()


def ended(end: End) -> State:
    """The job is over."""
    from .ended import Ended

    return Ended(end)


def handing_over(wish: ClientWish) -> State:
    """The run is left to its next coordinator."""
    from .handing_over import HandingOver

    return HandingOver(wish)


def ends_at_once(wish: ClientWish) -> bool:
    """True for a wish that can be granted while no attempt runs."""
    wants_more = "savepoint" in wish.arguments or wish.arguments.get("drain")
    return wish.verb in ("cancel", HAND_OVER) or (wish.verb == "stop" and not wants_more)


def ended_by_wish(wish: ClientWish) -> State:
    """Stopped or cancelled while no attempt was running: nothing is newer than the last checkpoint."""
    if wish.verb == HAND_OVER:
        return handing_over(wish)
    status = JobStatus.CANCELED if wish.verb == "cancel" else JobStatus.STOPPED
    return ended(End(status, f"{wish.verb} by a client", wish=wish))
