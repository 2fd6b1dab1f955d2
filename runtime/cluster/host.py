"""Hosts a coordinator in this process: it listens, can be found, and runs the job to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from ...errors import HeadgateError
from ...operators.clock import Clock
from ..control import registry
from ..control.cluster import Cluster
from ..control.job_client import ask_once
from ..coordinator.job import JobCoordinator
from ..listening import ListenerLimits
from ..observe.logs import tapped
from ..observe.metrics import MetricsRegistry
from ..options.monitoring import METRICS_HOST, METRICS_PORT
from ..options.registry import Options
from ..plan import JobSpec
from ..protocol.job_result import JobOutcome
from ..rest.server import RestServer, needs_port
from ..storage.base import StoreOpener

if TYPE_CHECKING:
    from ..observe.endpoint import MetricsEndpoint

DISMISS_S: Final = 5.0
"""A new coordinator waits at most this long for the one that it has taken over from, in s."""
REST_RETRY_S: Final = 1.0
"""The pause between attempts of a coordinator that takes over to open the port of the REST API."""
_log = logging.getLogger("headgate.cluster")


class CoordinatorPlace(msgspec.Struct, frozen=True):
    """Where and when a coordinator runs.

    Attributes:
        clock: the clock.
        cluster_name: the name that `headgate list` shows.
        host: the address of this machine for the peers.
        takes_over: another coordinator has led this run, so a store that is away is no mistake of the user.
    """

    clock: Clock
    cluster_name: str
    host: str = "127.0.0.1"
    takes_over: bool = False


async def host_coordinator(
    spec: JobSpec,
    cluster: Cluster,
    place: CoordinatorPlace,
    *,
    open_store: StoreOpener,
    token: str | None = None,
    on_listening: Callable[[JobCoordinator], None] | None = None,
    metrics: MetricsRegistry | None = None,
    on_ended: Callable[[JobOutcome], Awaitable[None]] | None = None,
) -> JobOutcome:
    """Run `spec` under a coordinator in this event loop.

    Args:
        spec: the job.
        cluster: where workers come from; not closed here.
        place: where it runs.
        open_store: makes checkpoint stores.
        token: secret of workers and clients; None: a random one.
        on_listening: called once clients in other processes can connect.
        metrics: what the endpoint of this process serves, besides the job; None: nothing besides.
        on_ended: awaited when the job has ended. Until it returns the REST API and the metrics stay open.

    Raises:
        HeadgateError: the job could not begin, or was fenced by a newer coordinator.
    """
    metrics = metrics or MetricsRegistry()
    options = Options(spec.options)
    query_token = registry.query_token(options, token)
    endpoint = _open_endpoint(metrics, options, place)
    coordinator = JobCoordinator(
        spec,
        cluster=cluster,
        clock=place.clock,
        open_store=open_store,
        token=token,
        metrics=metrics,
        takes_over=place.takes_over,
    )
    coordinator.metrics_url = endpoint.url if endpoint is not None else ""
    rest = RestServer(
        coordinator.clients,
        coordinator.server.token,
        options,
        place.clock,
        query_token=query_token,
    )
    try:
        with tapped(coordinator.keep_line):
            outcome = await _serve(coordinator, rest, options, place, on_listening)
            if on_ended is not None:
                await on_ended(outcome)
            return outcome
    finally:
        await asyncio.shield(rest.close())
        if endpoint is not None:
            await asyncio.to_thread(endpoint.close)


def _open_endpoint(
    metrics: MetricsRegistry, options: Options, place: CoordinatorPlace
) -> MetricsEndpoint | None:
    """Open the Prometheus endpoint of this process, if the job has one."""
    port = options.get(METRICS_PORT)
    if port is None:
        return None
    from ..observe.endpoint import open_endpoint  # an HTTP server takes a while to import

    limits = ListenerLimits.of(options)
    return open_endpoint(metrics, port, options.get(METRICS_HOST), limits, place.host)


async def _open_port(
    rest: RestServer, coordinator: JobCoordinator, host: str, *, takes_over: bool
) -> asyncio.Task[None] | None:
    """Open the TCP port of the REST API.

    After a takeover it may be taken for longer than it is waited for, and the job must go on: then a task
    that is returned keeps trying. Those who find the job by its log get to know the port only if it was
    open when this coordinator began to lead.

    Raises:
        HeadgateError: no port can be opened, and nothing has run yet.
    """

    async def listen() -> None:
        await rest.listen(host)
        coordinator.rest_url = rest.url
        coordinator.rest_addresses = rest.addresses

    async def keep_trying() -> None:
        while not rest.url:
            await asyncio.sleep(REST_RETRY_S)
            try:
                await listen()
            except HeadgateError as error:
                _log.warning("no port for the REST API yet, trying again: %s", error)

    try:
        await listen()
    except HeadgateError as error:
        if not takes_over:
            raise
        _log.warning("no port for the REST API yet, trying again: %s", error)
        return asyncio.get_running_loop().create_task(keep_trying(), name="open REST API")
    return None


@contextlib.asynccontextmanager
async def _rest_api(
    rest: RestServer, coordinator: JobCoordinator, options: Options, place: CoordinatorPlace
) -> AsyncIterator[None]:
    """Open the REST API for the time of the block; a task that tries to open its port ends with it."""
    name, token = coordinator.spec.name, coordinator.server.token
    await rest.listen_unix(registry.rest_socket_path(name, os.getpid(), token))
    coordinator.rest_addresses = rest.addresses
    opening: asyncio.Task[None] | None = None
    if needs_port(options, place.host):
        opening = await _open_port(rest, coordinator, place.host, takes_over=place.takes_over)
    try:
        yield
    finally:
        if opening is not None:
            opening.cancel()


async def _dismiss(former: registry.JobRecord) -> None:
    """Let a coordinator that was taken over look into the log, before it would with its next checkpoint.

    It is asked to cancel its job. Before it deletes anything it writes the end to the log, where it finds
    the entry of the new coordinator: it is fenced, and stops.
    """
    from ..rest.client import RestClient  # aiohttp takes a while, and few starts take over

    try:
        async with asyncio.timeout(DISMISS_S):
            await ask_once(partial(RestClient.connect, former.addresses, former.token), "cancel")
    except (HeadgateError, TimeoutError) as error:
        _log.info("the coordinator that was taken over: %s", error)


def _former_record(job: str) -> registry.JobRecord | None:
    """Return the record of a coordinator of the job; one that cannot be read is replaced by our own."""
    try:
        return registry.find(job)
    except HeadgateError as error:
        _log.warning("%s", error)
        return None


async def _serve(
    coordinator: JobCoordinator,
    rest: RestServer,
    options: Options,
    place: CoordinatorPlace,
    on_listening: Callable[[JobCoordinator], None] | None,
) -> JobOutcome:
    spec = coordinator.spec
    pid = os.getpid()
    before = _former_record(spec.name)
    # One of the same run is dead, though perhaps not for the system yet, or will be fenced.
    same_run = before is not None and before.token == coordinator.server.token
    if before is not None and (same_run or not registry.is_alive(before)):
        registry.forget(before)
    elif before is not None and spec.take_over:
        coordinator.on_lead = partial(_dismiss, before)
    token = coordinator.server.token
    await coordinator.server.listen(registry.socket_path(spec.name, pid, token), place.host)
    record: registry.JobRecord | None = None
    try:
        async with _rest_api(rest, coordinator, options, place):
            record = registry.JobRecord(
                name=spec.name,
                addresses=list(coordinator.rest_addresses),
                token=token,
                pid=pid,
                started_ms=place.clock.now_ms(),
                cluster=place.cluster_name,
            )
            registry.register(record)
            if on_listening is not None:
                on_listening(coordinator)
            return await coordinator.run()
    finally:
        registry.leave_failures(spec.name, coordinator.failures)
        if record is not None:
            registry.unregister(record)
        if before is not None and not same_run and registry.is_alive(before):
            registry.register(before)  # this run was refused, and the other one goes on
        await asyncio.shield(coordinator.close())
