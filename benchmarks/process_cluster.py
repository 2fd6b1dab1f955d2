"""A cluster for benchmarks whose workers are processes of this machine, forked in milliseconds.

As on Ray each worker has a process, an event loop and sockets of its own; only what starts it differs. The
coordinators run in the event loop of the benchmark, which asks them directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess

import uvloop

from headgate.errors import JobError
from headgate.operators.clock import SystemClock
from headgate.runtime.cluster.host import CoordinatorPlace, host_coordinator
from headgate.runtime.cluster.process import tune_process
from headgate.runtime.control.cluster import ControlEndpoint
from headgate.runtime.control.job_client import JobClient
from headgate.runtime.control.link import connect
from headgate.runtime.coordinator.clients import LocalClient
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.exchange.hub import ExchangeHub
from headgate.runtime.job import Job, runnable
from headgate.runtime.observe.metrics import MetricsRegistry
from headgate.runtime.storage.open_store import open_store
from headgate.runtime.worker.worker import Worker

# Forked from a process that has imported this module, and has no threads. It looks for modules where its
# environment says, not where this process does.
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        __name__,
        "headgate.api.keyed_stream",
        "headgate.operators.aggregation.reduce",
        "headgate.operators.aggregation.running_aggregate",
        "pandas",
    ]
)
START_S = 120.0
"""A job that has no record at its last step by then is given up."""


class ProcessWorker:
    """A worker process as its coordinator sees it."""

    def __init__(self, worker_id: str, process: BaseProcess) -> None:
        self.worker_id = worker_id
        self._process = process

    async def died(self) -> str:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        return "exited"

    def kill(self, pid: int = 0) -> None:
        self._process.kill()


class ProcessCluster:
    """Starts workers as processes; they end with this one."""

    def __init__(self, directory: str) -> None:
        """`directory` takes their sockets."""
        self._directory = directory
        self._workers: list[ProcessWorker] = []

    async def start_worker(
        self, worker_id: str, control: ControlEndpoint, group: str
    ) -> ProcessWorker:
        """Start one."""
        arguments = (worker_id, control.addresses[0], control.token, self._directory)
        process = _context.Process(target=_work, args=arguments, daemon=True)
        await asyncio.to_thread(process.start)
        worker = ProcessWorker(worker_id, process)
        self._workers.append(worker)
        return worker

    async def find_worker(self, worker_id: str, control: ControlEndpoint) -> None:
        """Benchmarks have one coordinator."""

    async def close(self) -> None:
        """Kill all."""
        for worker in self._workers:
            worker.kill()


def _work(worker_id: str, address: str, token: str, directory: str) -> None:
    os.environ["POLARS_MAX_THREADS"] = "1"  # as in every worker process
    logging.getLogger("headgate").setLevel(logging.WARNING)
    tune_process()
    uvloop.run(_serve(worker_id, address, token, directory))


async def _serve(worker_id: str, address: str, token: str, directory: str) -> None:
    hub = ExchangeHub(worker_id, token)
    worker = Worker(
        worker_id,
        await connect(address),
        hub,
        token=token,
        clock=SystemClock(),
        open_store=open_store,
        metrics=MetricsRegistry(),
    )
    hub.on_failure = worker.exchange_failed
    await worker.run((await hub.start(directory)).encode())


async def _until_records_come(client: JobClient) -> None:
    while True:
        vertices = (await client.request("status")).get("vertices")
        if vertices and vertices[-1]["records_in"]:
            return
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def running(job: Job, directory: str) -> AsyncIterator[JobClient]:
    """Run `job` with its workers in processes, until the block is left.

    Yields a client of its coordinator, once records have come to its last step.

    Raises:
        HeadgateError: the job could not begin.
        TimeoutError: no record came.
    """
    listening: asyncio.Future[JobCoordinator] = asyncio.get_running_loop().create_future()
    cluster = ProcessCluster(directory)
    hosted = host_coordinator(
        runnable(job).spec(),
        cluster,
        CoordinatorPlace(SystemClock(), "processes"),
        open_store=open_store,
        on_listening=listening.set_result,
    )
    task = asyncio.create_task(hosted)
    try:
        await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            await task
        coordinator = listening.result()
        client = LocalClient(coordinator.clients, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(START_S):
                await _until_records_come(client)
            yield client
            if not task.done():
                with contextlib.suppress(JobError):  # it has ended just now
                    await client.request("cancel")
                await task
        finally:
            await client.close()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.close()
