"""The status of a job is made for those who look at it: that of a large job takes time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.operators.clock import SystemClock
from headgate.runtime.cluster.host import CoordinatorPlace, host_coordinator
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.control.job_client import EventQueue
from headgate.runtime.coordinator import job as coordinators
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.storage.open_store import open_store


def test_progress_is_described_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    described = 0
    looked = asyncio.Semaphore(0)
    describe, look = coordinators.describe, coordinators.Watchdog.look

    def counting(context: Any) -> dict[str, Any]:
        nonlocal described
        described += 1
        return describe(context)

    def watching(watchdog: Any) -> None:
        look(watchdog)
        if watchdog._job.works:
            looked.release()

    monkeypatch.setattr(coordinators, "PROGRESS_S", 0.001)
    monkeypatch.setattr(coordinators, "describe", counting)
    monkeypatch.setattr(coordinators.Watchdog, "look", watching)

    async def main() -> None:
        job = hg.Job("endless")
        job.read(numbers(rate=100), name="in").write(blackhole(), name="out")
        listening: asyncio.Future[JobCoordinator] = asyncio.get_running_loop().create_future()
        clock = SystemClock()
        cluster = InProcessCluster(clock=clock, open_store=open_store)
        hosted = asyncio.create_task(
            host_coordinator(
                runnable(job).spec(),
                cluster,
                CoordinatorPlace(clock, "here"),
                open_store=open_store,
                on_listening=listening.set_result,
            )
        )
        await asyncio.wait({hosted, listening}, return_when=asyncio.FIRST_COMPLETED)
        clients = listening.result().clients
        for _ in range(20):
            await looked.acquire()
        assert described == 0
        queue = EventQueue(1000)
        unsubscribe = clients.subscribe(queue)
        while (event := await queue.next()) is not None and event.kind != "progress":
            pass
        assert event is not None
        unsubscribe()
        assert described > 0
        await clients.ask("cancel", {})
        await hosted
        await cluster.close()

    asyncio.run(asyncio.wait_for(main(), 120))
