"""`headgate k8s worker` is one node of Ray in a pod. It lets its workers leave before it ends.

Workers die with the raylet of their node. So SIGTERM is sent to them first: they move their tasks
elsewhere, with a checkpoint, and the raylet stops when they have ended or the time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from ..runtime.cluster.process import console
from ..runtime.listening import ListenerLimits
from . import ports
from .head import CONSOLE
from .http_port import LIMITS, answering
from .ray_node import start_worker, worker_processes
from .ray_process import RayProcess, address_of, listens

LOOK_S: Final = 0.2
GRACE_S: Final = 50.0
"""The default of the time that workers may take to leave, in seconds."""
log = logging.getLogger("headgate.k8s.worker")


@dataclass(frozen=True, slots=True)
class Options:
    """The settings with which a worker's pod is started.

    Attributes:
        head: the host name of the head.
        pod_ip: the IP of this pod.
        slots: the number of subtasks of a step that it hosts.
        grace_s: the time that workers may take to leave, in seconds.
        group: the slot sharing group of its slots; empty: the job has one only.
    """

    head: str
    pod_ip: str
    slots: int
    grace_s: float
    group: str = ""


async def run(options: Options) -> int:
    """Join the head's cluster until SIGTERM. Returns the exit code: 0, or that of Ray."""
    node = Node(options.grace_s)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, node.leave)
    loop.add_signal_handler(signal.SIGINT, node.leave)
    with _printing():
        return await _join(node, options)


async def _join(node: Node, options: Options) -> int:
    async with probes(node, "0.0.0.0", ports.REST.number):
        # `ray start` gives up after a while, and the head may take longer to start.
        while not node.leaving.is_set():
            head = await address_of(options.head)
            if head and await listens(head, ports.RAY_GCS.number):
                command = start_worker(head, options.pod_ip, options.slots, options.group)
                return await node.run(command, options.pod_ip, ports.RAY_NODE.number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.leaving.wait(), 1.0)
        return 0


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Copy the output of workers to the log of this pod."""
    directory = Path(CONSOLE)
    shutil.rmtree(directory, ignore_errors=True)  # pipes of this container before its restart
    directory.mkdir(mode=0o700)
    with console(CONSOLE):
        yield


class Node:
    """A node of Ray, from its start to its end."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._ray: RayProcess | None = None
        self._address = ("", 0)
        self.leaving = asyncio.Event()
        """Set as soon as the pod has to end."""

    def leave(self) -> None:
        """Note that the pod has to end."""
        self.leaving.set()

    async def ready(self) -> bool:
        """True if the raylet takes connections, and the pod need not end."""
        alive = self._ray is not None and not self._ray.ended.done()
        return alive and not self.leaving.is_set() and await listens(*self._address)

    async def run(self, command: Sequence[str], host: str, port: int) -> int:
        """Start Ray, wait until it ends or the pod has to end, and then end it.

        Args:
            command: starts Ray, and stays in the foreground.
            host, port: the address at which the raylet will listen.

        Returns:
            0 if the pod had to end; else the exit code of Ray, at least 1.
        """
        if self.leaving.is_set():
            return 0
        self._address = (host, port)
        self._ray = ray = await RayProcess.start(command)
        leaving = asyncio.ensure_future(self.leaving.wait())
        await asyncio.wait((ray.ended, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if ray.ended.done():
            log.error("Ray has ended by itself: exit code %s", ray.ended.result())
            return max(1, ray.ended.result())
        await self._workers_leave(ray)
        await ray.stop()
        return 0

    async def _workers_leave(self, ray: RayProcess) -> None:
        """Send SIGTERM to each worker once, because a second one would end it at once; wait for all."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._grace_s
        told: set[int] = set()
        while not ray.ended.done() and (left := worker_processes(ray.pid)):
            for pid in set(left) - told:
                log.info("worker %d has to leave", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            told.update(left)
            if loop.time() >= until:
                log.warning("%d workers have not left after %g s", len(left), self._grace_s)
                return
            await asyncio.wait({ray.ended}, timeout=LOOK_S)


@contextlib.asynccontextmanager
async def probes(
    node: Node, host: str, port: int, limits: ListenerLimits = LIMITS
) -> AsyncIterator[None]:
    """Answer the kubelet's probes: /healthz while this process lives, /readyz by the state of the node."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        if await node.ready():
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "Ray does not run"}, status=503)

    pages = {"/healthz": healthz, "/readyz": readyz}
    async with answering(pages, host, port, "probes", limits):
        yield
