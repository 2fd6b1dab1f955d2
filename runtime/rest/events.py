"""The events of a job as server-sent events, for clients that follow them; each has its own bound."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from ..control.messages import Event


class EventQueue:
    """The events that wait for one client. `None` from `next` ends the stream."""

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


def encode(event: Event) -> bytes:
    """An event as a server-sent event: its kind, and as data an object of its text and its body."""
    body = _without_pickles(event)
    data = msgspec.json.encode({"text": event.text, "body": body})
    return b"event: %s\ndata: %s\n\n" % (event.kind.encode(), data)


def _without_pickles(event: Event) -> object:
    """The body, without the pickled error that the control port sends with the end of a job."""
    body = msgspec.json.decode(event.body)
    return {k: v for k, v in body.items() if k != "error"} if isinstance(body, dict) else body
