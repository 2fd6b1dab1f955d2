"""The clients of a coordinator: their requests, the answers, and the events that they follow.

`rest/server.py` passes on the requests of clients in other processes, and `LocalClient` those of clients in
the same process, in its event loop or in that of another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from ...errors import HeadgateError, JobError
from ..control.job_client import (
    ENDED,
    Connect,
    EventQueue,
    HungUp,
    JobClient,
    PublishedEvent,
    Subscriber,
)
from ..options.network import REST_EVENTS
from ..protocol.job_result import JobFailure
from .environment import HAND_OVER, ClientCommand, PutEvent

EVENTS_KEPT = 200
"""Events a late subscriber still gets."""
VERBS = frozenset({"stop", "cancel", "checkpoint", "savepoint", "rescale", HAND_OVER})
"""The verbs that the states of a job carry out."""
ANSWER_S: Final = 5.0
"""The time in which requests of this process are still answered once the job has ended."""
T = TypeVar("T")
Arguments: TypeAlias = Mapping[str, Any]
View: TypeAlias = Callable[[Arguments], dict[str, Any]]
Before: TypeAlias = Callable[[Arguments], Awaitable[dict[str, Any] | None]]


class Clients:
    """The clients of one coordinator."""

    def __init__(
        self,
        put_event: PutEvent,
        views: Mapping[str, View],
        before: Mapping[str, Before],
    ) -> None:
        """
        Args:
            put_event: takes the commands that the running job answers.
            views: functions that only read, by verb; `status` is one of them.
            before: functions that are called before the job carries a verb out; a result of theirs is
                the answer.
        """
        self._put_event = put_event
        self._views = views
        self._before = before
        self._subscribers: set[Subscriber] = set()
        self._history: deque[PublishedEvent] = deque(maxlen=EVENTS_KEPT)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open: list[ClientCommand] = []
        """Commands without an answer yet."""
        self._ended = False
        self._closed = False

    def view(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Return the result of a verb that only reads.

        Raises:
            HeadgateError: what the arguments name does not exist.
        """
        return self._views[verb](arguments)

    async def ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry a verb out and return its result.

        Raises:
            HeadgateError: the job refuses, has ended, or there is no such verb.
        """
        if verb in self._views:
            return self.view(verb, **arguments)
        before = self._before.get(verb)
        if before is None and verb not in VERBS:
            raise HeadgateError(f"unknown request verb=`{verb}`")
        if before is not None and (done := await before(arguments)) is not None:
            return done
        if self._ended:
            raise JobError(ENDED)
        command = ClientCommand(verb, asyncio.get_running_loop().create_future(), arguments)
        self._open.append(command)
        try:
            self._put_event(command)
            return await command.answer
        finally:
            self._open.remove(command)

    def in_background(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Do `work` even if its client stops waiting; `close` waits for its end."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Pass on the kept events, and each one from now on, until the returned function is called."""
        for event in self._history:
            subscriber.put(event)
        subscriber.replayed()
        if self._closed:
            subscriber.close()
        self._subscribers.add(subscriber)
        return lambda: self._subscribers.discard(subscriber)

    @property
    def followed(self) -> bool:
        """True while a client follows the events."""
        return bool(self._subscribers)

    def publish(self, event: PublishedEvent) -> None:
        """Send an event to all subscribers. Progress is not kept for late ones."""
        if event.kind != "progress":
            self._history.append(event)
        for subscriber in list(self._subscribers):
            subscriber.put(event)

    def end(self, body: dict[str, Any], failure: JobFailure | None) -> None:
        """Publish the last event: how the job ended, and why if it failed.

        Commands that came while it ended are refused.
        """
        self._ended = True
        for command in self._open:
            command.refuse(JobError(ENDED))
        detail = {**body, "error": None if failure is None else msgspec.to_builtins(failure)}
        text = f"job ended: {body['status']}"
        self.publish(PublishedEvent(kind="ended", text=text, body=json.dumps(detail).encode()))

    async def close(self) -> None:
        """Wait until requests of this process are answered, and end the events."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_S)
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.close()


class LocalClient:
    """A client in the same process, without a socket; a `JobClient`."""

    def __init__(self, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        """
        Args:
            clients: the clients of the coordinator.
            loop: the event loop of the coordinator.
        """
        self._clients = clients
        self._loop = loop

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        asked = self._ask(verb, arguments)
        if asyncio.get_running_loop() is self._loop:
            return await asked
        return await self._over_there(asked)

    async def _ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        # A client that stops waiting does not revoke its request.
        task = self._clients.in_background(self._clients.ask(verb, arguments), f"client {verb}")
        return await asyncio.shield(task)

    async def _over_there(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop of the coordinator and return its result."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise HungUp from None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise HungUp from None  # the loop was closed

    async def events(self) -> AsyncIterator[PublishedEvent]:
        queue = EventQueue(REST_EVENTS.default)
        if asyncio.get_running_loop() is self._loop:
            unsubscribe = self._clients.subscribe(queue)
        else:
            unsubscribe = await self._subscribe_over_there(queue)
        try:
            while (event := await queue.next()) is not None:
                yield event
        finally:
            unsubscribe()

    async def _subscribe_over_there(self, queue: EventQueue) -> Callable[[], None]:
        relayed = _Relayed(queue, asyncio.get_running_loop())

        async def subscribe() -> Callable[[], None]:
            return self._clients.subscribe(relayed)

        unsubscribe = await self._over_there(subscribe())

        def later() -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                self._loop.call_soon_threadsafe(unsubscribe)

        return later

    async def close(self) -> None:
        """Do nothing: no connection is open."""


def connect_locally(clients: Clients) -> Connect:
    """Return a function that makes clients of a coordinator in the running loop, for all threads."""
    loop = asyncio.get_running_loop()

    async def connect() -> JobClient:
        return LocalClient(clients, loop)

    return connect


class _Relayed:
    """A `Subscriber` that passes all events to the queue of another event loop."""

    def __init__(self, queue: EventQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = queue
        self._loop = loop

    def replayed(self) -> None:
        self._call(self._queue.replayed)

    def put(self, event: PublishedEvent) -> None:
        self._call(self._queue.put, event)

    def close(self) -> None:
        self._call(self._queue.close)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # that loop is closed, with its clients
            self._loop.call_soon_threadsafe(function, *arguments)
