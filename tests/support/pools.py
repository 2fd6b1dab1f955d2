"""A pool of workers whose processes a test only plays."""

from __future__ import annotations

import asyncio
from typing import Any

from headgate.runtime.control.link import MemoryLink
from headgate.runtime.control.messages import Hello
from headgate.runtime.exchange.hub import WorkerAddress


class Handle:
    """The process of a worker, which lives until it is killed."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.dead = asyncio.Event()

    async def died(self) -> str:
        await self.dead.wait()
        return "exited"

    def kill(self, pid: int = 0) -> None:
        self.dead.set()


class Workers:
    """A cluster whose workers say Hello as soon as they are started; `pool` is what asks for them."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        self.far: dict[str, MemoryLink] = {}
        """The ends of the links that the workers have."""
        self.serving: list[asyncio.Task[None]] = []
        self.pool: Any = None

    async def start_worker(self, worker_id: str, control: object, group: str) -> Handle:
        handle = self.handles[worker_id] = Handle(worker_id)
        address = WorkerAddress(worker_id, "elsewhere", "", 1, "").encode()
        hello = Hello(token="", role="worker", worker_id=worker_id, address=address)
        near, self.far[worker_id] = MemoryLink.pair()
        self.serving.append(asyncio.ensure_future(self.pool.serve(hello, near)))
        return handle

    async def kill(self, worker_id: str) -> None:
        """Let a worker die, and wait until the pool has seen it."""
        watching = self.pool._watchers[worker_id]
        self.handles[worker_id].dead.set()
        await watching
