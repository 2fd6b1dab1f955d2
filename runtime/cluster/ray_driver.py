"""Runs a job on Ray: makes the coordinator's actor and follows the job through its takeovers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray

from ...errors import JobError
from ...operators.clock import SystemClock
from ..admission import ListenerLimits
from ..availability_options import CLUSTER_CONNECT_TIMEOUT, STANDBY_COORDINATORS
from ..control import registry
from ..control.client import CoordinatorClient, outcome_of
from ..control.messages import Event
from ..job_spec import JobSpec
from ..options import METRICS_HOST, METRICS_PORT, Options
from ..protocol.job_result import JobOutcome
from ..shipping import ship
from .connect import connect_to_cluster
from .console import console
from .embedded import embedded_ray
from .embedded_health import while_ray_lives
from .leaders import SEARCH_EVERY_S, TAKEOVER_TIMEOUT_S, Leaders
from .ray_actors import NAMESPACE, CoordinatorActor, Pair, ProcessSetup

FENCED = "fenced"
"""Reason of the end that a coordinator announces which another one has replaced."""
_log = logging.getLogger("headgate.cluster")


async def run_on_ray(
    spec: JobSpec,
    address: str | None,
    *,
    on_event: Callable[[Event], None] | None,
    on_listening: Callable[[list[str], str], None] | None,
    on_connected: Callable[[], None] | None,
) -> JobOutcome:
    """Run `spec` on an embedded Ray (`address` None) or on the cluster at `address`."""
    timeout_ms = Options(spec.options).get(CLUSTER_CONNECT_TIMEOUT)
    async with _connected(address, timeout_ms) as stem:
        if on_connected is not None:
            on_connected()
        setup = _setup(spec, address, stem)
        token = secrets.token_hex(16)
        actors = await asyncio.to_thread(_make_coordinators, spec, token, setup, address)
        leaders = Leaders(actors)
        following = _follow(spec, leaders, token, on_event, on_listening)
        try:
            outcome = await (following if address else while_ray_lives(following))
            await leaders.leave()
            return outcome
        finally:
            for actor in actors:
                ray.kill(actor, no_restart=True)


@contextlib.asynccontextmanager
async def _connected(address: str | None, timeout_ms: int) -> AsyncIterator[str | None]:
    """Connect to a Ray; yields where workers send what they print, if that comes here."""
    if address is None:
        with embedded_ray() as directory, console(directory) as stem:
            yield stem
        return
    await connect_to_cluster(address, NAMESPACE, timeout_ms)
    try:
        yield None
    finally:
        ray.shutdown()


def _setup(spec: JobSpec, address: str | None, stem: str | None) -> ProcessSetup:
    local = address is None
    options = Options(spec.options)
    return ProcessSetup(
        directory=os.getcwd(),
        console=stem,
        python_path=tuple(path for path in sys.path if path),
        unix_dir=os.environ.get("TMPDIR", "/tmp"),
        host="127.0.0.1" if local else "",
        log_level=logging.getLogger("headgate").getEffectiveLevel(),
        metrics_port=options.get(METRICS_PORT),
        metrics_host=options.get(METRICS_HOST),
        cluster_name="local" if local else str(address),
        limits=ListenerLimits.of(options),
    )


def _make_coordinators(
    spec: JobSpec, token: str, setup: ProcessSetup, address: str | None
) -> list[Any]:
    """The coordinator's actor, and perhaps one that stands by."""
    name = f"headgate-{spec.name}"
    names = [name, f"{name}:standby"]
    _clear_names(spec.name, names, setup.cluster_name, take_over=spec.take_over)
    # Without a job log nothing would keep two of them apart.
    alone = spec.checkpoint is None or not Options(spec.options).get(STANDBY_COORDINATORS)
    pairs: list[Pair | None] = [None] if alone else [Pair(names[1], True), Pair(names[0], False)]
    options: dict[str, Any] = {"namespace": NAMESPACE}
    if address is not None:
        options["lifetime"] = "detached"
    job = ship(spec)
    return [
        CoordinatorActor.options(name=own, **options).remote(job, token, setup, pair)  # type: ignore[attr-defined]
        for own, pair in zip(names, pairs, strict=False)
    ]


def _clear_names(job: str, names: list[str], cluster: str, *, take_over: bool) -> None:
    """Remove coordinators of a job that has ended, or that is to be taken over.

    Raises:
        JobError: the job still runs. `headgate stop` finds it from now on.
    """
    held = False
    for name in names:
        try:
            holder = ray.get_actor(name, NAMESPACE)
        except ValueError:
            continue
        # The log has what the next run needs, and its workers are dropped by whoever leads next.
        if take_over or not ray.get(holder.alive.remote(), timeout=TAKEOVER_TIMEOUT_S):
            ray.kill(holder, no_restart=True)
            continue
        lead, token = ray.get(
            [holder.lead.remote(), holder.credentials.remote()], timeout=TAKEOVER_TIMEOUT_S
        )
        held = True
        if lead is None:
            continue  # it stands by, or has only just begun
        registry.register(
            registry.JobRecord(
                name=job,
                addresses=lead.addresses,
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


async def _follow(
    spec: JobSpec,
    leaders: Leaders,
    token: str,
    on_event: Callable[[Event], None] | None,
    on_listening: Callable[[list[str], str], None] | None,
) -> JobOutcome:
    """Watch the job until it ends; when its coordinator dies, wait for the next one."""
    lead = await leaders.find()
    loop = asyncio.get_running_loop()
    until = loop.time() + TAKEOVER_TIMEOUT_S
    while True:
        try:
            client = await CoordinatorClient.connect(lead.addresses, token)
        except JobError:
            # One that adopts a job which is through needs less time than we to find it.
            ended = await leaders.outcome()
            if ended is not None:
                return ended
            if not await leaders.alive() or loop.time() >= until:
                raise
            await asyncio.sleep(SEARCH_EVERY_S)
            lead = await leaders.find()  # its process died just now
            continue
        if on_listening is not None:
            on_listening(lead.addresses, token)
        try:
            outcome = await leaders.while_leading(lead, _watch(client, on_event))
        finally:
            await client.close()
        until = loop.time() + TAKEOVER_TIMEOUT_S
        if outcome is None:
            text = f"the coordinator of job {spec.name} died (pid {lead.pid}); waiting for its successor"
            _tell(on_event, text, lead.pid)
            lead = await leaders.find()
        elif outcome.reason == FENCED and (other := await leaders.successor(lead)) is not None:
            lead = other
        else:
            return outcome


def _tell(on_event: Callable[[Event], None] | None, text: str, pid: int) -> None:
    if on_event is None:
        _log.warning("%s", text)
    else:
        on_event(Event(kind="takeover", text=text, body=json.dumps({"pid": pid}).encode()))


async def _watch(
    client: CoordinatorClient, on_event: Callable[[Event], None] | None
) -> JobOutcome | None:
    """Pass events on until the job ends; None if the coordinator went away before."""
    try:
        async for event in client.events():
            if on_event is not None:
                on_event(event)
            if event.kind == "ended":
                return outcome_of(event)
    except JobError:
        return None
    return None
