"""Runs a job on Ray: makes the coordinator's actor and follows the job through its takeovers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ray

from ...errors import HeadgateError, JobError
from ...operators.clock import SystemClock
from ..control import registry
from ..control.job_client import (
    FENCED,
    ConnectListener,
    EventListener,
    JobClient,
    PublishedEvent,
    outcome_of,
    watch,
)
from ..control.registry import make_token
from ..coordinator.clients import connect_locally
from ..coordinator.ending import outcome_of_end
from ..coordinator.job import JobCoordinator
from ..listening import LOOPBACK, Listener, ListenerLimits
from ..observe.logs import printed_level
from ..options.monitoring import METRICS_HOST, METRICS_PORT
from ..options.recovery import (
    CLUSTER_CONNECT_TIMEOUT,
    COORDINATOR_RETURN_TIMEOUT,
    SHUTDOWN_GRACE,
    STANDBY_COORDINATORS,
)
from ..options.registry import Options
from ..plan import JobSpec
from ..protocol.job_result import JobOutcome
from ..rest.client import RestClient
from ..shipping import ship
from ..storage.open_store import open_store_at
from ..storage.stored_jobs import find_job
from .connect import ray_cluster
from .embedded import embedded_ray, while_ray_lives
from .leaders import SEARCH_EVERY_S, Leaders, ask_actor
from .process import console
from .ray_actors import (
    NAMESPACE,
    CoordinatorActor,
    Lead,
    Pair,
    ProcessSetup,
    actor_names,
    host_on_ray,
)
from .ray_nodes import rules_of

_log = logging.getLogger("headgate.cluster")


async def run_on_ray(
    spec: JobSpec,
    address: str | None,
    *,
    on_event: EventListener | None,
    on_listening: ConnectListener | None,
    on_connected: Callable[[], None] | None,
) -> JobOutcome:
    """Run `spec` on an embedded Ray (`address` None) or on the cluster at `address`."""
    async with _connected(address, Options(spec.options)) as stem:
        if on_connected is not None:
            on_connected()
        actors = await _coordinators(spec, _setup(spec, address, stem), address)
        outcome: JobOutcome | None = None
        following = _follow(spec, actors.leaders, actors.token, on_event, on_listening)
        try:
            outcome = await (following if address else while_ray_lives(following))
            await actors.leaders.leave()
            return outcome
        finally:
            if actors.made or outcome is not None:
                actors.kill()


async def submit_to_ray(spec: JobSpec, address: str) -> None:
    """Have the Ray cluster at `address` run `spec`; returns once the job has begun.

    If this very run goes on there already nothing is started.

    Raises:
        HeadgateError: the job could not begin.
    """
    async with _connected(address, Options(spec.options)):
        actors = await _coordinators(spec, _setup(spec, address, None), address)
        try:
            await _begun(spec, actors.leaders, actors.token)
        except BaseException:
            if actors.made:
                actors.kill()
            raise


async def host_here(
    spec: JobSpec,
    address: str,
    *,
    console_stem: str,
    takes_over: bool,
    on_event: EventListener,
    on_listening: ConnectListener,
    on_connected: Callable[[], None],
    on_ended: Callable[[JobOutcome], Awaitable[None]],
) -> JobOutcome:
    """Run `spec` with its coordinator in this process and its workers on the Ray cluster at `address`.

    If this process dies, its supervisor has to start it again, with the same run.

    Args:
        spec: the job.
        address: of a Ray cluster that has a node here.
        console_stem: the pipes to which workers print, if they have a reader (`process.py`).
        takes_over: another process has led this run.
        on_event: sees everything the coordinator announces.
        on_listening: gets what connects to the coordinator.
        on_connected: called once the cluster is there; the job has not begun before that.
        on_ended: awaited when the job has ended. Until it returns the REST API and the metrics stay open.

    Raises:
        HeadgateError: the job could not begin, or a newer coordinator took over.
    """
    async with _connected(address, Options(spec.options)):
        on_connected()

        def listening(coordinator: JobCoordinator) -> None:
            coordinator.on_event = on_event
            on_listening(connect_locally(coordinator.clients))

        return await host_on_ray(
            spec,
            _setup(spec, address, console_stem),
            token=make_token(Options(spec.options)),
            on_listening=listening,
            takes_over=takes_over,
            on_ended=on_ended,
        )


async def _begun(spec: JobSpec, leaders: Leaders, token: str) -> None:
    """Wait until a coordinator has begun with the job, or has refused it.

    Raises:
        HeadgateError: the job could not begin.
    """
    while True:
        found = await _reach(spec, leaders, token)
        outcome = found if isinstance(found, JobOutcome) else await _beginning(found.client)
        if outcome is None:
            continue  # its process died; Ray makes another one
        if isinstance(outcome, JobOutcome) and outcome.error is not None:
            raise outcome.error
        return


async def _beginning(client: JobClient) -> JobOutcome | Literal["begun"] | None:
    """Wait until the job begins, or return how it ended before that; None: the coordinator went away."""
    try:
        async for event in client.events():
            if event.kind != "ended":
                return "begun"
            return outcome_of(event)
    except JobError:
        pass
    finally:
        await client.close()
    return None


@dataclass(frozen=True, slots=True)
class _Coordinators:
    """The actors of a coordinator; `made` by this process, or found."""

    actors: list[Any]
    token: str
    made: bool

    @property
    def leaders(self) -> Leaders:
        """Return an object that finds out which one leads."""
        return Leaders(self.actors)

    def kill(self) -> None:
        """End the actors at once."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


