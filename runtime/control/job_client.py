"""A coordinator as its clients see it, and the events by which it announces what happens to its job.

There are two ways to it. `rest/client.py` speaks HTTP, from any process; `LocalClient`
calls the coordinator of the same process.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from ...errors import HeadgateError, JobError
from ..protocol.job_result import JobFailure, JobOutcome

BEGUN: Final = frozenset({"start", "status"})
"""The kinds of events that a coordinator publishes only once it leads."""
WARNINGS: Final = frozenset({"failure", "dropped", "waiting"})
"""Kinds of events that are logged as warnings."""
ENDED: Final = "the job has ended"
"""The error of a request that comes while a coordinator ends, or later."""
FENCED: Final = "fenced"
"""The reason in the last event of a coordinator that another one has replaced."""


class HungUp(JobError):
    """The coordinator went away before it answered: it may have done what it was asked for, or not."""

    def __init__(
        self,
        message: str = "the coordinator hung up",
        *,
        fix: str = "ask again in a moment: a job that has not ended has another coordinator soon",
    ) -> None:
        super().__init__(message, fix=fix)


class Silent(HungUp):
    """The coordinator did not answer in time: it may be there, and hang."""


class JobClient(Protocol):
    """One coordinator, for one client."""

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for the answer, however long it takes.

        Args:
            verb: `status`, `checkpoints`, `subtasks`, `config`, `plan` and `metrics` only read; `stop`,
                `cancel`, `checkpoint`, `savepoint`, `rescale`, `dispose` and `hand-over` are commands.
            arguments: the arguments of the verb; JSON values.

        Raises:
            HungUp: the coordinator went away.
            HeadgateError: the coordinator refused, or failed to do it.
        """
        ...

    def events(self) -> AsyncIterator[PublishedEvent]:
        """Yield the events that are remembered, then each new one, until the coordinator goes away.

        Raises:
            HungUp: it went away before the job ended.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


Connect: TypeAlias = Callable[[], Awaitable[JobClient]]
"""Makes a client. Raises JobError if the coordinator cannot be reached."""


class ConnectListener(Protocol):
    """Is called with a function that connects, each time a coordinator begins to listen."""

    def __call__(self, connect: Connect, /) -> None: ...


async def ask_once(connect: Connect, verb: str, **arguments: Any) -> dict[str, Any]:
    """Connect, send one request, wait for the answer, and close. Raises as `JobClient.request`."""
    client = await connect()
    try:
        return await client.request(verb, **arguments)
    finally:
        await client.close()


async def watch(client: JobClient, on_event: EventListener | None = None) -> JobOutcome | None:
    """Pass events on until the job ends; return None if the coordinator went away before."""
    try:
        async for event in client.events():
            if on_event is not None:
                on_event(event)
            if event.kind == "ended":
                return outcome_of(event)
    except JobError:
        return None
    return None


def outcome_of(event: PublishedEvent) -> JobOutcome:
    """Return the outcome of the job from an `ended` event."""
    body = json.loads(event.body)
    return JobOutcome.of_json(body, _error_of(body))


def _error_of(body: Mapping[str, Any]) -> HeadgateError | None:
    if body.get("error") is None:
        return None
    return msgspec.convert(body["error"], JobFailure).as_error()


class PublishedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a subscriber may want to show; `body` is JSON."""

    kind: str
    text: str
    body: bytes = b"null"
    at_ms: int | None = None
    """When it happened, in ms since the epoch; None: that is not known."""


class EventListener(Protocol):
    """Is called with each event of a job, in the process that hosts its coordinator."""

    def __call__(self, event: PublishedEvent, /) -> None: ...


class Subscriber(Protocol):
    """Gets the events of a job: first those that are remembered, then each new one."""

    def put(self, event: PublishedEvent) -> None:
        """Take an event."""
        ...

    def replayed(self) -> None:
        """Note that all remembered events have been put."""
        ...

    def close(self) -> None:
        """Note that no event will come any more."""
        ...


class EventQueue:
    """The events that wait for one client. `None` from `next` ends them."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting: deque[PublishedEvent] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self.overrun = False
        """True once the client was too slow: there is a last event that says so."""

    def replayed(self) -> None:
        """Note that the waiting events are from before the client came, and do not count against it."""
        self._waiting_max += len(self._waiting)

    def put(self, event: PublishedEvent) -> None:
        """Add an event. If too many wait, all are dropped, and a last event says so."""
        if self.overrun or self._closed:
            return
        if len(self._waiting) >= self._waiting_max:
            dropped = len(self._waiting) + 1
            self._waiting.clear()
            self.overrun = True
            text = f"this client is too slow: {dropped} events were dropped; connect again"
            event = PublishedEvent(kind="overrun", text=text, body=b'{"dropped":%d}' % dropped)
        self._waiting.append(event)
        self._arrived.set()

    def close(self) -> None:
        """End the queue, since the job is over; waiting events are still handed out."""
        self._closed = True
        self._arrived.set()

    async def next(self) -> PublishedEvent | None:
        """Return the next event; None: there will be none."""
        while not self._waiting:
            if self.overrun or self._closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()
