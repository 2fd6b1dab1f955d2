"""Starts a job that lives by itself: its coordinator outlives the process that submits it.

On this machine it is a process of its own, and on a Ray cluster a detached actor. A run whose id comes
from outside is started once: another submission finds it running, or finds how it ended, or goes on with it
if its coordinator died.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import JobNotFound
from ..operators.extras import check_ray
from .cluster.launch import IN_PROCESS, LOCAL, is_shared, unknown_cluster
from .cluster.spawned import default_log_file, spawn
from .coordinator.former import Reach, ask_leader
from .finding import Where, stored_job
from .observe.logs import printed_level
from .plan import JobSpec
from .task.concurrency import run_blocking

if TYPE_CHECKING:
    from .protocol.joblog import JobEnded


class Begun(enum.Enum):
    """When the run of a submitted job began."""

    NOW = "this submission started it"
    BEFORE = "it goes on already, and nothing was started"


@dataclass(frozen=True, slots=True)
class Submitted:
    """The result of a submission.

    Attributes:
        begun: whether it started anything.
        where: where the job is found from now on.
        end: how this very run had ended before; None: it had not.
        pid: the process of the job on this machine; 0: it has none here.
        log_file: where that process logs; empty: it has none here.
    """

    begun: Begun
    where: Where
    end: JobEnded | None = None
    pid: int = 0
    log_file: str = ""


def submit_spec(spec: JobSpec, cluster: str, *, log_file: Path | None = None) -> Submitted:
    """Start a job that lives by itself; returns once it has begun.

    Args:
        spec: the job.
        cluster: `local`, `in-process`, or the address of a Ray cluster.
        log_file: where the process of a job on this machine logs; None: below the user's state directory.

    Raises:
        UsageError: no such cluster, or the job runs already.
        HeadgateError: the job could not begin.
    """
    return run_blocking(_submit(spec, cluster, log_file))


async def _submit(spec: JobSpec, cluster: str, log_file: Path | None) -> Submitted:
    shared = is_shared(cluster)
    if not shared and cluster not in (IN_PROCESS, LOCAL):
        raise unknown_cluster(cluster)
    where = Where(
        storage=spec.checkpoint.storage if spec.checkpoint is not None and not shared else "",
        cluster=cluster if shared else "",
        options=spec.options,
    )
    if (
        spec.outside_run
        and not spec.take_over
        and (before := await _before(spec, where)) is not None
    ):
        return before
    if cluster != IN_PROCESS:
        check_ray(cluster)
    if shared:
        from .cluster.ray_driver import submit_to_ray

        await submit_to_ray(spec, cluster)
        return Submitted(Begun.NOW, where)
    path = (log_file or default_log_file(spec.name, spec.run)).expanduser().absolute()
    level = printed_level()
    pid = await spawn(spec, cluster, path, log_level=level)
    return Submitted(Begun.NOW, where, pid=pid, log_file=str(path))


async def _before(spec: JobSpec, where: Where) -> Submitted | None:
    """Return the result of an earlier submission of this run; None: it is to be started, or taken over."""
    assert spec.checkpoint is not None  # a run id from outside needs checkpoints
    try:
        storage = Where(storage=spec.checkpoint.storage, options=spec.options)
        job = await stored_job(spec.name, storage)
    except JobNotFound:
        return None
    if (end := job.end_of(spec.run)) is not None:
        return Submitted(Begun.BEFORE, where, end)
    if job.view.run != spec.run or job.leader is None:
        return None
    alive = await ask_leader(job.leader) is Reach.ANSWERS
    return Submitted(Begun.BEFORE, where) if alive else None
