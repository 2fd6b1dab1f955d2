"""The workers of a job that runs for a long time."""

from __future__ import annotations

import asyncio

from headgate.api.resources import DEFAULT_GROUP
from headgate.runtime.coordinator.environment import JobEvent
from headgate.runtime.coordinator.workers import PoolSettings, WorkerPool
from headgate.tests.support.clocks import MovedClock
from headgate.tests.support.pools import Workers


def test_workers_that_are_gone_are_forgotten() -> None:
    async def main() -> None:
        cluster, events = Workers(), list[JobEvent]()
        pool = cluster.pool = WorkerPool(
            cluster,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            MovedClock(),
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
                await cluster.kill(worker.worker_id)
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
