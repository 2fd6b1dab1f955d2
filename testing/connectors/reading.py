"""Ways in which the checks of sources read: some records, those of a live source, or all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import cloudpickle

from ...operators.source import Source, SourceReader
from .context import open_reader, read_all, read_batches, records_of

T = TypeVar("T")
CALL_S_MAX: Final = 60.0
"""A call that has not returned after this many seconds is assumed to hang."""
LOOKS_MAX: Final = 500
"""The most times that a server is asked for what it has confirmed, with a short pause each time."""


def copied(source: Source) -> Source:
    """Return the source as another process gets it."""
    found: Source = cloudpickle.loads(cloudpickle.dumps(source))
    return found


async def in_time(waiting: Awaitable[T], what: str) -> T:
    """Return the result, or raise AssertionError if it does not come."""
    try:
        return await asyncio.wait_for(waiting, CALL_S_MAX)
    except TimeoutError:
        raise AssertionError(f"{what}: nothing after {CALL_S_MAX:.0f} s") from None


async def next_records(reader: SourceReader, count: int | None = None) -> list[Any]:
    """Return the records of the next `count` batches, or of all remaining ones."""
    return [record for batch in await read_batches(reader, count) for record in records_of(batch)]


async def at_least(reader: SourceReader, count: int) -> list[Any]:
    """Return records of a source without an end, as soon as it has returned this many."""
    found: list[Any] = []

    async def read() -> None:
        while len(found) < count:
            batch = reader.poll()
            if batch is None:
                await reader.wait()
            else:
                found.extend(records_of(batch))

    await in_time(read(), f"{count} records of a live source")
    return found


async def everything(source: Source, count: int) -> list[Any]:
    """Return all records of a source; of one without an end, as soon as there are this many."""
    if source.bounded:
        return await read_all(source)
    reader = open_reader(source, source.splits(1))
    try:
        return await at_least(reader, count)
    finally:
        await in_time(asyncio.to_thread(reader.close), "close")


async def confirmed_soon(look: Callable[[], int], count: int, situation: str) -> None:
    """Raise AssertionError unless a server tells this count soon, and no more."""

    async def told() -> None:
        found = 0
        for _ in range(LOOKS_MAX):
            found = await asyncio.to_thread(look)
            if found >= count:
                break
            await asyncio.sleep(0.01)
        if found != count:
            raise AssertionError(f"{found} records are confirmed, and {count} {situation}")

    await in_time(told(), f"the confirmation of {count} records")
