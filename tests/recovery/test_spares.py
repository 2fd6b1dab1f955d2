"""Workers that are started before somebody needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.api.resources import DEFAULT_GROUP
from headgate.errors import ClusterError, ExchangeError, JobError
from headgate.runtime.control.messages import Warm
from headgate.runtime.coordinator.context import ToFailing
from headgate.runtime.coordinator.environment import JobEvent, WorkerLost
from headgate.runtime.coordinator.failures import Failure
from headgate.runtime.coordinator.restarting import Failing
from headgate.runtime.coordinator.workers import PoolSettings, WorkerPool
from headgate.runtime.protocol.failures import FailureKind
from headgate.runtime.protocol.restart import StartFailures
from headgate.tests.support.clocks import MovedClock
from headgate.tests.support.pools import Handle, Workers


class Cluster(Workers):
    """Starts workers that say Hello once they may."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.refuses = False
        self.refused: set[str] = set()
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start_worker(self, worker_id: str, control: object, group: str) -> Handle:
        self.started.append(worker_id)
        if worker_id in self.refused:
            raise JobError("no room")
        await self.may_start.wait()
        if self.refuses:
            raise JobError("no room")
        return await super().start_worker(worker_id, control, group)


async def settled() -> None:
    """Everything that can happen without time has happened."""
    for _ in range(50):
        await asyncio.sleep(0)


def live(cluster: Cluster) -> list[str]:
    return sorted(cluster.pool.live)


Script = Callable[[Cluster, WorkerPool], Awaitable[None]]


@pytest.fixture
def run() -> Callable[..., list[Any]]:
    def play(script: Script, spares: int = 1) -> list[Any]:
        async def main() -> list[Any]:
            cluster, events = Cluster(), list[JobEvent]()
            pool = cluster.pool = WorkerPool(
                cluster,  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
                MovedClock(1000.0),
                PoolSettings(
                    job_name="job",
                    name_prefix="w",
                    heartbeat_interval_ms=10,
                    heartbeat_timeout_ms=100,
                    spares=spares,
                    start_retry_ms=60_000,
                ),
                events.append,
            )
            await script(cluster, pool)
            closing = asyncio.ensure_future(pool.close())
            await settled()
            for handle in cluster.handles.values():  # they do as they are told, and exit
                handle.dead.set()
            await closing
            await asyncio.gather(*cluster.serving)
            return events

        return asyncio.run(main())

    return play


def test_a_spare_takes_over_at_once_and_gets_a_successor(run: Any) -> None:
    async def script(cluster: Cluster, pool: WorkerPool) -> None:
        pool.retire(await pool.ensure([DEFAULT_GROUP] * 2))
        pool.refill()
        await settled()
        assert live(cluster) == ["w-0000", "w-0001", "w-0002"]
        await cluster.kill("w-0000")
        pool.prepare([DEFAULT_GROUP] * 2)
        await settled()
        assert len(cluster.started) == 3, "nothing is started beside a restore"
        workers = await pool.ensure([DEFAULT_GROUP] * 2)
        assert [worker.worker_id for worker in workers] == ["w-0001", "w-0002"]
        pool.retire(workers)
        await settled()
        assert len(cluster.started) == 3
        pool.refill()
        await settled()
        assert live(cluster) == ["w-0001", "w-0002", "w-0003"]
        assert len(cluster.started) == 4

    assert [event.worker_id for event in run(script)] == ["w-0000"]


def test_without_spares_a_start_begins_before_it_is_asked_for(run: Any) -> None:
    async def script(cluster: Cluster, pool: WorkerPool) -> None:
        pool.retire(await pool.ensure([DEFAULT_GROUP] * 2))
        await cluster.kill("w-0001")
        await settled()
        assert live(cluster) == ["w-0000"]
        cluster.may_start.clear()
        pool.prepare([DEFAULT_GROUP] * 2)
        asking = asyncio.ensure_future(pool.ensure([DEFAULT_GROUP] * 2))
        await settled()
        assert cluster.started[2:] == ["w-0002"], "one is enough"
        cluster.may_start.set()
        assert [worker.worker_id for worker in await asking] == ["w-0000", "w-0002"]

    run(script, spares=0)


