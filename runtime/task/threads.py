"""Calls in threads, which cannot be cancelled: a cancelled caller waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(call: Awaitable[T]) -> T:
    """Await `call`. If cancelled, wait until it has ended, then raise the cancellation.

    Otherwise the next attempt would begin while a thread of the last one still writes or commits.
    """
    running = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # marks the exception as retrieved
        raise
