"""Concurrent coroutines with a single error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, in order; the first error cancels the others, waits for them and is
    raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0]  # noqa: B904  it carries its own cause
    return [task.result() for task in tasks]
