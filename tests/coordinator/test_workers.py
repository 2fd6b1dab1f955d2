"""The workers of a job that runs for a long time."""

from __future__ import annotations

import asyncio
from typing import Any

from headgate.api.resources import DEFAULT_GROUP
from headgate.runtime.control.link import MemoryLink
from headgate.runtime.control.messages import Hello
from headgate.runtime.coordinator.environment import JobEvent
from headgate.runtime.coordinator.workers import PoolSettings, WorkerPool
from headgate.runtime.exchange.hub import WorkerAddress


class Handle:
    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.dead = asyncio.Event()

    async def died(self) -> str:
        await self.dead.wait()
        return "exited"

    def kill(self, pid: int = 0) -> None:
        self.dead.set()


class Cluster:
    """Starts workers that say Hello at once."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        self.serving: list[asyncio.Task[None]] = []
        self.pool: Any = None

    async def start_worker(self, worker_id: str, control: object, group: str) -> Handle:
        self.handles[worker_id] = Handle(worker_id)
        address = WorkerAddress(worker_id, "elsewhere", "", 1, "").encode()
        hello = Hello(token="", role="worker", worker_id=worker_id, address=address)
        near, _ = MemoryLink.pair()
        self.serving.append(asyncio.ensure_future(self.pool.serve(hello, near)))
        return self.handles[worker_id]


class Clock:
    def monotonic(self) -> float:
        return 0.0


def test_workers_that_are_gone_are_forgotten() -> None:
    async def main() -> None:
        cluster, events = Cluster(), list[JobEvent]()
        pool = cluster.pool = WorkerPool(
            cluster,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            Clock(),  # type: ignore[arg-type]
            PoolSettings(
                job_name="job",
                name_prefix="w",
                heartbeat_interval_ms=10,
                heartbeat_timeout_ms=100,
            ),
            events.append,
        )
        for _ in range(3):  # up and down again
            workers = await pool.ensure([DEFAULT_GROUP] * 3)
            pool.retire(workers[:1])
            for worker in workers[1:]:
                watching = pool._watchers[worker.worker_id]
                cluster.handles[worker.worker_id].dead.set()
                await watching
        assert list(pool.live) == list(pool._watchers) == ["w-0000"]
        assert not pool._retired
        assert not events, "nobody misses them"
        (last,) = pool.live.values()
        watching = pool._watchers[last.worker_id]
        cluster.handles[last.worker_id].dead.set()
        await watching
        assert [event.worker_id for event in events] == ["w-0000"]
        assert not pool._watchers
        await pool.close()
        await asyncio.gather(*cluster.serving)

    asyncio.run(main())
