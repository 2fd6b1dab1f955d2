"""One waiter, woken by a call: the hand-off between the exchange and a subtask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...errors import check


class Waiter:
    """At most one coroutine waits; waking nobody is cheap. Whoever waits checks its condition again."""

    __slots__ = ("_future", "listener")

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self.listener: Callable[[], None] | None = None
        """Called at every wake, for an owner that sleeps on a signal of its own."""

    def wake(self) -> None:
        """End the wait, if there is one."""
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)
        if self.listener is not None:
            self.listener()

    async def wait(self) -> None:
        """Return at the next `wake`. Cancelling leaves the waiter as before."""
        check(self._future is None, "a second task waits on the same end of an exchange")
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            self._future = None
