"""Launches a job in this process, on an embedded Ray, or on a Ray cluster that is already there.

The in-process cluster is here as well: its workers are tasks of this event loop, without Ray. It serves
`job.run()` in a script, unit tests and the simulation, with the same coordinator, workers and subtasks as
everywhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace

from ...errors import OptionError, UsageError
from ...operators.clock import Clock, SystemClock
from ...operators.extras import check_ray
from ..control.cluster import ControlEndpoint
from ..control.job_client import ConnectListener, EventListener, PublishedEvent
from ..control.link import MemoryLink
from ..control.registry import make_token
from ..coordinator.clients import connect_locally
from ..coordinator.job import JobCoordinator
from ..exchange.hub import ExchangeHub
from ..listening import Listener, ListenerLimits
from ..observe.metrics import MetricsRegistry
from ..options.execution import WORKER_SLOTS
from ..options.network import DATA_PORT
from ..options.recovery import REDUNDANT_WORKERS
from ..options.registry import Options
from ..plan import JobSpec
from ..protocol.job_result import JobOutcome
from ..slots import SlotsByGroup, worker_groups
from ..storage.base import StoreOpener
from ..storage.open_store import open_store
from ..task.accounting import LoopLoad
from ..worker.worker import Worker
from .embedded import prepare_environment
from .host import CoordinatorPlace, host_coordinator

_log = logging.getLogger("headgate.cluster")
IN_PROCESS = "in-process"
LOCAL = "local"


async def launch(
    spec: JobSpec,
    cluster: str,
    *,
    on_event: EventListener | None = None,
    on_listening: ConnectListener | None = None,
    on_connected: Callable[[], None] | None = None,
) -> JobOutcome:
    """Run `spec` on `cluster` to its end.

    Args:
        spec: the job.
        cluster: `in-process`, `local`, or the address of a Ray cluster.
        on_event: sees everything the coordinator announces.
        on_listening: gets what connects to the coordinator, again after each takeover.
        on_connected: called once the cluster is there; the job has not begun before that.

    Raises:
        UsageError: no such cluster, or too few data ports for its workers.
        HeadgateError: the job could not begin, or a newer coordinator took over.
    """
    if cluster == IN_PROCESS:
        spec = with_one_worker(spec)
    if not is_shared(cluster):
        _check_data_ports(spec)
        _note_resources(spec, on_event)
    if cluster == LOCAL and (crowded := crowding(spec, os.cpu_count() or 1)):
        _note(crowded, on_event)
    if cluster == IN_PROCESS:
        if on_connected is not None:
            on_connected()
        return await _in_process(spec, on_event, on_listening)
    if cluster == LOCAL or is_shared(cluster):
        check_ray(cluster)
        address = cluster if is_shared(cluster) else None
        if address is None:
            prepare_environment()
        from .ray_driver import run_on_ray

        return await run_on_ray(
            spec,
            address,
            on_event=on_event,
            on_listening=on_listening,
            on_connected=on_connected,
        )
    raise unknown_cluster(cluster)


def with_one_worker(spec: JobSpec) -> JobSpec:
    """Return the job with one worker for each slot sharing group, whatever the parallelism.

    In one process more workers protect from nothing, and what they send each other goes through the system.
    """
    return replace(spec, group_slots=spec.plan.slots_by_group)


def _check_data_ports(spec: JobSpec) -> None:
    """Refuse a job whose workers, all of them on this machine, have too few ports.

    Raises:
        OptionError: some of them would never find a free port.
    """
    options = Options(spec.options)
    ports = options.get(DATA_PORT)
    groups = worker_groups(spec.plan, spec)
    workers = len(groups) + len(set(groups)) * options.get(REDUNDANT_WORKERS)
    if ports[0] != 0 and len(ports) < workers:
        raise OptionError(
            f"too few data ports for the workers of this machine key=`{DATA_PORT.key}` "
            f"ports=`{len(ports)}` workers=`{workers}`",
            fix=f"write a range, such as {ports[0]}-{min(ports[0] + workers - 1, 65535)}, or 0",
        )


def _note_resources(spec: JobSpec, on_event: EventListener | None) -> None:
    """Warn that the resources of slots are not reserved where all workers share this machine."""
    groups = ", ".join(name for name, each in spec.resources.items() if str(each))
    if not groups:
        return
    _note(
        f"the resources of slot sharing groups are not reserved on one machine: {groups}", on_event
    )


def crowding(spec: JobSpec, cpus: int) -> str:
    """Return advice for a machine that gets more workers than it has CPUs; empty: there is none."""
    plan = spec.plan
    slots = -(-plan.slots // cpus)
    workers = len(worker_groups(plan, spec))
    fewer = len(worker_groups(plan, SlotsByGroup(dict.fromkeys(plan.slots_by_group, slots))))
    if workers <= cpus or fewer >= workers:
        return ""
    return (
        f"{workers} worker processes share {cpus} CPUs; with {WORKER_SLOTS.key}={slots} there are "
        f"{fewer}, which need less memory"
    )


def _note(text: str, on_event: EventListener | None) -> None:
    if on_event is None:
        _log.info("%s", text)
    else:
        on_event(PublishedEvent(kind="start", text=text))


def is_shared(cluster: str) -> bool:
    """Return True for the address of a Ray cluster that runs already."""
    return ":" in cluster or cluster == "auto"


def unknown_cluster(cluster: str) -> UsageError:
    """Return the error for a text that is neither a way to run a job nor an address."""
    return UsageError(
        f"unknown cluster cluster=`{cluster}`",
        fix="use `local`, `in-process`, `auto`, or the address of a Ray cluster (ray://host:port)",
    )


async def _in_process(
    spec: JobSpec,
    on_event: EventListener | None,
    on_listening: ConnectListener | None,
) -> JobOutcome:
    clock = SystemClock()
    options = Options(spec.options)
    cluster = InProcessCluster(
        clock=clock,
        open_store=open_store,
        limits=ListenerLimits.of(options),
        listener=Listener.data(options),
    )

    def listening(coordinator: JobCoordinator) -> None:
        if on_event is not None:
            coordinator.on_event = on_event
        if on_listening is not None:
            on_listening(connect_locally(coordinator.clients))

    try:
        return await host_coordinator(
            spec,
            cluster,
            CoordinatorPlace(clock, IN_PROCESS),
            open_store=open_store,
            token=make_token(Options(spec.options)),
            metrics=cluster.metrics,
            on_listening=listening,
        )
    finally:
        await cluster.close()


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
