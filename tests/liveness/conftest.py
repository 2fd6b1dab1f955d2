"""Jobs in virtual time; and a cluster of real worker processes, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.operators.clock import Clock, SystemClock
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.control.cluster import ControlEndpoint
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.runtime.storage.open_store import open_store
from headgate.testing.loop import VirtualClock, VirtualLoop

LONG_S = 100_000.0
MAIN = Path(__file__).parent / "worker_process.py"


class ProcessWorker:
    """A worker in a process of its own."""

    def __init__(self, worker_id: str, process: asyncio.subprocess.Process) -> None:
        self.worker_id = worker_id
        self.process = process

    async def died(self) -> str:
        return f"exit code {await self.process.wait()}"

    def kill(self, pid: int = 0) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)


class ProcessCluster:
    """Starts workers as processes; what they log is in files of `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[ProcessWorker] = []

    async def start_worker(
        self, worker_id: str, control: ControlEndpoint, group: str
    ) -> ProcessWorker:
        with self.log_of(worker_id).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(MAIN), worker_id, control.token, *control.addresses),
                stderr=log,
            )
        self.workers.append(ProcessWorker(worker_id, process))
        return self.workers[-1]

    def log_of(self, worker_id: str) -> Path:
        return self.directory / f"{worker_id}.log"

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            await worker.died()


class OnProcesses:
    """A job under way, and what it announced."""

    def __init__(self, coordinator: JobCoordinator, cluster: ProcessCluster) -> None:
        self.coordinator = coordinator
        self.cluster = cluster
        self.events: list[PublishedEvent] = []
        self.task = asyncio.ensure_future(coordinator.run())
        coordinator.on_event = self._heard
        self._news = asyncio.Event()
        self.task.add_done_callback(lambda _: self._news.set())

    def _heard(self, event: PublishedEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, kind: str) -> dict[str, Any]:
        """The body of the first event of this kind, with its text."""
        while True:
            for event in self.events:
                if event.kind == kind:
                    return {**json.loads(event.body), "text": event.text}
            assert not self.task.done(), f"the job ended before {kind}"
            self._news.clear()
            await self._news.wait()

    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]


@contextlib.asynccontextmanager
async def on_processes(
    spec: Any, directory: Path, clock: Clock | None = None
) -> AsyncIterator[OnProcesses]:
    """Run a job on worker processes; leaves none behind. `clock` is the coordinator's."""
    cluster, clock = ProcessCluster(directory), clock or SystemClock()
    coordinator = JobCoordinator(spec, cluster=cluster, clock=clock, open_store=open_store)
    await coordinator.server.listen(None)
    running = OnProcesses(coordinator, cluster)
    try:
        yield running
    finally:
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        await coordinator.close()
        await cluster.close()


class Virtual:
    """Runs a job on one worker, in virtual time."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(0)
        self.events: list[PublishedEvent] = []

    def run(self, job: hg.Job) -> JobOutcome:
        clock = VirtualClock(self.loop)
        cluster = InProcessCluster(clock=clock, open_store=open_store)
        coordinator = JobCoordinator(
            replace(runnable(job).spec(), slots_per_worker=8),
            cluster=cluster,
            clock=clock,
            open_store=open_store,
        )
        coordinator.on_event = self.events.append
        task = self.loop.create_task(coordinator.run())
        task.add_done_callback(lambda _: self.loop.stop())
        self.loop.drive(LONG_S)
        return task.result()

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Kind and text of each."""
        return [
            (json.loads(event.body)["failure"], event.text)
            for event in self.events
            if event.kind == "failure"
        ]


@pytest.fixture
def virtual() -> Iterator[Virtual]:
    virtual = Virtual()
    asyncio.set_event_loop(virtual.loop)
    yield virtual
    asyncio.set_event_loop(None)
    virtual.loop.close()
