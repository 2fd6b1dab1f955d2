"""What clients ask of a coordinator, and what it tells them, whichever way they come.

`rest/server.py` asks on behalf of clients in other processes, and `local_client.py` of those in this one.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from ...errors import HeadgateError, JobError
from ..control.job_client import Event, Subscriber
from ..protocol.job_result import JobFailure
from .context import ClientWish
from .states import HAND_OVER

EVENTS_KEPT = 200
"""Events a late subscriber still gets."""
VERBS = frozenset({"stop", "cancel", "checkpoint", "savepoint", "rescale", HAND_OVER})
"""The verbs that the states of a job carry out."""
ANSWER_S: Final = 5.0
"""Once the job has ended, requests under way in this process get so long to be answered."""
ENDED = "the job has ended"
T = TypeVar("T")
Arguments: TypeAlias = Mapping[str, Any]
View: TypeAlias = Callable[[Arguments], dict[str, Any]]
Before: TypeAlias = Callable[[Arguments], Awaitable[dict[str, Any] | None]]


class Clients:
    """The clients of one coordinator."""

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
        self._history: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open: list[ClientWish] = []
        """Wishes without an answer yet."""
        self._ended = False
        self._closed = False

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

    def in_background(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Do `work` whether or not somebody still waits for it; `close` waits for its end."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Hand over the events that are kept, and each one from now on, until the result is called."""
        for event in self._history:
            subscriber.put(event)
        subscriber.replayed()
        if self._closed:
            subscriber.close()
        self._subscribers.add(subscriber)
        return lambda: self._subscribers.discard(subscriber)

    @property
    def followed(self) -> bool:
        """True while somebody follows the events."""
        return bool(self._subscribers)

    def publish(self, event: Event) -> None:
        """Send an event to all subscribers. Progress is not kept for late ones."""
        if event.kind != "progress":
            self._history.append(event)
        for subscriber in list(self._subscribers):
            subscriber.put(event)

    def end(self, body: dict[str, Any], failure: JobFailure | None) -> None:
        """The job is over: the last event says how, and why if it failed.

        Nobody is left to hear the wishes that came while it ended.
        """
        self._ended = True
        for wish in self._open:
            wish.refuse(JobError(ENDED))
        detail = {**body, "error": None if failure is None else msgspec.to_builtins(failure)}
        text = f"job ended: {body['status']}"
        self.publish(Event(kind="ended", text=text, body=json.dumps(detail).encode()))

    async def close(self) -> None:
        """Let answers reach those in this process who wait for them, and end the events."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_S)
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.close()
