"""The environment of a coordinator: what it works with from its start to its end, in every attempt.

Everything that happens to a job is an event. All events come through one queue (`EventQueue`), to the
present state of the job.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, final

import msgspec

from ...errors import HeadgateError
from ...operators.clock import Clock
from ..control.job_client import WARNINGS, EventListener, PublishedEvent
from ..control.messages import Messages
from ..observe.spans import NoSpans, Spans
from ..options.registry import Options
from ..plan import JobSpec
from ..protocol.failover import RegionId
from ..storage.base import AddressOpener, CheckpointStore
from ..storage.joblog_store import JobLog
from .failures import Failure

_log = logging.getLogger("headgate.job")


EVENTS_PER_TURN = 64
"""After this number of events everything else in the event loop has its turn."""
HAND_OVER = "hand-over"
"""The verb with which a client lets this coordinator leave, and the run go on under the next one."""


@final
class ClientCommand(msgspec.Struct):
    """A client wants something done; `answer` is settled with the result or an error."""

    verb: str
    answer: asyncio.Future[dict[str, Any]]
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)

    def done(self, **body: Any) -> None:
        """Answer with `body`."""
        if not self.answer.done():
            self.answer.set_result(body)

    def refuse(self, error: HeadgateError) -> None:
        """Answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


@final
class FromWorker(msgspec.Struct, frozen=True):
    """A worker sent a message."""

    worker_id: str
    message: Messages


@final
class WorkerLost(msgspec.Struct, frozen=True):
    """A worker died, closed its connection, or stopped answering."""

    worker_id: str
    reason: str


@final
class PublishResult(msgspec.Struct, frozen=True):
    """The log entry of a checkpoint, or the metadata of a savepoint, was written, or could not be."""

    checkpoint_id: int
    error: HeadgateError | None
    savepoint: str = ""
    """The address of the savepoint, if it is one."""


@final
class Tick(msgspec.Struct, frozen=True):
    """It is the time at which the checkpoint coordinator wanted to be called."""


@final
class DeploymentPrepared(msgspec.Struct, frozen=True):
    """The workers of an attempt have been told what to deploy, or that failed."""

    attempt: int


@final
class WorkersReady(msgspec.Struct, frozen=True):
    """The workers for a rescale are available beside the running attempt, or could not be started."""

    attempt: int


@final
class RetryFinal(msgspec.Struct, frozen=True):
    """The final checkpoint of this attempt failed a moment ago, without harm to the job."""

    attempt: int


@final
class GraceOver(msgspec.Struct, frozen=True):
    """A coordinator that hands its run over must leave now, with a last checkpoint or without."""

    attempt: int


@final
class AttemptFailed(msgspec.Struct, frozen=True):
    """The watchdog has found that this attempt makes no progress."""

    attempt: int
    failure: Failure


@final
class RegionsReady(msgspec.Struct, frozen=True):
    """The regions that restart in this attempt are deployed, or could not be."""

    attempt: int


@final
class Suspected(msgspec.Struct, frozen=True):
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


@final
class SteadyClock:
    """A wall clock that nobody can set: the time at which it was made, plus the time since then.

    Checkpoints and restarts depend on durations. If the machine's clock were set back by an hour,
    the next checkpoint would otherwise come an hour late.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.now_ms() - 1000 * clock.monotonic()

    def now_ms(self) -> int:
        return round(self._began_ms + 1000 * self._clock.monotonic())

    def monotonic(self) -> float:
        return self._clock.monotonic()


@final
@dataclass(slots=True, kw_only=True)
class JobEnvironment:
    """The job as it was submitted, its log and storage, the clock, and the ways in and out."""

    spec: JobSpec
    """The job as it was submitted."""
    options: Options
    clock: Clock
    events: asyncio.Queue[JobEvent]
    """The queue of all that the states of the job handle."""
    open_at: AddressOpener
    """Opens the storage at any address, for savepoints."""
    log: JobLog | None = None
    """The job log; None: the job has no checkpoint storage."""
    store: CheckpointStore | None = None
    """The checkpoint storage, if the job has one."""
    checkpoint_directory: str = ""
    """The address of the checkpoints, without credentials; empty: the job keeps none."""
    metrics_url: str = ""
    """The Prometheus endpoint of this process, if it has one."""
    spans: Spans = field(default_factory=NoSpans)
    """Takes the spans of checkpoints, restores and starts."""
    listeners: list[EventListener] = field(default_factory=list)
    """They get each event that clients see."""
    attempt: int = 0
    """The number of the present attempt, which log records carry."""
    generation: int = field(init=False)
    """The generation that this coordinator leads; 0 without a job log."""
    steady_clock: SteadyClock = field(init=False)
    """Measures durations: it does not change when the machine's clock is set."""

    def __post_init__(self) -> None:
        self.generation = 0 if self.log is None else self.log.generation
        self.steady_clock = SteadyClock(self.clock)

    @property
    def keeps_checkpoints(self) -> bool:
        """False for a job without checkpoint storage: it can take savepoints only."""
        return self.log is not None

    def publish(self, kind: str, text: str, **body: Any) -> None:
        """Log an event and pass it to all listeners."""
        level = logging.WARNING if kind in WARNINGS else logging.INFO
        if kind != "progress":
            fields = {"job": self.spec.name, "attempt": self.attempt or None}
            _log.log(level, "%s", text, extra={**fields, "detail": body.get("detail", "")})
        at_ms = self.clock.now_ms()
        event = PublishedEvent(kind=kind, text=text, body=json.dumps(body).encode(), at_ms=at_ms)
        for listener in list(self.listeners):
            listener(event)
