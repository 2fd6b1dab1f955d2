"""A signal with one waiter and many wakers, by which a subtask sleeps until there is work."""

from __future__ import annotations

import asyncio


class Signal:
    """Like asyncio.Event with one waiter, made for being set far more often than awaited."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, or let the next wait return at once."""
        self._set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return once `set` was called since the last return. Cancelling it loses no signal."""
        if not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._set = False
