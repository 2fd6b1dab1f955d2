"""The jobs that run on this machine: found in the registry, asked over their control connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import JobError, JobNotFound
from ..control import registry

if TYPE_CHECKING:
    from ..control.client import CoordinatorClient
    from ..control.registry import JobRecord

T = TypeVar("T")
STATUS_TIMEOUT_S = 5.0
"""A coordinator that has not said its status by then is shown as not answering."""


def request(name: str, verb: str, **arguments: Any) -> dict[str, Any]:
    """Ask the running job `name` for something and wait for the answer, however long it takes.

    Raises:
        JobNotFound: no job of that name runs on this machine.
        HeadgateError: the job refused.
    """
    return _run(_request(name, verb, arguments))


async def _request(name: str, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    record = registry.find(name)
    client = None if record is None else await _connect(record)
    if client is None:
        running = [record.name for record, _ in await _statuses()]
        raise JobNotFound(
            f"no such job runs on this machine name=`{name}`",
            fix=f"running jobs: {', '.join(running)}" if running else "no job runs here",
        )
    try:
        return await client.request(verb, **arguments)
    finally:
        await client.close()


def statuses() -> list[tuple[JobRecord, dict[str, Any] | None]]:
    """All jobs that run on this machine, and what they say of themselves; None: no answer."""
    return _run(_statuses())


async def _statuses() -> list[tuple[JobRecord, dict[str, Any] | None]]:
    found = []
    for record in registry.records():
        status: dict[str, Any] | None = None
        try:
            client = await _connect(record)
        except JobError:
            found.append((record, status))
            continue
        if client is None:
            continue
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                status = await client.request("status")
        except (TimeoutError, JobError):
            pass
        finally:
            await client.close()
        found.append((record, status))
    return found


async def _connect(record: JobRecord) -> CoordinatorClient | None:
    """A client of the job; None if nobody listens any more, and then its record is removed.

    Raises:
        JobError: its process lives, but cannot be reached right now.
    """
    from ..control.client import CoordinatorClient

    try:
        return await CoordinatorClient.connect(record.addresses, record.token)
    except JobError:
        if registry.is_alive(record):
            raise
        registry.forget(record)
        return None


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)
