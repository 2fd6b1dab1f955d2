"""The jobs of a Ray cluster, found by the names of their coordinators' actors."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from ...errors import HeadgateError, JobNotFound
from ..protocol.job_result import JobOutcome
from .connect import ray_cluster
from .leaders import FIND_TIMEOUT_S, Leaders, settled
from .ray_actors import NAMESPACE, STANDBY_SUFFIX, actor_names

_PREFIX = actor_names("")[0]


async def find_on_cluster(address: str, job: str, timeout_ms: int) -> tuple[tuple[str, ...], str]:
    """Where the coordinator of a job listens, and its token: Ray has let us in.

    Raises:
        JobNotFound: no such job runs there.
        JobError: the cluster, or the coordinator, does not answer.
    """
    async with ray_cluster(address, NAMESPACE, timeout_ms):
        actors = await asyncio.to_thread(_actors, actor_names(job))
        if not actors:
            running = ", ".join(await asyncio.to_thread(_names))
            raise JobNotFound(
                f"no such job runs on the cluster name=`{job}` cluster=`{address}`",
                fix=f"running jobs: {running}" if running else "no job runs there",
            )
        return await _find(actors)


async def list_on_cluster(address: str, timeout_ms: int) -> list[tuple[str, tuple[str, ...], str]]:
    """Name, addresses and token of every job on the cluster whose coordinator can be found, by name."""
    found = []
    async with ray_cluster(address, NAMESPACE, timeout_ms):
        for job in await asyncio.to_thread(_names):
            actors = await asyncio.to_thread(_actors, actor_names(job))
            try:
                found.append((job, *(await _find(actors))))
            except HeadgateError:
                continue  # it has ended, or could not begin
    return found


async def _find(actors: list[Any]) -> tuple[tuple[str, ...], str]:
    lead = await Leaders(actors).find(within_s=FIND_TIMEOUT_S)
    if isinstance(lead, JobOutcome):
        raise JobNotFound(
            f"the job does not run: it has just ended as {lead.status}",
            fix="`headgate history` shows its runs, if it has checkpoints",
        )
    for actor in actors:
        token: str | None = await settled(actor, "credentials")
        if token is not None:
            return lead.addresses, token
    raise JobNotFound("the job does not run: its coordinator was removed from the cluster")


def _names() -> list[str]:
    """The jobs that have a coordinator's actor. Workers of a job called `headgate-...` are none."""
    names = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE
    ]
    jobs = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
    own = [job for job in jobs if not job.endswith(STANDBY_SUFFIX)]
    return sorted(job for job in own if any(hasattr(a, "lead") for a in _actors([_PREFIX + job])))


def _actors(names: list[str]) -> list[Any]:
    found = []
    for name in names:
        try:
            found.append(ray.get_actor(name, NAMESPACE))
        except ValueError:
            continue
    return found