async def _coordinators(spec: JobSpec, setup: ProcessSetup, address: str | None) -> _Coordinators:
    """Return the coordinators of this very run, if it goes on; else new ones.

    Raises:
        JobError: another run of the job goes on.
    """
    found = await _running(spec, setup.cluster_name)
    if found is not None:
        return found
    token = make_token(Options(spec.options))
    return _Coordinators(
        await asyncio.to_thread(_make_coordinators, spec, token, setup, address), token, True
    )


@contextlib.asynccontextmanager
async def _connected(address: str | None, options: Options) -> AsyncIterator[str | None]:
    """Connect to a Ray; yields the pipes to which workers print, if their output comes here."""
    if address is None:
        with embedded_ray() as directory, console(directory) as stem:
            yield stem
        return
    async with ray_cluster(address, NAMESPACE, options.get(CLUSTER_CONNECT_TIMEOUT)):
        yield None


def _setup(spec: JobSpec, address: str | None, stem: str | None) -> ProcessSetup:
    local = address is None
    options = Options(spec.options)
    return ProcessSetup(
        directory=os.getcwd(),
        console=stem,
        python_path=tuple(path for path in sys.path if path),
        unix_dir=os.environ.get("TMPDIR", "/tmp"),
        host=LOOPBACK if local else "",
        log_level=printed_level(),
        metrics_port=options.get(METRICS_PORT),
        metrics_host=options.get(METRICS_HOST),
        cluster_name="local" if local else str(address),
        limits=ListenerLimits.of(options),
        grace_s=options.get(SHUTDOWN_GRACE) / 1000,
        detached=not local,
        data=Listener.data(options),
        nodes=None if local else rules_of(spec),
    )


def _make_coordinators(
    spec: JobSpec, token: str, setup: ProcessSetup, address: str | None
) -> list[Any]:
    """The actor of a coordinator, and perhaps one that stands by."""
    names = actor_names(spec.name)
    # Without a job log nothing would keep two of them apart.
    alone = spec.checkpoint is None or not Options(spec.options).get(STANDBY_COORDINATORS)
    pairs: list[Pair | None] = [None] if alone else [Pair(names[1], True), Pair(names[0], False)]
    options: dict[str, Any] = {"namespace": NAMESPACE}
    if address is not None:
        options["lifetime"] = "detached"
    job = ship(spec)
    return [
        CoordinatorActor.options(name=own, **options).remote(job, spec.run, token, setup, pair)  # type: ignore[attr-defined]
        for own, pair in zip(names, pairs, strict=False)
    ]


