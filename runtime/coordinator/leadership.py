"""The check that this coordinator still leads: a replaced one must not harm what its successor has.

The job log refuses entries of a coordinator that does not lead, and workers that obey a newer one close
their links with Superseded. Neither prevents a process from being killed, so before that the coordinator
checks the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from ...errors import FencedError, StorageError
from ...operators.clock import Clock
from ..protocol.joblog import LogView
from ..storage.joblog_store import JobLog

T = TypeVar("T")
_log = logging.getLogger("headgate.coordinator")
RETRY_S = 1.0
"""The pause before a log that could not be read is read again, in s."""
LOOK_S = 5.0
"""A coordinator that ends waits no longer than this for a log that does not answer, in s."""


def check_not_followed(run: str, claimed: int, view: LogView) -> None:
    """Refuse a run that has led and was followed by another one: it never leads again.

    Args:
        run: the run of the coordinator that is about to lead.
        claimed: the newest generation that was claimed for it before; 0: none.
        view: the log.

    Raises:
        FencedError: another run has followed.
    """
    if view.run != run and 0 < claimed < view.generation:
        raise FencedError(
            f"another run of the job has begun since generation=`{view.generation}` run=`{view.run}`",
            fix="this one stops; if it is the one to go on with, run it again",
        )


async def patiently(begin: Callable[[], Awaitable[T]], clock: Clock, patience_ms: int) -> T:
    """Begin to lead; try again while the store does not answer.

    Args:
        begin: reads the log and claims a generation.
        clock: the clock.
        patience_ms: the last try begins at most this long after the first.

    Raises:
        StorageError: the error of the last try.
    """
    until = clock.monotonic() + patience_ms / 1000
    while True:
        try:
            return await begin()
        except StorageError as error:
            if clock.monotonic() + RETRY_S > until:
                raise
            _log.warning("cannot take over yet: %s", error)
            await asyncio.sleep(RETRY_S)


class Leadership:
    """The leadership of one coordinator. Without a job log no other coordinator can take over."""

    def __init__(self) -> None:
        self.log: JobLog | None = None
        self._lost: FencedError | None = None
        self._term: asyncio.Timeout | None = None
        """The time limit around the work under way, which ends when the leadership is lost."""

    @property
    def lost(self) -> bool:
        """True once a newer coordinator is known to lead."""
        return self._lost is not None

    def lose(self, error: FencedError) -> None:
        """Note that a newer coordinator leads."""
        self._lost = self._lost or error
        self._end_term()

    def _end_term(self) -> None:
        if self._lost is not None and self._term is not None and not self._term.expired():
            self._term.reschedule(asyncio.get_running_loop().time())

    def superseded(self, worker_id: str, generation: int) -> None:
        """Note that a worker obeys a newer coordinator."""
        self.lose(
            FencedError(
                f"a newer coordinator owns the job generation=`{generation}` worker=`{worker_id}`",
                fix="this one stops; nothing of its unfinished checkpoints becomes visible",
            )
        )

    async def confirmed(self) -> bool:
        """Check the log, again until it can be read; return False if another coordinator leads."""
        while self.log is not None and not self.lost:
            try:
                await self.log.confirm()
            except FencedError as error:
                self.lose(error)
            except StorageError:
                await asyncio.sleep(RETRY_S)
            else:
                return True
        return not self.lost

    async def not_lost(self) -> bool:
        """Check the log once; only the result False is certain."""
        if self.log is not None and not self.lost:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self.log.confirm()
            except FencedError as error:
                self.lose(error)
            except (StorageError, TimeoutError):
                pass  # in any case the workers obey this coordinator, or have closed their links
        return not self.lost

    async def while_leading(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, but stop it when this leadership ends.

        Raises:
            FencedError: a newer coordinator leads.
        """
        try:
            # It runs in this task, so that a cancellation of the task ends the work at once.
            async with asyncio.timeout(None) as self._term:
                self._end_term()
                return await work
        except TimeoutError:
            if self._lost is not None and self._term is not None and self._term.expired():
                raise self._lost from None
            raise
        finally:
            self._term = None