def test_a_start_that_fails_ahead_of_time_is_tried_again_by_whoever_needs_it(run: Any) -> None:
    async def script(cluster: Cluster, pool: WorkerPool) -> None:
        cluster.refuses = True
        pool.prepare([DEFAULT_GROUP] * 1)
        await settled()
        assert len(cluster.started) == 1, "then there is a pause"
        with pytest.raises(JobError, match="no room"):
            await pool.ensure([DEFAULT_GROUP] * 1)
        cluster.refuses = False
        assert len(await pool.ensure([DEFAULT_GROUP] * 1)) == 1

    run(script, spares=0)


def test_a_cluster_that_breaks_in_its_own_way_gives_no_worker(run: Any) -> None:
    async def script(cluster: Cluster, pool: WorkerPool) -> None:
        async def broken(worker_id: str, control: object, group: str = "") -> Handle:
            cluster.started.append(worker_id)
            raise RuntimeError("it is none of our errors")

        cluster.start_worker = broken  # type: ignore[method-assign]
        cluster.find_worker = broken  # type: ignore[attr-defined]
        pool.prepare([DEFAULT_GROUP] * 1)
        await settled()
        assert len(cluster.started) == 1, "then there is a pause"
        with pytest.raises(ClusterError, match="it is none of our errors"):
            await pool.ensure([DEFAULT_GROUP] * 1)
        assert await pool.find({"before-0000": DEFAULT_GROUP}) == []

    run(script, spares=0)


def test_of_two_starts_ahead_of_time_one_fails(run: Any) -> None:
    """A job that waits for the other one does not keep the loop busy: it starts one of its own."""

    async def script(cluster: Cluster, pool: WorkerPool) -> None:
        cluster.refused = {"w-0000"}
        cluster.may_start.clear()
        pool.prepare([DEFAULT_GROUP] * 2)
        await settled()
        asking = asyncio.ensure_future(pool.ensure([DEFAULT_GROUP] * 2))
        await settled()
        assert len(cluster.started) == 3
        cluster.may_start.set()
        assert [worker.worker_id for worker in await asking] == ["w-0001", "w-0002"]

    run(script, spares=0)


def test_spares_are_told_what_to_prepare_for(run: Any) -> None:
    async def script(cluster: Cluster, pool: WorkerPool) -> None:
        workers = await pool.ensure([DEFAULT_GROUP] * 1)
        pool.warm_up = Warm(job=b"plan", settings={})
        pool.retire(workers)
        pool.refill()
        await settled()
        await cluster.far["w-0001"].receive()  # Welcome
        assert await cluster.far["w-0001"].receive() == Warm(job=b"plan", settings={})

    run(script)


def test_a_spare_that_dies_by_itself_is_not_replaced_for_ever(run: Any) -> None:
    async def script(cluster: Cluster, pool: WorkerPool) -> None:
        pool.retire(await pool.ensure([DEFAULT_GROUP] * 1))
        pool.refill()
        await settled()
        await cluster.kill("w-0001")
        await settled()
        assert len(cluster.started) == 2, "there is a pause"

    run(script)


def test_the_pauses() -> None:
    failures = StartFailures(3, 1_000)
    assert failures.wait_ms(0) == 0
    failures.failed(0)
    assert failures.wait_ms(400) == 600
    assert failures.wait_ms(1_000) == 0
    failures.failed(1_000)
    failures.failed(2_000)
    assert failures.wait_ms(3_000) == 57_000, "three within a minute"
    assert failures.wait_ms(60_000) == 0
    failures.failed(60_000)
    assert failures.wait_ms(61_000) == 0, "of the last minute there are two, and the pause is over"


def test_a_connection_does_not_break_because_a_spare_died() -> None:
    """It has none. The worker at the other end is the root cause, though it is heard of later."""

    async def main() -> str:
        events: asyncio.Queue[Any] = asyncio.Queue()
        events.put_nowait(WorkerLost("spare", "exited"))
        events.put_nowait(WorkerLost("peer", "exited"))
        executions = SimpleNamespace(placement={("count", 0): "peer"})
        job: Any = SimpleNamespace(
            env=SimpleNamespace(events=events), attempt=SimpleNamespace(executions=executions)
        )
        error = ExchangeError("the connection broke")
        failure = Failure("", "", FailureKind.EXCHANGE, error)
        failing = Failing(job, ToFailing(failure))
        await failing._find_root_cause()
        return failing._failure.worker

    assert asyncio.run(main()) == "peer"
