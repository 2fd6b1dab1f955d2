"""The in-process cluster: workers as tasks of this event loop, without Ray.

For unit tests, for `job.run()` in a script, and for the simulation: the same coordinator, workers and
subtasks as everywhere else.
"""

from __future__ import annotations

import asyncio
import contextlib

from ...operators.clock import Clock
from ..control.cluster import ControlEndpoint
from ..control.link import MemoryLink
from ..exchange.hub import ExchangeHub
from ..listening import Listener, ListenerLimits
from ..observe.metrics import MetricsRegistry
from ..storage.base import StoreOpener
from ..task.accounting import LoopLoad
from ..worker.worker import Worker


class InProcessWorker:
    """A worker in this event loop."""

    def __init__(
        self, worker: Worker, task: asyncio.Task[None], link: MemoryLink, hub: ExchangeHub
    ) -> None:
        self._worker = worker
        self._task = task
        self._link = link
        self.hub = hub

    @property
    def worker_id(self) -> str:
        return self._worker.worker_id

    @property
    def alive(self) -> bool:
        """True until its task has ended."""
        return not self._task.done()

    async def died(self) -> str:
        await asyncio.wait({self._task})
        if self._task.cancelled():
            return "killed"
        error = self._task.exception()
        return "exited" if error is None else f"{type(error).__name__}: {error}"

    def reconnect(self, control: ControlEndpoint) -> None:
        """Connect it to another coordinator."""
        near, far = MemoryLink.pair()
        self._worker.reconnect(near)
        control.accept(far)

    def kill(self, pid: int = 0) -> None:
        """End the task at once; its link breaks as that of a dead process would."""
        self._link.close()
        if not self._task.cancelling():  # a second cancellation would interrupt its clean-up
            self._task.cancel()


class InProcessCluster:
    """Starts workers in this event loop."""

    def __init__(
        self,
        *,
        clock: Clock,
        open_store: StoreOpener,
        metrics: MetricsRegistry | None = None,
        unix_dir: str | None = None,
        limits: ListenerLimits | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._clock = clock
        self._open_store = open_store
        self.metrics = metrics or MetricsRegistry()
        self._unix_dir = unix_dir
        self._limits = limits
        self._listener = listener
        self._load = LoopLoad()
        self._workers: list[InProcessWorker] = []

    @property
    def workers(self) -> list[InProcessWorker]:
        """All workers that were ever started, for tests that kill some."""
        return self._workers

    async def start_worker(
        self, worker_id: str, control: ControlEndpoint, group: str
    ) -> InProcessWorker:
        """Start a worker, whatever its group requires; it connects over an in-memory link."""
        near, far = MemoryLink.pair()
        hub = ExchangeHub(worker_id, control.token, limits=self._limits, listener=self._listener)
        worker = Worker(
            worker_id,
            near,
            hub,
            token=control.token,
            clock=self._clock,
            open_store=self._open_store,
            metrics=self.metrics,
            load=self._load,
        )

        hub.on_failure = worker.exchange_failed
        address = await hub.start(self._unix_dir)
        task = asyncio.get_running_loop().create_task(
            worker.run(address.encode()), name=f"worker {worker_id}"
        )
        control.accept(far)
        handle = InProcessWorker(worker, task, near, hub)
        self._workers.append(handle)
        return handle

    async def find_worker(self, worker_id: str, control: ControlEndpoint) -> InProcessWorker | None:
        """Let a worker that still runs connect to the coordinator over another in-memory link."""
        found = [w for w in self._workers if w.alive and w.worker_id == worker_id]
        for worker in found:
            worker.reconnect(control)
        return found[0] if found else None

    async def close(self) -> None:
        """Kill all workers that still run."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            with contextlib.suppress(asyncio.CancelledError):
                await worker.died()
