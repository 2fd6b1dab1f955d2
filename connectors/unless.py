"""Work that stops as soon as something has happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(
    event: asyncio.Event, work: Coroutine[Any, Any, T], error: Callable[[], Exception]
) -> T:
    """Return the result of some work, which is cancelled if an event is set before.

    Args:
        event: such as the end of the connection that the work needs.
        work: to do.
        error: makes the error to raise if the event is set.
    """
    doing, happened = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({doing, happened}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise error()
        return doing.result()
    finally:
        doing.cancel()
        happened.cancel()
        await asyncio.gather(doing, happened, return_exceptions=True)
