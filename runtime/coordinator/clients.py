"""Clients of a coordinator: the CLI and `job.run()`. They ask, and they may subscribe to events."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

from ...errors import HeadgateError, InternalError, JobError
from ..control.link import Link
from ..control.messages import Event, Heartbeat, Reply, Request
from .context import ClientWish
from .states import HAND_OVER

EVENTS_KEPT = 200
"""Events a late subscriber still gets."""
VERBS = frozenset({"stop", "cancel", "checkpoint", "savepoint", "rescale", HAND_OVER})


ENDED = "the job has ended"


class ClientServer:
    """Serves client links."""

    def __init__(
        self,
        put_event: Callable[[ClientWish], None],
        describe: Callable[[], dict[str, Any]],
        checkpoints: Callable[[int | None], dict[str, Any]],
    ) -> None:
        """Nobody is served yet.

        Args:
            put_event: takes the wishes that the running job answers.
            describe: the status of the job.
            checkpoints: the statistics of its checkpoints, or of one.
        """
        self._put_event = put_event
        self._describe = describe
        self._checkpoints = checkpoints
        self._subscribers: set[Link] = set()
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
            self._subscribers.discard(link)

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
        if request.verb == "status":
            return self._describe()
        if request.verb == "checkpoints":
            wanted = _arguments(request).get("id")
            return self._checkpoints(None if wanted is None else int(wanted))
        if request.verb == "subscribe":
            for event in self._history:
                link.send(event)
            self._subscribers.add(link)
            return self._describe()
        if request.verb not in VERBS:
            raise HeadgateError(f"unknown request verb=`{request.verb}`")
        if self._ended:
            raise JobError(ENDED)
        wish = ClientWish(
            request.verb, asyncio.get_running_loop().create_future(), _arguments(request)
        )
        self._open.append(wish)
        try:
            self._put_event(wish)
            return await wish.answer
        finally:
            self._open.remove(wish)

    def publish(self, event: Event) -> None:
        """Send an event to all subscribers. Progress is not kept for late ones."""
        if event.kind != "progress":
            self._history.append(event)
        for link in self._subscribers:
            link.send(event)

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
