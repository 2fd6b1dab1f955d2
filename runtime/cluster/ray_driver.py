"""Runs a job on Ray: makes the coordinator's actor and follows the job through its takeovers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from ...errors import HeadgateError, JobError
from ...operators.clock import SystemClock
from ..control import registry
from ..control.client import CoordinatorClient, error_of
from ..control.messages import Event
from ..coordinator.job import JobOutcome
from ..job_spec import JobSpec
from ..options import METRICS_HOST, METRICS_PORT, Options
from ..shipping import ship
from .console import console
from .embedded import embedded_ray
from .embedded_health import while_ray_lives
from .ray_actors import NAMESPACE, CoordinatorActor, ProcessSetup

TAKEOVER_TIMEOUT_S = 60.0
"""A crashed coordinator that is not back by then is given up."""
CLOSE_TIMEOUT_S = 5.0
"""A coordinator that has not closed its server by then, after its job has ended, is killed."""
_log = logging.getLogger("headgate.cluster")


async def run_on_ray(
    spec: JobSpec,
    address: str | None,
    *,
    on_event: Callable[[Event], None] | None,
    on_listening: Callable[[list[str], str], None] | None,
) -> JobOutcome:
    """Run `spec` on an embedded Ray (`address` None) or on the cluster at `address`."""
    with _connected(address) as stem:
        setup = _setup(spec, address, stem)
        token = secrets.token_hex(16)
        actor = await asyncio.to_thread(_make_coordinator, spec, token, setup, address)
        following = _follow(spec, actor, token, on_event, on_listening)
        try:
            outcome = await (following if address else while_ray_lives(following))
            await _let_go(actor)
            return outcome
        finally:
            ray.kill(actor, no_restart=True)


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[str | None]:
    """Connect to a Ray; yields where workers send what they print, if that comes here."""
    if address is None:
        with embedded_ray() as directory, console(directory) as stem:
            yield stem
        return
    try:
        ray.init(
            address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False
        )
    except Exception as error:
        raise JobError(
            f"cannot connect to the Ray cluster address=`{address}`: {error}",
            fix="check the address; ray:// needs `pip install 'headgate[ray-client]'`, and a cluster with "
            "token authentication RAY_AUTH_TOKEN in the environment",
        ) from error
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
    )


def _make_coordinator(spec: JobSpec, token: str, setup: ProcessSetup, address: str | None) -> Any:
    options: dict[str, Any] = {"name": f"headgate-{spec.name}", "namespace": NAMESPACE}
    if address is not None:
        options["lifetime"] = "detached"
    factory = CoordinatorActor.options(**options)  # type: ignore[attr-defined]
    try:
        return factory.remote(ship(spec), token, setup)
    except ValueError as error:
        _clear_name(spec.name, setup.cluster_name, error)
    return factory.remote(ship(spec), token, setup)


def _clear_name(name: str, cluster: str, error: ValueError) -> None:
    """The name of the coordinator is taken: remove one whose job has ended.

    Raises:
        JobError: its job still runs. `headgate stop` finds it from now on.
    """
    try:
        holder = ray.get_actor(f"headgate-{name}", NAMESPACE)
    except ValueError:
        return  # gone in the meantime
    if not ray.get(holder.alive.remote(), timeout=TAKEOVER_TIMEOUT_S):
        ray.kill(holder, no_restart=True)
        return
    (addresses, pid), held_token = ray.get(
        [holder.where.remote(), holder.credentials.remote()], timeout=TAKEOVER_TIMEOUT_S
    )
    registry.register(
        registry.JobRecord(
            name=name,
            addresses=addresses,
            token=held_token,
            pid=pid,
            started_ms=SystemClock().now_ms(),
            cluster=cluster,
        )
    )
    raise JobError(
        f"a job of this name runs on the cluster already name=`{name}`",
        fix=f"stop it first: headgate stop {name}",
    ) from error


async def _follow(
    spec: JobSpec,
    actor: Any,
    token: str,
    on_event: Callable[[Event], None] | None,
    on_listening: Callable[[list[str], str], None] | None,
) -> JobOutcome:
    """Watch the job until it ends; when its coordinator dies, wait for the next one."""
    takeovers = 0
    while True:
        addresses, pid = await _where(actor)
        try:
            client = await CoordinatorClient.connect(addresses, token)
        except JobError:
            # One that adopts a job which is through needs less time than we to find it.
            ended: JobOutcome | None = await asyncio.wrap_future(actor.ended.remote().future())
            if ended is None:
                raise
            return ended
        if on_listening is not None:
            on_listening(addresses, token)
        try:
            outcome = await _watch(client, on_event)
        finally:
            await client.close()
        if outcome is not None:
            return outcome
        takeovers += 1
        text = f"the coordinator of job {spec.name} died (pid {pid}); waiting for its successor"
        if on_event is None:
            _log.warning("%s", text)
        else:
            on_event(Event(kind="takeover", text=text, body=json.dumps({"pid": pid}).encode()))


async def _let_go(actor: Any) -> None:
    """Give a coordinator whose job has ended the time to remove its socket."""
    with contextlib.suppress(RayActorError, TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            while await asyncio.wrap_future(actor.alive.remote().future()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def _where(actor: Any) -> tuple[list[str], int]:
    """Addresses of the coordinator's control server, once Ray has (re)started the actor."""
    deadline = asyncio.get_running_loop().time() + TAKEOVER_TIMEOUT_S
    while True:
        try:
            found: tuple[list[str], int] = await asyncio.wrap_future(actor.where.remote().future())
            return found
        except RayTaskError as error:
            raise _cause(error) from None
        except RayActorError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise JobError(f"the coordinator does not come back: {error}") from error
            await asyncio.sleep(0.1)


def _cause(error: Any) -> HeadgateError:
    cause = error.cause
    return cause if isinstance(cause, HeadgateError) else JobError(str(cause))


async def _watch(
    client: CoordinatorClient, on_event: Callable[[Event], None] | None
) -> JobOutcome | None:
    """Pass events on until the job ends; None if the coordinator went away before."""
    try:
        async for event in client.events():
            if on_event is not None:
                on_event(event)
            if event.kind == "ended":
                body = json.loads(event.body)
                return JobOutcome(
                    body["status"], body["reason"], error_of(event), body.get("checkpoint", 0)
                )
    except JobError:
        return None
    return None
