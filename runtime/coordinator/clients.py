"""Clients of a coordinator: the CLI, `job.run()`, the REST API. They ask, and may subscribe to events."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from ...errors import HeadgateError, InternalError, JobError
from ..control.link import Link
from ..control.messages import Event, Heartbeat, Reply, Request
from .context import ClientWish
from .states import HAND_OVER

EVENTS_KEPT = 200
"""Events a late subscriber still gets."""
VERBS = frozenset({"stop", "cancel", "checkpoint", "savepoint", "rescale", HAND_OVER})
"""The verbs that the states of a job carry out."""
ENDED = "the job has ended"
Arguments: TypeAlias = Mapping[str, Any]
View: TypeAlias = Callable[[Arguments], dict[str, Any]]
Before: TypeAlias = Callable[[Arguments], Awaitable[dict[str, Any] | None]]
Subscriber: TypeAlias = Callable[[Event], None]


class ClientServer:
    """Serves client links, and the REST API in the same process."""

    def __init__(
        self,
        put_event: Callable[[ClientWish], None],
        views: Mapping[str, View],
        before: Mapping[str, Before],
    ) -> None:
        """Nobody is served yet.

        Args:
            put_event: takes the wishes that the running job answers.
            views: by verb, what only reads; `status` is one of them.
            before: by verb, what is done in front of the job's own part; if it has a result, that is all.
        """
        self._put_event = put_event
        self._views = views
        self._before = before
        self._subscribers: set[Subscriber] = set()
        self._links: set[Link] = set()
        self._history: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: list[ClientWish] = []
        """Wishes without an answer yet."""
        self._ended = False

    async def serve(self, link: Link) -> None:
        """Serve one client until it hangs up."""
        self._links.add(link)
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, Request):
                    self._answer_later(link, message)
                elif not isinstance(message, Heartbeat):
                    return
        finally:
            self._links.discard(link)
            self._subscribers.discard(link.send)

    def _answer_later(self, link: Link, request: Request) -> None:
        task = asyncio.get_running_loop().create_task(
            self._answer(link, request), name=f"client {request.verb}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, link: Link, request: Request) -> None:
        try:
            body = await self._carry_out(link, request)
        except HeadgateError as error:
            link.send(Reply(id=request.id, error=_pickled(error)))
        else:
            link.send(Reply(id=request.id, body=json.dumps(body).encode()))

    async def _carry_out(self, link: Link, request: Request) -> dict[str, Any]:
        if request.verb == "subscribe":
            self.subscribe(link.send)
            return self.view("status")
        return await self.ask(request.verb, _arguments(request))

    def view(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """What a verb that only reads has to show.

        Raises:
            HeadgateError: there is no such thing.
        """
        return self._views[verb](arguments)

    async def ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do what `verb` says, and wait until it is done.

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
        wish = ClientWish(verb, asyncio.get_running_loop().create_future(), arguments)
        self._open.append(wish)
        try:
            self._put_event(wish)
            return await wish.answer
        finally:
            self._open.remove(wish)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Hand over the events that are kept, and each one from now on, until the result is called."""
        for event in self._history:
            subscriber(event)
        self._subscribers.add(subscriber)
        return lambda: self._subscribers.discard(subscriber)

    def publish(self, event: Event) -> None:
        """Send an event to all subscribers. Progress is not kept for late ones."""
        if event.kind != "progress":
            self._history.append(event)
        for subscriber in list(self._subscribers):
            subscriber(event)

    def end(self, body: dict[str, Any], error: HeadgateError | None) -> None:
        """The job is over: the last event says how, and carries the error if it failed.

        Nobody is left to hear the wishes that came while it ended.
        """
        self._ended = True
        for wish in self._open:
            wish.refuse(JobError(ENDED))
        detail = dict(body)
        if error is not None:
            detail["error"] = _pickled(error).hex()
        text = f"job ended: {body['status']}"
        self.publish(Event(kind="ended", text=text, body=json.dumps(detail).encode()))

    async def drain(self) -> None:
        """Let answers and events reach the clients."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        for link in list(self._links):
            await link.drain()


def _arguments(request: Request) -> dict[str, Any]:
    arguments = json.loads(request.body)
    if not isinstance(arguments, dict):
        raise HeadgateError(f"the arguments of a request must be an object verb=`{request.verb}`")
    return arguments


def _pickled(error: HeadgateError) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(InternalError(str(error)))
