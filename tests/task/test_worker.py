"""A worker between its coordinator and what it hosts (runtime/worker/worker.py)."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from headgate.errors import StorageError
from headgate.runtime.control.link import MemoryLink
from headgate.runtime.control.messages import (
    Cancel,
    Cancelled,
    Deploy,
    DeployCommon,
    Heartbeat,
    Hello,
    SubtaskFailed,
    Welcome,
)
from headgate.runtime.exchange.hub import ExchangeHub
from headgate.runtime.observe.metrics import MetricsRegistry
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.open_store import open_store
from headgate.runtime.worker import worker as module
from headgate.runtime.worker.worker import Worker
from headgate.tests.support.clocks import MovedClock

DEADLINE_S = 120


class Hosted:
    """A worker under way, and the coordinator's end of its link."""

    def __init__(self):
        self.clock = MovedClock()
        self.link, far = MemoryLink.pair()
        self.hub = ExchangeHub("w", "token")
        self.worker = Worker(
            "w",
            far,
            self.hub,
            token="token",
            clock=self.clock,
            open_store=open_store,
            metrics=MetricsRegistry(),
        )
        self.task = asyncio.ensure_future(self.worker.run(b""))

    async def greeted(self):
        assert isinstance(await self.link.receive(), Hello)
        self.link.send(Welcome(job_name="job", heartbeat_interval_ms=1, heartbeat_timeout_ms=1000))
        assert isinstance(await self.link.receive(), Heartbeat)

    async def end(self):
        self.link.close()
        await self.task


def deploy(storage=""):
    common, size = DeployCommon(job=b"", workers=(), slots={}, settings={}).packed()
    return Deploy(
        attempt=1,
        generation=1,
        plan="",
        common=common,
        common_size=size,
        subtasks=(),
        storage=storage,
    )


def run(main):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            hosted = Hosted()
            await hosted.greeted()
            await main(hosted)

    asyncio.run(bounded())


def test_a_slow_end_of_an_attempt_is_no_silence_of_the_coordinator():
    """While it waits for threads it reads no messages, so it cannot say that there were none."""

    async def main(hosted):
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def cancel():
            begun.set()
            await go_on.wait()

        hosted.worker._regions.add(
            SimpleNamespace(attempt=1, region=0, started=False, subtasks=(), cancel=cancel)
        )
        hosted.link.send(Cancel(attempt=1))
        await begun.wait()
        hosted.clock.now_s += 10
        hosted.link._inbox.clear()
        for _ in range(3):  # each is a look at the time
            assert isinstance(await hosted.link.receive(), Heartbeat)
        go_on.set()
        answers = []
        while not answers or answers[-1] == Heartbeat():
            answers.append(await hosted.link.receive())
        assert answers[-1] == Cancelled(attempt=1)
        for _ in range(3):
            assert isinstance(await hosted.link.receive(), Heartbeat)
        await hosted.end()

    run(main)


def test_a_coordinator_that_says_nothing_is_given_up():
    async def main(hosted):
        hosted.clock.now_s += 10
        while await hosted.link.receive() is not None:
            pass
        await hosted.task

    run(main)


def test_a_worker_that_nobody_welcomes_closes_its_listeners():
    async def main():
        async with asyncio.timeout(DEADLINE_S):
            hosted = Hosted()
            address = await hosted.hub.start(None)
            hosted.link.close()
            await hosted.task
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(address.host, address.tcp_port)

    asyncio.run(main())


def test_a_store_that_could_not_be_opened_is_closed():
    """It may have begun to connect."""

    async def main(hosted):
        log = []

        class Store(MemoryStore):
            async def open(self, *, writable=True):
                raise StorageError("no such bucket")

            async def close(self):
                log.append("closed")

        hosted.worker._open_store = lambda address, job, options: Store(address, {})
        hosted.link.send(deploy(storage="memory://s"))
        while not isinstance(answer := await hosted.link.receive(), SubtaskFailed):
            pass
        assert "no such bucket" in answer.text
        assert log == ["closed"]
        await hosted.end()

    run(main)


def test_local_directories_made_for_a_cancelled_attempt_are_not_forgotten(monkeypatch):
    made, go_on, closed = threading.Event(), threading.Event(), []

    class Directories:
        def __init__(self, bases, worker_id):
            made.set()
            go_on.wait(DEADLINE_S)

        def close(self):
            closed.append(self)

    monkeypatch.setattr(module, "LocalDirectories", Directories)

    async def main(hosted):
        hosted.link.send(deploy())
        await asyncio.to_thread(made.wait, DEADLINE_S)
        hosted.link.send(Cancel(attempt=1))
        while not next(iter(hosted.worker._regions._tasks)).cancelling():  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0)
        go_on.set()
        while await hosted.link.receive() != Cancelled(attempt=1):
            pass
        await hosted.end()
        assert len(closed) == 1

    run(main)
