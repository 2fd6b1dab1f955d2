"""A cluster of real worker processes, without Ray: started by the test, and killed with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headgate.operators.clock import SystemClock
from headgate.runtime.control.cluster import ControlEndpoint
from headgate.runtime.control.messages import Event
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.storage.open_store import open_store

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

    async def start_worker(self, worker_id: str, control: ControlEndpoint) -> ProcessWorker:
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
        self.events: list[Event] = []
        self.task = asyncio.ensure_future(coordinator.run())
        coordinator.on_event = self._heard
        self._news = asyncio.Event()
        self.task.add_done_callback(lambda _: self._news.set())

    def _heard(self, event: Event) -> None:
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
async def on_processes(spec: Any, directory: Path) -> AsyncIterator[OnProcesses]:
    """Run a job on worker processes; leaves none behind."""
    cluster = ProcessCluster(directory)
    coordinator = JobCoordinator(spec, cluster=cluster, clock=SystemClock(), open_store=open_store)
    await coordinator.server.listen(None)
    running = OnProcesses(coordinator, cluster)
    try:
        yield running
    finally:
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        await coordinator.close()
        await cluster.close()
