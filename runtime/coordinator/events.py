"""The events of a job: everything that happens to it comes through one queue, to its present state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, final

from ...errors import HeadgateError
from ..control.messages import Messages
from ..protocol.failover import RegionId
from .failures import Failure

EVENTS_PER_TURN = 64
"""After this number of events everything else in the event loop has its turn."""
HAND_OVER = "hand-over"
"""The verb with which a client lets this coordinator leave, and the run go on under the next one."""


@final
@dataclass(slots=True)
class ClientCommand:
    """A client wants something done; `answer` is settled with the result or an error."""

    verb: str
    answer: asyncio.Future[dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)

    def done(self, **body: Any) -> None:
        """Answer with `body`."""
        if not self.answer.done():
            self.answer.set_result(body)

    def refuse(self, error: HeadgateError) -> None:
        """Answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


@final
@dataclass(frozen=True, slots=True)
class FromWorker:
    """A worker sent a message."""

    worker_id: str
    message: Messages


@final
@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died, closed its connection, or stopped answering."""

    worker_id: str
    reason: str


@final
@dataclass(frozen=True, slots=True)
class PublishResult:
    """The log entry of a checkpoint, or the metadata of a savepoint, was written, or could not be."""

    checkpoint_id: int
    error: HeadgateError | None
    savepoint: str = ""
    """The address of the savepoint, if it is one."""


@final
@dataclass(frozen=True, slots=True)
class Tick:
    """It is the time at which the checkpoint coordinator wanted to be called."""


@final
@dataclass(frozen=True, slots=True)
class DeploymentPrepared:
    """The workers of an attempt have been told what to deploy, or that failed."""

    attempt: int


@final
@dataclass(frozen=True, slots=True)
class WorkersReady:
    """The workers for a rescale are available beside the running attempt, or could not be started."""

    attempt: int


@final
@dataclass(frozen=True, slots=True)
class RetryFinal:
    """The final checkpoint of this attempt failed a moment ago, without harm to the job."""

    attempt: int


@final
@dataclass(frozen=True, slots=True)
class GraceOver:
    """A coordinator that hands its run over must leave now, with a last checkpoint or without."""

    attempt: int


@final
@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The watchdog has found that this attempt makes no progress."""

    attempt: int
    failure: Failure


@final
@dataclass(frozen=True, slots=True)
class RegionsReady:
    """The regions that restart in this attempt are deployed, or could not be."""

    attempt: int


@final
@dataclass(frozen=True, slots=True)
class Suspected:
    """A connection of these regions broke, and no other failure that explains it came in time."""

    failure: Failure
    attempt: int
    regions: frozenset[RegionId]


JobEvent: TypeAlias = (
    ClientCommand
    | FromWorker
    | WorkerLost
    | PublishResult
    | Tick
    | DeploymentPrepared
    | WorkersReady
    | RetryFinal
    | GraceOver
    | AttemptFailed
    | RegionsReady
    | Suspected
)


@final
class EventQueue(asyncio.Queue[JobEvent]):
    """The queue of a job. A burst of events does not keep heartbeats from the event loop."""

    _taken = 0

    async def get(self) -> JobEvent:
        """Return the next event, now and then after a turn of everything else."""
        self._taken += 1
        if self._taken % EVENTS_PER_TURN == 0:
            await asyncio.sleep(0)
        return await super().get()


class PutEvent(Protocol):
    """Puts an event into the queue of the job; usually `put_nowait` of that queue."""

    def __call__(self, event: JobEvent, /) -> None: ...
