"""Finds the jobs that verbs name, by their storage or by their cluster, and sends them requests."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import HeadgateError, JobError

if TYPE_CHECKING:
    from ..control.job_client import JobClient
    from ..control.registry import JobRecord
    from ..finding import Where

STATUS_TIMEOUT_S = 5.0
"""A coordinator that has not sent its status in this time is shown as not answering."""


def request(name: str, verb: str, where: Where | None = None, **arguments: Any) -> dict[str, Any]:
    """Ask the running job `name` for something and wait for the answer, however long it takes.

    Args:
        name: of the job.
        verb: what is asked for.
        where: the job is looked for there; None: on this machine.
        arguments: of the verb.

    Raises:
        JobNotFound: no job of that name runs there.
        HeadgateError: the job refused, or cannot be asked from here.
    """
    from ..control.job_client import ask_once
    from ..finding import HERE, connect_to_job

    connect = partial(connect_to_job, name, where or HERE)
    return asyncio.run(ask_once(connect, verb, **arguments))


def statuses() -> tuple[list[tuple[JobRecord, dict[str, Any] | None]], list[HeadgateError]]:
    """Return all jobs that run on this machine, each with its status; None: it did not answer.

    Beside them it returns an error for each job whose record cannot be read.
    """
    return asyncio.run(find_statuses())


async def find_statuses() -> tuple[
    list[tuple[JobRecord, dict[str, Any] | None]], list[HeadgateError]
]:
    """Return all jobs that run on this machine, as `statuses` does."""
    from ..control import registry
    from ..finding import connect_to_record

    found: list[tuple[JobRecord, dict[str, Any] | None]] = []
    records, unread = registry.records()
    for record in records:
        try:
            client = await connect_to_record(record)
        except JobError:
            found.append((record, None))
            continue
        if client is not None:
            found.append((record, await status_of(client)))
    return found, unread


async def status_of(client: JobClient) -> dict[str, Any] | None:
    """Return the status that the job reports; None: it did not answer. The client is closed."""
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await client.request("status")
    except (TimeoutError, JobError):
        return None
    finally:
        await client.close()


def statuses_on_cluster(where: Where) -> list[tuple[JobRecord, dict[str, Any] | None]]:
    """Return all jobs of a Ray cluster, each with its status; None: it did not answer."""
    return asyncio.run(_statuses_on_cluster(where))


async def _statuses_on_cluster(where: Where) -> list[tuple[JobRecord, dict[str, Any] | None]]:
    from ..cluster.leaders import list_on_cluster
    from ..control.registry import JobRecord
    from ..options.recovery import CLUSTER_CONNECT_TIMEOUT
    from ..options.registry import Options
    from ..rest.client import RestClient

    timeout_ms = Options(dict(where.options)).get(CLUSTER_CONNECT_TIMEOUT)
    found = []
    for name, addresses, token in await list_on_cluster(where.cluster, timeout_ms):
        status: dict[str, Any] | None = None
        with contextlib.suppress(JobError):
            status = await status_of(await RestClient.connect(addresses, token))
        began_ms = (status or {}).get("began_ms") or 0
        record = JobRecord(
            name=name,
            addresses=list(addresses),
            token=token,
            pid=(status or {}).get("pid") or 0,
            started_ms=began_ms,
            cluster=where.cluster,
        )
        found.append((record, status))
    return found
