"""Answers of a coordinator to clients in the same loop, in another thread, and over HTTP.

All of them are a `JobClient`, and so the tests that follow are run for each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate.errors import HeadgateError, JobError, JobNotReady, UserCodeError
from headgate.operators.clock import SystemClock
from headgate.runtime.control.job_client import (
    Connect,
    HungUp,
    JobClient,
    PublishedEvent,
    outcome_of,
)
from headgate.runtime.coordinator.clients import Clients, connect_locally
from headgate.runtime.coordinator.environment import ClientCommand
from headgate.runtime.options.registry import Options
from headgate.runtime.protocol.job_result import JobFailure, JobOutcome
from headgate.runtime.rest.client import RestClient
from headgate.runtime.rest.server import RestServer

GUARD_S = 60
UNIX, TCP, LOCAL, THREAD = "unix", "tcp", "local", "thread"
Script = Callable[[JobClient], Awaitable[Any]]


class Desk:
    """A coordinator's clients, without a coordinator; the test answers their commands."""

    def __init__(self, kind: str, path: Path) -> None:
        self.commands: asyncio.Queue[ClientCommand] = asyncio.Queue()
        self.clients = Clients(self.commands.put_nowait, {"status": self._status}, {})
        self.kind = kind
        self._path = path
        self._threads = ThreadPoolExecutor(2)

    def _status(self, _: object) -> dict[str, Any]:
        return {"name": "job", "status": "RUNNING", "parallelism": 3}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Connect]:
        """Yield the factory of clients, as long as the coordinator is there."""
        rest = RestServer(self.clients, "token", Options({"rest.port": "0"}), SystemClock())
        if self.kind == UNIX:
            await rest.listen_unix(str(self._path / "rest.sock"))
        elif self.kind == TCP:
            await rest.listen()
        try:
            if rest.addresses:
                yield lambda: RestClient.connect(rest.addresses, "token")
            else:
                yield connect_locally(self.clients)
        finally:
            await self.clients.close()
            await rest.close()
            self._threads.shutdown(wait=False)  # they may need this loop to come to their end

    def use(self, connect: Connect, script: Script) -> asyncio.Future[Any]:
        """Have a client do something, in this thread or in another."""

        async def use() -> Any:
            client = await connect()
            try:
                return await script(client)
            finally:
                await client.close()

        if self.kind == THREAD:
            loop = asyncio.get_running_loop()
            return loop.run_in_executor(self._threads, lambda: asyncio.run(use()))
        return asyncio.ensure_future(use())


@pytest.fixture(params=[LOCAL, THREAD, UNIX, TCP])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    return Desk(request.param, tmp_path)


