"""What a coordinator announces: the events of its job, and the queue in which they wait for one client."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

import msgspec

BEGUN: Final = frozenset({"start", "status"})
"""Kinds of events that a coordinator announces only once the job is its own."""
WARNINGS: Final = frozenset({"failure", "dropped", "waiting"})
"""Kinds of events that are logged as warnings."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something a subscriber may want to show; `body` is JSON."""

    kind: str
    text: str
    body: bytes = b"null"


class Subscriber(Protocol):
    """Gets the events of a job: first those that are remembered, then each new one."""

    def put(self, event: Event) -> None:
        """One more event."""
        ...

    def replayed(self) -> None:
        """Those that are remembered have come."""
        ...

    def close(self) -> None:
        """No event comes any more."""
        ...


class EventQueue:
    """The events that wait for one client. `None` from `next` ends them."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self.overrun = False
        """True once the client was too slow: there is a last event that says so."""

    def replayed(self) -> None:
        """What waits now came before the client did, and does not count against it."""
        self._waiting_max += len(self._waiting)

    def put(self, event: Event) -> None:
        """One more event. If too many wait, all are dropped, and the client is told."""
        if self.overrun or self._closed:
            return
        if len(self._waiting) >= self._waiting_max:
            dropped = len(self._waiting) + 1
            self._waiting.clear()
            self.overrun = True
            text = f"this client is too slow: {dropped} events were dropped; connect again"
            event = Event(kind="overrun", text=text, body=b'{"dropped":%d}' % dropped)
        self._waiting.append(event)
        self._arrived.set()

    def close(self) -> None:
        """The job is over: what waits is still handed out."""
        self._closed = True
        self._arrived.set()

    async def next(self) -> Event | None:
        """The next event; None: there will be none."""
        while not self._waiting:
            if self.overrun or self._closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()
