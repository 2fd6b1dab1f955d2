"""Hosts a coordinator in this process: listens, makes itself findable, runs the job to its end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from ...errors import HeadgateError
from ...operators.clock import Clock
from ..admission import ListenerLimits
from ..control import registry
from ..control.client import CoordinatorClient
from ..control.cluster import Cluster
from ..coordinator.job import JobCoordinator
from ..job_spec import JobSpec
from ..metrics_options import METRICS_HOST, METRICS_PORT
from ..observe.endpoint import open_endpoint
from ..observe.metrics import MetricsRegistry
from ..options import Options
from ..protocol.job_result import JobOutcome
from ..rest_options import REST_PORT
from ..storage.base import StoreOpener

if TYPE_CHECKING:
    from ..rest.server import RestServer

DISMISS_S: Final = 5.0
"""A new coordinator waits no longer for the one it has taken over."""
REST_RETRY_S: Final = 1.0
"""The pause between attempts of a coordinator that takes over to open the port of the REST API."""
_log = logging.getLogger("headgate.cluster")


async def host_coordinator(
    spec: JobSpec,
    cluster: Cluster,
    *,
    clock: Clock,
    open_store: StoreOpener,
    cluster_name: str,
    host: str = "127.0.0.1",
    token: str | None = None,
    on_listening: Callable[[JobCoordinator], None] | None = None,
    metrics: MetricsRegistry | None = None,
    takes_over: bool = False,
    on_ended: Callable[[JobOutcome], Awaitable[None]] | None = None,
) -> JobOutcome:
    """Run `spec` under a coordinator in this event loop.

    Args:
        spec: the job.
        cluster: where workers come from; not closed here.
        clock: time.
        open_store: makes checkpoint stores.
        cluster_name: shown by `headgate list`.
        host: the address of this machine among the peers.
        token: secret of the control connections; None: a random one.
        on_listening: called once clients can connect.
        metrics: what the endpoint of this process serves, besides the job; None: nothing besides.
        takes_over: another coordinator has led this run: it is no mistake of the user if the store is away.
        on_ended: awaited when the job has ended. Until it returns the REST API and the metrics stay open.

    Raises:
        HeadgateError: the job could not begin, or was fenced by a newer coordinator.
    """
    metrics = metrics or MetricsRegistry()
    options = Options(spec.options)
    endpoint = open_endpoint(
        metrics,
        options.get(METRICS_PORT),
        options.get(METRICS_HOST),
        ListenerLimits.of(options),
        host,
    )
    coordinator = JobCoordinator(
        spec,
        cluster=cluster,
        clock=clock,
        open_store=open_store,
        token=token,
        metrics=metrics,
        metrics_url=endpoint.url if endpoint is not None else "",
        takes_over=takes_over,
    )
    rest: RestServer | None = None
    opening: asyncio.Task[None] | None = None
    try:
        if options.get(REST_PORT) is not None:
            from ..rest.server import RestServer  # aiohttp takes a moment to import

            rest = RestServer(coordinator.clients, coordinator.server.token, options, clock)
            opening = await _open_rest(rest, coordinator, takes_over=takes_over)
        outcome = await _serve(coordinator, clock, cluster_name, host, on_listening)
        if on_ended is not None:
            await on_ended(outcome)
        return outcome
    finally:
        if opening is not None:
            opening.cancel()
        if rest is not None:
            await asyncio.shield(rest.close())
        if endpoint is not None:
            await asyncio.to_thread(endpoint.close)


async def _open_rest(
    rest: RestServer, coordinator: JobCoordinator, *, takes_over: bool
) -> asyncio.Task[None] | None:
    """Open the REST API. After a takeover a task does it: its port may be taken, and the job must go on.

    Raises:
        HeadgateError: no port can be opened, and nothing has run yet.
    """

    async def keep_trying() -> None:
        while not rest.url:
            try:
                await rest.listen()
            except HeadgateError as error:
                _log.warning("no REST API yet, trying again: %s", error)
                await asyncio.sleep(REST_RETRY_S)
        coordinator.rest_url = rest.url

    if takes_over:
        return asyncio.get_running_loop().create_task(keep_trying(), name="open REST API")
    await rest.listen()
    coordinator.rest_url = rest.url
    return None


async def _dismiss(former: registry.JobRecord) -> None:
    """Have a coordinator that was taken over look into the log: else it finds out with its next checkpoint.

    It is asked to cancel its job. Before it deletes anything it writes the end to the log, where it finds
    our entry: it is fenced, and stops.
    """
    try:
        async with asyncio.timeout(DISMISS_S):
            client = await CoordinatorClient.connect(former.addresses, former.token)
            try:
                await client.request("cancel")
            finally:
                await client.close()
    except (HeadgateError, TimeoutError) as error:
        _log.info("the coordinator that was taken over: %s", error)


async def _serve(
    coordinator: JobCoordinator,
    clock: Clock,
    cluster_name: str,
    host: str,
    on_listening: Callable[[JobCoordinator], None] | None,
) -> JobOutcome:
    spec = coordinator.spec
    pid = os.getpid()
    before = registry.find(spec.name)
    # One of the same run is dead, though perhaps not for the system yet, or will be fenced.
    same_run = before is not None and before.token == coordinator.server.token
    if before is not None and (same_run or not registry.is_alive(before)):
        registry.forget(before)
    elif before is not None and spec.take_over:
        coordinator.on_lead = partial(_dismiss, before)
    await coordinator.server.listen(registry.socket_path(spec.name, pid), host)
    registry.register(
        registry.JobRecord(
            name=spec.name,
            addresses=coordinator.server.addresses,
            token=coordinator.server.token,
            pid=pid,
            started_ms=clock.now_ms(),
            cluster=cluster_name,
        )
    )
    if on_listening is not None:
        on_listening(coordinator)
    try:
        return await coordinator.run()
    finally:
        registry.leave_failures(spec.name, coordinator.failures)
        registry.unregister(spec.name, pid)
        if before is not None and not same_run and registry.is_alive(before):
            registry.register(before)  # this run was refused, and the other one goes on
        await asyncio.shield(coordinator.close())
