"""Finds the coordinator of a job, from any machine with the right to do so.

| by | what is needed | where the token comes from |
|---|---|---|
| this machine | the same user | the run directory, which is the user's own |
| the storage | reading the job's log | `--token-file`, the run directory, or the storage |
| a Ray cluster | a connection to it | the actor: Ray has let us in |

Addresses come from the job log, which names the leader of each generation, or from Ray. Nothing else says
where a coordinator is, so there is nothing that could be out of date after a takeover.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HeadgateError, JobError, JobNotFound, UsageError
from ..operators.clock import SystemClock
from .control import registry
from .control.link import is_local
from .control.registry import read_token_file
from .options.recovery import CLUSTER_CONNECT_TIMEOUT
from .options.registry import Options
from .rest.client import RestClient
from .storage.open_store import open_store_at
from .storage.stored_jobs import StoredJob, find_job

if TYPE_CHECKING:
    from .protocol.joblog import JobEnded


@dataclass(frozen=True, slots=True)
class Where:
    """The place where a job is looked for; with nothing set it is this machine.

    Attributes:
        storage: the address of its checkpoints.
        cluster: the address of a Ray cluster.
        token_file: a file with the token of the job.
        options: those of the storage, and `headgate.cluster.connect-timeout`.
    """

    storage: str = ""
    cluster: str = ""
    token_file: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UsageError if both a storage and a cluster are given."""
        if self.storage and self.cluster:
            raise UsageError(
                "a job is found by its storage or by its cluster", fix="keep one of them"
            )


HERE = Where()


@dataclass(frozen=True, slots=True)
class FoundCoordinator:
    """The addresses of a coordinator's REST API, and the token for it."""

    addresses: tuple[str, ...]
    token: str = field(repr=False)


async def connect_to_job(name: str, where: Where = HERE) -> RestClient:
    """Connect to the job's coordinator.

    Raises:
        JobNotFound: no such job runs there.
        HeadgateError: it cannot be reached from here, or the token is not known here.
    """
    if where.cluster:
        found = await _on_cluster(name, where)
    elif where.storage:
        found = await _by_storage(name, where)
    else:
        return await _on_this_machine(name)
    return await RestClient.connect(found.addresses, found.token)


async def stored_job(name: str, where: Where) -> StoredJob:
    """Return the job as its storage has it.

    Raises:
        JobNotFound: there is no such job.
        HeadgateError: the storage cannot be read.
    """
    return await find_job(open_store_at, where.storage, name, where.options, SystemClock())


async def end_of_run(name: str, run: str, where: Where) -> JobEnded | None:
    """Return how the run ended by its storage; None: it has not ended, or its end was forgotten."""
    if not where.storage:
        return None
    return (await stored_job(name, where)).end_of(run)


async def _on_this_machine(name: str) -> RestClient:
    record = registry.find(name)
    client = None if record is None else await connect_to_record(record)
    if client is not None:
        return client
    running = ", ".join(each.name for each in registry.records()[0] if registry.is_alive(each))
    elsewhere = "no job runs here; --storage or --cluster find jobs that run elsewhere"
    raise JobNotFound(
        f"no such job runs on this machine name=`{name}`",
        fix=f"running jobs: {running}" if running else elsewhere,
    )


async def connect_to_record(record: registry.JobRecord) -> RestClient | None:
    """Connect to a job of this machine; None if it does not listen any more: then its record is removed.

    Raises:
        JobError: its process lives, but cannot be reached right now.
    """
    try:
        return await RestClient.connect(record.addresses, record.token)
    except JobError:
        if registry.is_alive(record):
            raise
        registry.forget(record)
        return None


async def _by_storage(name: str, where: Where) -> FoundCoordinator:
    job = await stored_job(name, where)
    return found_in_storage(job, where)


def found_in_storage(job: StoredJob, where: Where) -> FoundCoordinator:
    """Return where the coordinator of a job listens, by its storage.

    Raises:
        JobNotFound: the job does not run.
        HeadgateError: the coordinator cannot be reached from this machine, or its token is not known here.
    """
    if job.ended is not None:
        raise JobNotFound(
            f"the job does not run name=`{job.name}`: its last run ended as {job.ended.status.status_name}",
            fix=f"`headgate history {job.name} --storage ...` shows its runs",
        )
    leader = job.leader
    if leader is None:
        raise JobError("the log of the job does not say where its coordinator is")
    here = leader.host == socket.gethostname()
    # What is local to another machine may be anybody's here, and must not get the token.
    addresses = tuple(each for each in leader.rest if here or not is_local(each))
    if not leader.rest:
        raise JobError(
            "the log of the job does not say where the REST API of its coordinator is: the job runs an "
            f"older version of headgate host=`{leader.host}` pid=`{leader.pid}`",
            fix="use that version for this command, or stop the job by SIGTERM of that process",
        )
    if not addresses:
        raise JobError(
            f"the coordinator listens to its own machine only host=`{leader.host}` pid=`{leader.pid}`",
            fix=f"run the command on {leader.host}, or give jobs that are asked from elsewhere a rest.port",
        )
    return FoundCoordinator(addresses, _token(job, addresses, where))


def _token(job: StoredJob, addresses: tuple[str, ...], where: Where) -> str:
    if where.token_file:
        return read_token_file(Path(where.token_file))
    try:
        record = registry.find(job.name)
    except HeadgateError:
        if not job.token:
            raise
        record = None  # the storage has the token, too
    if record is not None and set(record.addresses) & set(addresses):
        return record.token
    if job.token:
        return job.token
    raise UsageError(
        f"the token of the job's coordinator cannot be read here job=`{job.name}`",
        fix="give --token-file (the option headgate.control.token-file of the job), or the address of its "
        "Ray cluster with --cluster, or run the command as the user and on the machine of the job; "
        "headgate.control.token-in-storage=true keeps the token in the storage, for all who read that",
    )


async def _on_cluster(name: str, where: Where) -> FoundCoordinator:
    from .cluster.leaders import find_on_cluster

    timeout_ms = Options(dict(where.options)).get(CLUSTER_CONNECT_TIMEOUT)
    addresses, token = await find_on_cluster(where.cluster, name, timeout_ms)
    return FoundCoordinator(addresses, token)