def run(desk: Desk, test: Callable[[Connect], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), desk.open() as connect:
            await test(connect)

    asyncio.run(main())


def asking(verb: str, **arguments: Any) -> Script:
    return lambda client: client.request(verb, **arguments)


def test_a_client_is_shown_what_there_is(desk: Desk) -> None:
    async def test(connect: Connect) -> None:
        status = await desk.use(connect, asking("status"))
        assert (status["name"], status["status"], status["parallelism"]) == ("job", "RUNNING", 3)

    run(desk, test)


def test_a_command_is_carried_out_with_its_arguments(desk: Desk) -> None:
    async def test(connect: Connect) -> None:
        asked = desk.use(connect, asking("stop", savepoint="/kept", drain=True))
        command = await desk.commands.get()
        assert command.verb == "stop"
        assert (command.arguments["savepoint"], command.arguments["drain"]) == ("/kept", True)
        command.done(status="SUSPENDED", checkpoint=7)
        assert await asked == {"status": "SUSPENDED", "checkpoint": 7}

    run(desk, test)


@pytest.mark.parametrize(
    "error",
    [JobError("no", fix="do this"), JobNotReady("not yet"), HeadgateError("no", where="f.py:1")],
)
def test_a_refusal_raises_the_same_error_everywhere(desk: Desk, error: HeadgateError) -> None:
    async def test(connect: Connect) -> None:
        asked = desk.use(connect, asking("hand-over"))
        (await desk.commands.get()).refuse(error)
        with pytest.raises(HeadgateError) as refused:
            await asked
        assert (type(refused.value), str(refused.value)) == (type(error), str(error))

    run(desk, test)


def test_what_nobody_knows_is_refused(desk: Desk) -> None:
    async def test(connect: Connect) -> None:
        with pytest.raises(HeadgateError, match="unknown request verb=`dance`"):
            await desk.use(connect, asking("dance"))

    run(desk, test)


def test_a_command_that_the_job_did_not_live_to_hear_is_refused(desk: Desk) -> None:
    async def test(connect: Connect) -> None:
        stopped = desk.use(connect, asking("stop"))
        granted = await desk.commands.get()
        late = desk.use(connect, asking("checkpoint"))
        await desk.commands.get()
        granted.done(status="SUSPENDED")
        desk.clients.end({"status": "SUSPENDED"}, None)
        assert await stopped == {"status": "SUSPENDED"}
        for asked in (late, desk.use(connect, asking("cancel"))):
            with pytest.raises(JobError, match="the job has ended"):
                await asked

    run(desk, test)


def test_the_events_come_in_order_and_end_with_the_coordinator(desk: Desk) -> None:
    async def follow(client: JobClient) -> list[tuple[str, Any]]:
        return [(e.text, json.loads(e.body)) async for e in client.events()]

    async def test(connect: Connect) -> None:
        desk.clients.publish(PublishedEvent(kind="status", text="before", body=b'{"n": 1}'))
        desk.clients.publish(PublishedEvent(kind="progress", text="not kept"))
        following = desk.use(connect, follow)
        while not desk.clients.followed:  # noqa: ASYNC110  nothing tells of a new follower
            await asyncio.sleep(0)
        desk.clients.publish(PublishedEvent(kind="progress", text="now"))
        desk.clients.end({"status": "FINISHED", "reason": ""}, None)
        ended.set_result(following)

    ended: asyncio.Future[Any]

    async def main() -> None:
        nonlocal ended
        ended = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(GUARD_S):
            async with desk.open() as connect:
                await test(connect)
            told = await (await ended)
        assert told[:2] == [("before", {"n": 1}), ("now", None)]
        assert [text for text, _ in told[2:]] == ["job ended: FINISHED"]

    asyncio.run(main())


def test_the_end_of_a_failed_job_brings_its_error_as_data(desk: Desk) -> None:
    """The type, the message and the traceback of the user's function; but no object of a user's type."""
    broken = UserCodeError(
        "ValueError: no", where="job.py:3", fix="mend it", detail="Traceback ..."
    )

    async def follow(client: JobClient) -> JobOutcome:
        async for event in client.events():
            if event.kind == "ended":
                return outcome_of(event)
        raise AssertionError("nobody said how it ended")

    async def test(connect: Connect) -> None:
        outcome = JobOutcome("FAILED", "it broke", broken, checkpoint=3, run="r", restarts=2)
        failure = JobFailure.of("user_code", "it broke", "map", broken)
        desk.clients.end(outcome.as_json(), failure)
        told = await desk.use(connect, follow)
        assert told.error is not None
        assert type(told.error) is UserCodeError
        assert str(told.error) == str(broken)
        assert told.error.detail == "Traceback ..."
        assert told.as_json() == outcome.as_json()

    run(desk, test)


def test_a_coordinator_that_is_gone_hangs_up(desk: Desk) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            async with desk.open() as connect:
                client = await connect()
                kept.append(client)
            if desk.kind in (UNIX, TCP):
                with pytest.raises(HungUp, match="does not answer"):
                    await client.request("status")
                with pytest.raises(JobError, match="the coordinator does not answer"):
                    await connect()
            await client.close()

    kept: list[JobClient] = []
    asyncio.run(main())
    if desk.kind == LOCAL:  # its loop is closed by now
        with pytest.raises(HungUp):
            asyncio.run(kept[0].request("status"))


def test_an_address_that_nobody_listens_at_is_passed_over(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(UNIX, tmp_path)
        async with asyncio.timeout(GUARD_S), desk.open():
            nobody = f"unix:{tmp_path}/nobody.sock"
            there = f"unix:{tmp_path}/rest.sock"
            client = await RestClient.connect([nobody, there], "token")
            assert (await client.request("status"))["name"] == "job"
            await client.close()
            with pytest.raises(JobError, match="does not answer: unix:.*nobody"):
                await RestClient.connect([nobody], "token")

    asyncio.run(main())
