"""The client of a coordinator in the same process: of its event loop, or of another thread's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from ..control.job_client import Connect, Event, EventQueue, HungUp, JobClient
from ..options.network import REST_EVENTS
from .clients import Clients

T = TypeVar("T")


class LocalClient:
    """Calls the coordinator, without a socket. It is a `JobClient`."""

    def __init__(self, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        """
        Args:
            clients: those of the coordinator.
            loop: in which the coordinator runs.
        """
        self._clients = clients
        self._loop = loop

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        asked = self._ask(verb, arguments)
        if asyncio.get_running_loop() is self._loop:
            return await asked
        return await self._over_there(asked)

    async def _ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        # A client that gives up waiting does not take back what it has asked for.
        task = self._clients.in_background(self._clients.ask(verb, arguments), f"client {verb}")
        return await asyncio.shield(task)

    async def _over_there(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns in the coordinator's loop."""
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
            raise HungUp from None  # the loop came to its end

    async def events(self) -> AsyncIterator[Event]:
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
            with contextlib.suppress(RuntimeError):  # that loop is closed: nothing is left of it
                self._loop.call_soon_threadsafe(unsubscribe)

        return later

    async def close(self) -> None:
        """Nothing is open."""


def connect_locally(clients: Clients) -> Connect:
    """Makes clients of a coordinator in the running loop, for all threads of this process."""
    loop = asyncio.get_running_loop()

    async def connect() -> JobClient:
        return LocalClient(clients, loop)

    return connect


class _Relayed:
    """A `Subscriber` that hands all events on to the queue of another event loop."""

    def __init__(self, queue: EventQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = queue
        self._loop = loop

    def replayed(self) -> None:
        self._call(self._queue.replayed)

    def put(self, event: Event) -> None:
        self._call(self._queue.put, event)

    def close(self) -> None:
        self._call(self._queue.close)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # that loop is closed: nobody waits for events there
            self._loop.call_soon_threadsafe(function, *arguments)
