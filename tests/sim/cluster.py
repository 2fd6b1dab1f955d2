"""The cluster of a simulation: each worker is a process that can be killed or stopped."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine

from headgate.errors import JobError
from headgate.operators.clock import Clock
from headgate.runtime.control.cluster import ControlEndpoint
from headgate.runtime.exchange.hub import ExchangeHub
from headgate.runtime.observe.metrics import MetricsRegistry
from headgate.runtime.storage.base import StoreOpener
from headgate.runtime.worker.worker import Worker

from .loop import SimLoop
from .network import SimLink
from .process import Process, current, is_dead

OUT_OF_REACH_S = 8.0


class SimWorker:
    """A worker, and the handle its coordinator has on it."""

    def __init__(self, loop: SimLoop, cluster: SimCluster, process: Process) -> None:
        self._loop = loop
        self._cluster = cluster
        self.process = process
        self.worker: Worker | None = None
        """Once it has a server for its peers."""
        self._task: asyncio.Task[None]

    def begin(self, running: Coroutine[None, None, None]) -> None:
        """Run it."""
        self._task = self.process.context.run(
            self._loop.create_task, running, name=f"worker {self.worker_id}"
        )

    @property
    def worker_id(self) -> str:
        return self.process.name

    @property
    def alive(self) -> bool:
        return not self._task.done()

    async def died(self) -> str:
        await asyncio.wait({self._task})
        if self._task.cancelled():
            return "killed"
        error = self._task.exception()
        return "exited" if error is None else f"{type(error).__name__}: {error}"

    def kill(self, pid: int = 0) -> None:
        """As the coordinator kills it; one that is dead itself cannot. Its machine may hear of it late."""
        if is_dead():
            return
        late_s = self._cluster.kill_delay_s()
        if late_s:
            self._loop.call_later(late_s, self.crash)
        else:
            self.crash()

    def crash(self) -> None:
        """It dies, between two steps of any of its tasks."""
        if not self.process.dead:
            self.process.die()
            self._loop.continue_process(self.process)
            self._task.cancel()


class SimCluster:
    """Starts workers for all coordinators of a simulation."""

    def __init__(
        self, loop: SimLoop, rng: random.Random, clock: Clock, open_store: StoreOpener
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._clock = clock
        self._open_store = open_store
        self.metrics = MetricsRegistry()
        self.workers: list[SimWorker] = []
        self.refusal_rate = 0.0
        """The probability that there is no room for another worker."""
        self.out_of_reach_rate = 0.0
        """The probability that a worker that is to be killed goes on for up to `OUT_OF_REACH_S`."""

    def kill_delay_s(self) -> float:
        """Return the time for which the next worker that is killed lives on."""
        if self._rng.random() >= self.out_of_reach_rate:
            return 0.0
        return self._rng.uniform(0, OUT_OF_REACH_S)

    @property
    def live(self) -> list[SimWorker]:
        """Workers that have not died."""
        return [worker for worker in self.workers if worker.alive and not worker.process.dead]

    async def start_worker(self, worker_id: str, control: ControlEndpoint, group: str) -> SimWorker:
        """Start a process; it greets the coordinator."""
        await asyncio.sleep(self._rng.expovariate(1 / 0.05))
        if self._rng.random() < self.refusal_rate or is_dead():
            raise JobError("the cluster has no room")
        process = Process(worker_id)
        near, far = SimLink.pair(self._loop, process, current())
        worker = SimWorker(self._loop, self, process)
        worker.begin(self._run(worker, control.token, near))
        control.accept(far)
        self.workers.append(worker)
        return worker

    async def find_worker(self, worker_id: str, control: ControlEndpoint) -> SimWorker | None:
        """A worker that lives gets another link; one that is stopped looks at it later."""
        await asyncio.sleep(self._rng.expovariate(1 / 0.05))
        found = [worker for worker in self.live if worker.worker_id == worker_id]
        if not found or found[0].worker is None or is_dead():
            return None
        near, far = SimLink.pair(self._loop, found[0].process, current())
        found[0].process.context.run(found[0].worker.reconnect, near)
        control.accept(far)
        return found[0]

    async def _run(self, handle: SimWorker, token: str, link: SimLink) -> None:
        worker_id = handle.worker_id
        hub = ExchangeHub(worker_id, token)
        worker = Worker(
            worker_id,
            link,
            hub,
            token=token,
            clock=self._clock,
            open_store=self._open_store,
            metrics=self.metrics,
        )
        process = current()
        assert process is not None
        process.on_death.append(worker.backups.unlock)
        hub.on_failure = worker.exchange_failed
        address = await hub.start(None)
        handle.worker = worker
        await worker.run(address.encode())

    async def close(self) -> None:
        """Kill whatever still runs."""
        for worker in self.workers:
            worker.crash()
        for worker in self.workers:
            with contextlib.suppress(asyncio.CancelledError):
                await worker.died()
