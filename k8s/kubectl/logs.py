"""The logs of a job's pods, each line with the name of its pod in front."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import JobError
from ..objects import HEAD, ROLE, WORKER
from ..operator.api import ApiError
from ..spec import CONTAINER
from .cluster import JobCluster, explained
from .views import PodView, job_view, pod_view

NEW_PODS_S: Final = 2.0
"""The interval of the search for new pods and restarts whose log is not followed yet."""
ROLES: Final = (HEAD, WORKER)
_WITHOUT_PODS: Final = frozenset(("Finished", "Failed", "Suspended"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The lines that are wanted.

    Attributes:
        role: `head` or `worker`; empty: both.
        previous: take the containers before the last restart.
        tail: the number of last lines of each container; None: all.
        since_s: the age of the oldest line, in seconds; None: all.
        timestamps: each line begins with its time.
    """

    role: str = ""
    previous: bool = False
    tail: int | None = None
    since_s: int | None = None
    timestamps: bool = False

    def query(self, *, follow: bool) -> dict[str, str]:
        """The wanted lines as a query of the API server."""
        said = {
            "container": CONTAINER,
            "follow": "true" if follow else None,
            "previous": "true" if self.previous else None,
            "tailLines": self.tail,
            "sinceSeconds": self.since_s,
            "timestamps": "true" if self.timestamps else None,
        }
        return {name: str(value) for name, value in said.items() if value is not None}


Write = Callable[[str], None]


async def print_logs(
    cluster: JobCluster, job: str, wanted: Wanted, write: Write, warn: Write
) -> None:
    """Write the existing logs, first of the head, then of the workers.

    Raises:
        JobError: there is no pod, or no log at all.
    """
    pods = await _pods(cluster, job, wanted)
    if not pods:
        await cluster.job(job)  # its error names the existing StreamJobs
        raise JobError(
            f"job {job} has no {wanted.role or 'head or worker'} pod: there is no log",
            fix=f"`headgate k8s status {job}` shows why",
        )
    found = 0
    for pod in pods:
        try:
            await _print_one(cluster, pod, wanted.query(follow=False), write)
            found += 1
        except ApiError as error:
            if error.status != 400:
                raise explained(error) from None
            warn(f"{pod.name}: {error.answer}{f' ({pod.trouble})' if pod.trouble else ''}")
    if not found:
        raise JobError(f"no pod of job {job} has such a log")


async def follow_logs(
    cluster: JobCluster, job: str, wanted: Wanted, write: Write, warn: Write
) -> None:
    """Write the logs and all new lines, also of new pods, until the job is at rest."""
    following: dict[str, asyncio.Task[bool]] = {}
    try:
        while True:
            view = job_view(await cluster.job(job))
            for pod in await _pods(cluster, job, wanted):
                task = following.get(pod.container)
                begun = task is not None and not (task.done() and not task.result())
                if pod.container and not begun:
                    following[pod.container] = asyncio.create_task(
                        _follow_one(cluster, pod, wanted, write, warn)
                    )
            if view.phase in _WITHOUT_PODS and all(task.done() for task in following.values()):
                warn(f"job {job} is {view.phase}")
                return
            await asyncio.sleep(NEW_PODS_S)
    finally:
        for task in following.values():
            task.cancel()
        await asyncio.gather(*following.values(), return_exceptions=True)


async def _follow_one(
    cluster: JobCluster, pod: PodView, wanted: Wanted, write: Write, warn: Write
) -> bool:
    """Follow one log to its end; return False if there is no log yet."""
    try:
        await _print_one(cluster, pod, wanted.query(follow=True), write)
        warn(f"{pod.name}: the log ends here")
    except ApiError as error:
        if error.status == 400:
            return False
        warn(f"{pod.name}: {explained(error).message}")
    return True


async def _print_one(
    cluster: JobCluster, pod: PodView, query: Mapping[str, str], write: Write
) -> None:
    async for line in cluster.api.log(cluster.namespace, pod.name, query):
        write(f"[{pod.name}] {line.decode(errors='replace')}")


async def _pods(cluster: JobCluster, job: str, wanted: Wanted) -> list[PodView]:
    def is_wanted(pod: Mapping[str, Any]) -> bool:
        role = pod["metadata"]["labels"].get(ROLE)
        return role in ((wanted.role,) if wanted.role else ROLES)

    pods = [pod_view(pod) for pod in await cluster.pods(job) if is_wanted(pod)]
    return sorted(pods, key=lambda pod: (pod.role != HEAD, pod.name))
