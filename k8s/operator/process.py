"""The operator as a process: it serves its ports, waits for the Lease, works, and releases the Lease."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

from ...operators.clock import SystemClock
from ..actions import Coordinators
from ..objects import Settings
from .api import Api
from .controller import Controller, micro_time
from .coordinators import RestCoordinators
from .endpoints import WatchHealth, serving
from .lease import LeaseElection
from .metrics import Metrics

LOST_LEASE: Final = 1
"""The exit code of a process that no longer leads. It is started again, as a candidate."""
log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Options:
    """The settings with which the operator was started.

    Attributes:
        host: the address at which both ports are served.
        namespaces: the namespaces that are watched; none: the whole cluster.
        lease: the name of the Lease; empty: there is no election.
        namespace: the operator's namespace, in which the Lease is.
        instance: the name of this process.
        settings: the settings of the decisions.
    """

    host: str
    health_port: int
    metrics_port: int
    namespaces: Sequence[str]
    lease: str
    namespace: str
    instance: str
    settings: Settings = field(default_factory=Settings)


async def run(options: Options) -> int:
    """Run the operator until SIGTERM or SIGINT; return the exit code.

    Raises:
        ApiError: no cluster is configured.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with await Api.from_environment() as api:
        return await _serve(api, RestCoordinators(api), options, stopped)


async def _serve(
    api: Api, coordinators: Coordinators, options: Options, stopped: asyncio.Event
) -> int:
    metrics = Metrics()
    controllers: list[Controller] = []

    def watches() -> list[WatchHealth]:
        return [watch for each in controllers for watch in each.watches()]

    ports = (options.host, options.health_port, options.metrics_port)
    async with serving(*ports, watches, metrics.text):
        lead = asyncio.create_task(_lead(api, coordinators, options, metrics, controllers))
        stop = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait((lead, stop), return_when=asyncio.FIRST_COMPLETED)
            if lead.done():
                lead.result()
                return LOST_LEASE
            log.info("the operator stops")
            return 0
        finally:
            for task in (lead, stop):
                task.cancel()
            await asyncio.gather(lead, stop, return_exceptions=True)


async def _lead(
    api: Api,
    coordinators: Coordinators,
    options: Options,
    metrics: Metrics,
    controllers: list[Controller],
) -> None:
    """Wait for the Lease if there is one, and work; return once the Lease is lost."""
    clock = SystemClock()
    election = None
    if options.lease:
        election = LeaseElection(
            api,
            options.namespace,
            options.lease,
            options.instance,
            clock.monotonic,
            lambda: micro_time(clock),
        )
    tasks: list[asyncio.Task[None]] = []
    try:
        if election is not None:
            await election.acquire()
            tasks.append(asyncio.create_task(election.hold()))
        controller = Controller(
            api,
            coordinators,
            options.settings,
            options.namespaces,
            options.instance,
            metrics,
            clock,
        )
        controllers.append(controller)
        metrics.leads(True)
        tasks.append(asyncio.create_task(controller.run()))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        # The operator has stopped all work before it releases the Lease.
        await asyncio.gather(*tasks, return_exceptions=True)
        metrics.leads(False)
        if election is not None:
            await election.release()
