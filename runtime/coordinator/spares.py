"""Workers that are started before they are needed (`slotmanager.redundant-taskmanager-num`).

A spare is a worker like any other: started, connected, its imports done. It has no subtasks, so that it can
take those of one that dies at once; its own successor is started once the job runs again. Without spares
what a restart will need is started while its pause lasts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...errors import HeadgateError
from ...operators.clock import Clock
from ..protocol.restart import StartFailures

_log = logging.getLogger("headgate.coordinator")


class Spares:
    """Keeps the number of live workers of a slot sharing group at what is wanted, in the background."""

    def __init__(
        self,
        count: int,
        failures: StartFailures,
        clock: Clock,
        *,
        live: Callable[[], int],
        start: Callable[[], Awaitable[None]],
    ) -> None:
        """Nothing is started yet.

        Args:
            count: how many workers beyond those that work.
            failures: when the next start may be.
            clock: for it.
            live: how many workers are connected, or about to be.
            start: starts one; raises HeadgateError.
        """
        self.count = count
        self._failures = failures
        self._clock = clock
        self._live = live
        self._start = start
        self._wanted = 0
        self.with_spares = False
        self._task: asyncio.Task[None] | None = None
        self.starting: set[asyncio.Task[None]] = set()
        """Starts under way; they end without an error."""

    def want(self, workers: int, *, spares: bool) -> None:
        """So many workers are to work: start what is missing of them, and of the spares if `spares`.

        While a job recovers no spare is started: its imports would take the processors from the restore.
        """
        self.with_spares = spares
        self._wanted = workers + (self.count if spares else 0)
        if self._missing() > 0 and (self._task is None or self._task.done()):
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._fill(), name="spare workers")

    def lost(self, working: int) -> None:
        """A spare died, beside so many workers. Like a failed start, or it would go on for ever."""
        self._failures.failed(self._now_ms())
        if self.with_spares:
            self.want(working, spares=True)

    def _missing(self) -> int:
        return self._wanted - self._live()

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        while (missing := self._missing()) > 0:
            wait_ms = self._failures.wait_ms(self._now_ms())
            if wait_ms:
                await asyncio.sleep(wait_ms / 1000)
                continue
            self.starting = {
                loop.create_task(self._start_one(), name="spare worker") for _ in range(missing)
            }
            try:
                await asyncio.wait(self.starting)
            finally:
                for task in self.starting:
                    task.cancel()
                await asyncio.gather(*self.starting, return_exceptions=True)
                self.starting = set()

    async def _start_one(self) -> None:
        try:
            await self._start()
        except HeadgateError as error:
            self._failures.failed(self._now_ms())
            _log.warning("a worker did not start ahead of time: %s", error)

    def _now_ms(self) -> int:
        return int(1000 * self._clock.monotonic())

    async def close(self) -> None:
        """Start no more."""
        self._wanted = 0
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
