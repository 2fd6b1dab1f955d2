"""The changes of a key as server-sent events: what the server writes, and what a client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec

from ...errors import HeadgateError, JobError, JobNotReady
from ..control.job_client import ENDED
from .answers import Problem, error_of, problem_of
from .state_answers import ChangesAnswer

CHANGE, ENDS, PROBLEM = "change", "ended", "problem"
Find = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class Changes:
    """The changes of some keys for one client, as texts of a stream.

    Args:
        find: asks the coordinator for the changes since a position (`find_changes`).
        given: what the client asks for; `after` is the id of the last event that it got.
        interval_s: the time between two looks.
        keep_alive_s: after this time without a change a comment with the position is written.
    """

    def __init__(
        self, find: Find, given: Mapping[str, Any], interval_s: float, keep_alive_s: float
    ) -> None:
        self._find, self._given = find, given
        self._interval_s, self._keep_alive_s = interval_s, keep_alive_s
        self._after = str(given.get("after", ""))

    async def first(self) -> bytes:
        """Return the beginning of the stream.

        Raises:
            HeadgateError: the client cannot have what it asks for. That the job is not ready is no error.
        """
        try:
            return await self._look() or self._comment()
        except JobNotReady:
            return self._comment()

    async def texts(self) -> AsyncIterator[bytes]:
        """Yield what comes next, until the job has ended or cannot answer; empty texts in between."""
        loop = asyncio.get_running_loop()
        quiet_since = loop.time()
        while True:
            await asyncio.sleep(self._interval_s)
            data = b""
            try:
                data = await self._look()
            except JobNotReady:
                pass  # it restarts, or its next checkpoint has the values
            except HeadgateError as error:
                ended = isinstance(error, JobError) and error.message == ENDED
                yield _event(ENDS if ended else PROBLEM, msgspec.json.encode(problem_of(error)))
                return
            if not data and loop.time() - quiet_since >= self._keep_alive_s:
                data = self._comment()
            if data:
                quiet_since = loop.time()
            yield data

    async def _look(self) -> bytes:
        """Return the event of what has changed; empty: nothing."""
        found = await self._find({**self._given, "after": self._after})
        answer = msgspec.convert(found, ChangesAnswer)
        self._after = answer.id
        return _event(CHANGE, msgspec.json.encode(answer), answer.id) if answer.rows else b""

    def _comment(self) -> bytes:
        """Return what shows that the stream goes on; a client that knows ids keeps the position."""
        place = f"id: {self._after}\n" if self._after else ""
        return f"{place}: no change\n\n".encode()


def _event(kind: str, data: bytes, id_: str = "") -> bytes:
    place = f"id: {id_}\n" if id_ else ""
    return b"%sevent: %s\ndata: %s\n\n" % (place.encode(), kind.encode(), data)


class ChangesReader:
    """Reads the lines of such a stream.

    Attributes:
        after: the position with which a client goes on.
        ended: True once the job has ended.
    """

    def __init__(self, after: str) -> None:
        self.after = after
        self.ended = False
        self._kind, self._id = "", after

    def read(self, line: str) -> ChangesAnswer | None:
        """Return the change that a line has.

        Raises:
            HeadgateError: the stream ends, since the job cannot answer.
        """
        field, _, value = line.partition(": ")
        if field == "event":
            self._kind = value
        elif field == "id":
            self._id = value
        elif not line:
            self.after = self._id  # not before the whole event is here
        elif field == "data" and self._kind == ENDS:
            self.ended = True
        elif field == "data":
            found = self._data(value)
            self.after = self._id = found.id
            return found
        return None

    def _data(self, text: str) -> ChangesAnswer:
        try:
            if self._kind == PROBLEM:
                raise error_of(msgspec.json.decode(text, type=Problem))
            return msgspec.json.decode(text, type=ChangesAnswer)
        except msgspec.DecodeError as error:
            raise JobError(f"this is no event of a REST API of headgate: {error}") from None
