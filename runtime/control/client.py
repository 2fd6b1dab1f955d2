"""The client's side of a control connection: the CLI and `job.run()` talk to a coordinator with it."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ...errors import HeadgateError, JobError
from ..protocol.job_result import JobOutcome
from .link import Link, connect
from .messages import Event, Hello, Reply, Request


class HungUp(JobError):
    """The coordinator went away before it answered: it may have done what it was asked for, or not."""

    def __init__(self) -> None:
        super().__init__(
            "the coordinator hung up",
            fix="ask again in a moment: a job that has not ended has another coordinator soon",
        )


class CoordinatorClient:
    """One connection to a coordinator. `events` yields what happens there, after `subscribe`."""

    def __init__(self, link: Link, token: str) -> None:
        self._link = link
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._next_id = 0
        link.send(Hello(token=token, role="client", pid=os.getpid()))
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="client")

    @classmethod
    async def connect(cls, addresses: Sequence[str], token: str) -> CoordinatorClient:
        """Connect to the first address that answers.

        Raises:
            JobError: none does.
        """
        problems: list[str] = []
        for address in addresses:
            try:
                return cls(await connect(address), token)
            except OSError as error:
                problems.append(f"{address}: {error}")
        raise JobError(
            f"the coordinator does not answer: {'; '.join(problems)}",
            fix="is the job still running? `headgate list` shows those that are",
        )

    async def _read(self) -> None:
        try:
            while (message := await self._link.receive()) is not None:
                if isinstance(message, Reply):
                    self._settle(message)
                elif isinstance(message, Event):
                    self._events.put_nowait(message)
        finally:
            self._events.put_nowait(None)
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(HungUp())

    def _settle(self, reply: Reply) -> None:
        future = self._replies.pop(reply.id, None)
        if future is None or future.done():
            return
        if reply.error:
            future.set_exception(pickle.loads(reply.error))
        else:
            future.set_result(json.loads(reply.body))

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer. The arguments are JSON values.

        Raises:
            HeadgateError: the coordinator refused, or hung up.
        """
        self._next_id += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[self._next_id] = future
        if self._reader.done():
            raise HungUp
        body = json.dumps(arguments).encode()
        self._link.send(Request(id=self._next_id, verb=verb, body=body))
        return await future

    async def events(self) -> AsyncIterator[Event]:
        """Subscribe, and yield events until the coordinator hangs up."""
        await self.request("subscribe")
        while (event := await self._events.get()) is not None:
            yield event

    async def close(self) -> None:
        """Hang up."""
        self._link.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


def outcome_of(event: Event) -> JobOutcome:
    """The outcome of the job, from an `ended` event."""
    body = json.loads(event.body)
    return JobOutcome.of_json(body, _error_of(body))


def _error_of(body: dict[str, Any]) -> HeadgateError | None:
    if "error" not in body:
        return None
    error = pickle.loads(bytes.fromhex(body["error"]))
    return error if isinstance(error, HeadgateError) else JobError(str(error))