async def _running(spec: JobSpec, cluster: str) -> _Coordinators | None:
    """The coordinators of this very run; those of one that has ended, or is to be taken over, are removed.

    Raises:
        JobError: another run of the job goes on. `headgate stop` finds it from now on.
    """
    job = spec.name
    held = False
    same: list[Any] = []
    for name in actor_names(job):
        try:
            holder = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        except ValueError:
            continue
        # The log has what the next run needs, and the next leader drops its workers.
        if spec.take_over or not await ask_actor(holder, "alive"):
            await asyncio.to_thread(ray.kill, holder, no_restart=True)
            continue
        run = await ask_actor(holder, "run_id")
        if run == spec.run:
            same.append(holder)
            continue
        lead, token = await ask_actor(holder, "lead"), await ask_actor(holder, "credentials")
        held = held or run is not None
        if lead is None or token is None:
            continue  # it stands by, or has only just begun, or was removed just now
        registry.register(
            registry.JobRecord(
                name=job,
                addresses=list(lead.addresses),
                token=token,
                pid=lead.pid,
                started_ms=SystemClock().now_ms(),
                cluster=cluster,
            )
        )
    if held:
        raise JobError(
            f"a job of this name runs on the cluster already name=`{job}`",
            fix=f"stop it first (headgate stop {job}), or end it and go on from its newest checkpoint with "
            "--take-over, in Python take_over=True",
        )
    token = await ask_actor(same[0], "credentials") if same else None
    return None if token is None else _Coordinators(same, token, False)


async def _follow(
    spec: JobSpec,
    leaders: Leaders,
    token: str,
    on_event: EventListener | None,
    on_listening: ConnectListener | None,
) -> JobOutcome:
    """Watch the job until it ends; when its coordinator dies, wait for the next one."""
    found = await _reach(spec, leaders, token)
    while not isinstance(found, JobOutcome):
        lead = found.lead
        if on_listening is not None:
            on_listening(partial(RestClient.connect, lead.addresses, token))
        try:
            outcome = await leaders.while_leading(lead, watch(found.client, on_event))
        finally:
            await found.client.close()
        if outcome is None:
            text = (
                f"the connection to the coordinator of job {spec.name} broke (pid {lead.pid}); "
                "looking for it, or its successor"
            )
            _tell(on_event, text, lead.pid)
            found = await _reach(spec, leaders, token)
        elif outcome.reason == FENCED:
            try:
                found = await _reach(spec, leaders, token, but=lead)
            except HeadgateError:
                return outcome  # another run has the job now
        else:
            return outcome
    return found


@dataclass(frozen=True, slots=True)
class _Reached:
    """A coordinator that leads, and a connection to it."""

    lead: Lead
    client: JobClient


async def _reach(
    spec: JobSpec, leaders: Leaders, token: str, but: Lead | None = None
) -> _Reached | JobOutcome:
    """Connect to the coordinator that leads, or find out how the job ended.

    Args:
        spec: the job.
        leaders: the processes of its coordinator.
        token: their secret.
        but: this one does not lead, whatever it says.

    Raises:
        HeadgateError: a coordinator could not start, or none leads in time, or it cannot be reached from
            here; and the job log does not say that the run has ended.
    """
    loop = asyncio.get_running_loop()
    patience_s = Options(spec.options).get(COORDINATOR_RETURN_TIMEOUT) / 1000
    until = loop.time() + patience_s
    while True:
        try:
            found = await leaders.find(patience_s, but)
            if isinstance(found, JobOutcome):
                return found
            try:
                client = await RestClient.connect(found.addresses, token)
            except JobError:
                # Either its process died just now, or its job has just ended: then it knows how.
                if loop.time() >= until:
                    raise
                await asyncio.sleep(SEARCH_EVERY_S)
                continue
        except HeadgateError:
            ended = await _logged_end(spec)
            if ended is None:
                raise
            return ended
        return _Reached(found, client)


async def _logged_end(spec: JobSpec) -> JobOutcome | None:
    """Return how this run ended by the job log; None: it has not, or the log cannot be read from here."""
    if spec.checkpoint is None:
        return None
    storage, clock = spec.checkpoint.storage, SystemClock()
    try:
        job = await find_job(open_store_at, storage, spec.name, spec.options, clock)
    except HeadgateError as error:
        _log.info("the job log does not say how the job ended: %s", error)
        return None
    end = job.end_of(spec.run)
    return None if end is None else outcome_of_end(end)


def _tell(on_event: EventListener | None, text: str, pid: int) -> None:
    if on_event is None:
        _log.warning("%s", text)
    else:
        on_event(PublishedEvent(kind="takeover", text=text, body=json.dumps({"pid": pid}).encode()))
