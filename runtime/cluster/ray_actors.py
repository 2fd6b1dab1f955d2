"""The two Ray actors: a worker and a coordinator. Each is a process with an event loop of our own.

Ray starts them, kills them and says that they died; everything else travels on our own connections,
because calls to a busy actor are slow and not ordered (ARCHITECTURE.md, decision 3).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import uvloop

from ...errors import HeadgateError, JobError
from ...operators.clock import SystemClock
from ..control.cluster import ControlEndpoint
from ..control.link import connect
from ..exchange.hub import ExchangeHub
from ..observe.endpoint import open_endpoint
from ..observe.logs import configure_logging
from ..observe.metrics import MetricsRegistry
from ..shipping import unship
from ..storage.open_store import open_store
from ..worker.process import tune_process
from ..worker.pulse import Pulse
from ..worker.worker import Worker
from .console import attach
from .host import host_coordinator
from .own_directory import own_directory

_log = logging.getLogger("headgate.cluster")
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What a process of the cluster takes over from the one that started the job."""

    directory: str
    """Working directory, so that relative paths mean the same everywhere; skipped if not there."""
    python_path: tuple[str, ...]
    console: str | None
    """Where a worker sends what it prints (`console.py`); None: wherever Ray keeps it."""
    unix_dir: str
    """Where each worker makes a directory for its Unix socket."""
    host: str
    """Address to bind; `127.0.0.1` on an embedded Ray; empty: that of the node the process is on."""
    log_level: int
    metrics_port: int | None
    metrics_host: str
    cluster_name: str

    def own_host(self) -> str:
        """The address this process binds to and is reached at."""
        return self.host or str(ray.util.get_node_ip_address())

    def enter(self) -> None:
        """Make this process look like the user's."""
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        for path in self.python_path:
            if path not in sys.path and os.path.isdir(path):
                sys.path.append(path)


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class WorkerActor:
    """Hosts one worker; `run` returns when the worker is to exit."""

    def run(self, worker_id: str, addresses: list[str], token: str, setup: ProcessSetup) -> None:
        """Connect to the coordinator and serve it. Never retried: the coordinator makes new ones."""
        setup.enter()
        if setup.console is not None:
            attach(setup.console)
        tune_process()
        # What every worker does routinely is of interest to those who look for something only.
        routine = setup.log_level > logging.DEBUG
        configure_logging(max(setup.log_level, logging.WARNING) if routine else logging.DEBUG)
        with own_directory(Path(setup.unix_dir), "hg-worker-") as directory:
            uvloop.run(_run_worker(worker_id, addresses, token, setup, str(directory)))


async def _run_worker(
    worker_id: str, addresses: list[str], token: str, setup: ProcessSetup, directory: str
) -> None:
    link = None
    for address in addresses:
        try:
            link = await connect(address)
            break
        except OSError as error:
            _log.info("no coordinator address=`%s`: %s", address, error)
    if link is None:
        raise JobError(f"no coordinator at {', '.join(addresses)}")
    hub = ExchangeHub(worker_id, token)
    metrics = MetricsRegistry()
    # The coordinator has the port itself, if it runs on this machine.
    port = setup.metrics_port + 1 if setup.metrics_port else setup.metrics_port
    endpoint = open_endpoint(metrics, port, setup.metrics_host)
    clock = SystemClock()
    worker = Worker(
        worker_id,
        link,
        hub,
        token=token,
        clock=clock,
        open_store=open_store,
        metrics=metrics,
        metrics_url=endpoint.url if endpoint is not None else "",
        pulse=Pulse(addresses, token, worker_id, clock),
    )
    hub.on_failure = worker.exchange_failed
    listening = await hub.start(directory, setup.own_host())
    await worker.run(listening.encode())


class RayWorker:
    """A worker actor as the coordinator sees it."""

    def __init__(self, worker_id: str, actor: Any, running: Any) -> None:
        self._worker_id = worker_id
        self._actor = actor
        self._running: concurrent.futures.Future[None] = running.future()

    @property
    def worker_id(self) -> str:
        return self._worker_id

    async def died(self) -> str:
        try:
            await asyncio.wrap_future(self._running)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return str(error).strip().splitlines()[0]
        return "exited"

    def kill(self, pid: int = 0) -> None:
        # One whose `run` has returned does nothing any more; killing it makes Ray complain on the terminal.
        if pid and not self._running.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        ray.kill(self._actor, no_restart=True)


class RayCluster:
    """Starts workers as Ray actors of this (coordinator) process: they die with it."""

    def __init__(self, setup: ProcessSetup) -> None:
        self._setup = setup
        self._workers: list[RayWorker] = []

    async def start_worker(self, worker_id: str, control: ControlEndpoint) -> RayWorker:
        """Start a worker actor."""
        actor = WorkerActor.remote()  # type: ignore[attr-defined]
        running = actor.run.remote(worker_id, control.addresses, control.token, self._setup)
        worker = RayWorker(worker_id, actor, running)
        self._workers.append(worker)
        return worker

    async def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=4)
class CoordinatorActor:
    """Hosts one coordinator in a thread. If the process dies Ray makes a new one, which goes on.

    It holds no truth, so its constructor's arguments and the job log are all it needs.
    """

    def __init__(self, job: bytes, token: str, setup: ProcessSetup) -> None:
        setup.enter()
        configure_logging(setup.log_level)
        self._setup = setup
        self._token = token
        self._listening: concurrent.futures.Future[list[str]] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._main, args=(job,), name="coordinator", daemon=True
        )
        self._thread.start()

    def _main(self, job: bytes) -> None:
        try:
            uvloop.run(self._run(job))
        except Exception as error:
            if not self._listening.done():
                self._listening.set_exception(error)
            elif not isinstance(error, HeadgateError):
                _log.exception("the coordinator broke")

    async def _run(self, job: bytes) -> None:
        cluster = RayCluster(self._setup)
        try:
            await host_coordinator(
                unship(job),
                cluster,
                clock=SystemClock(),
                open_store=open_store,
                cluster_name=self._setup.cluster_name,
                host=self._setup.own_host(),
                token=self._token,
                on_listening=lambda c: self._listening.set_result(c.server.addresses),
            )
        finally:
            await cluster.close()

    def where(self) -> tuple[list[str], int]:
        """Addresses of the control server, and the process id.

        Raises:
            HeadgateError: the coordinator could not start.
        """
        return self._listening.result(READY_TIMEOUT_S), os.getpid()

    def credentials(self) -> str:
        """The token of the control server: for somebody whom Ray has let in."""
        return self._token

    def alive(self) -> bool:
        """False once the coordinator's thread has ended."""
        return self._thread.is_alive()
