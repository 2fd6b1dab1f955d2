"""Which coordinator a worker obeys: the one of the newest generation that has reached it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...operators.clock import Clock
from ..control.link import Link
from ..control.messages import Hello, Messages, Superseded, Welcome

GREETING_S = 10.0
"""A coordinator that has asked for us and does not answer by then is none."""
_log = logging.getLogger("headgate.worker")


class Allegiance:
    """The link to the coordinator in charge, and those that come after it.

    Messages of a coordinator count only while `link` is the one to it: from the moment at which a newer
    one has said Welcome, nothing of the old one is obeyed any more, not even what has arrived already.
    """

    def __init__(self, link: Link, hello: Callable[[int], Hello], clock: Clock) -> None:
        """`hello` makes our first message, given the generation that we obey."""
        self.link = link
        self.generation = 0
        self._hello = hello
        self._clock = clock
        self._next: Welcome | None = None
        self._changed = asyncio.Event()
        self._courting: set[asyncio.Task[None]] = set()

    def send(self, message: Messages) -> None:
        """To the coordinator in charge; dropped if there is none."""
        self.link.send(message)

    async def begin(self) -> Welcome | None:
        """Greet the coordinator that had this worker started; None: it does not want us."""
        self.link.send(self._hello(self.generation))
        welcome = await self.link.receive()
        if not isinstance(welcome, Welcome):
            return None
        self.generation = welcome.generation
        return welcome

    def offer(self, link: Link) -> None:
        """A coordinator asks for this worker, over a new link. It must lead a newer generation."""
        task = asyncio.get_running_loop().create_task(self._greet(link), name="another coordinator")
        self._courting.add(task)
        task.add_done_callback(self._courting.discard)

    async def _greet(self, link: Link) -> None:
        link.send(self._hello(self.generation))
        try:
            async with asyncio.timeout(GREETING_S):
                welcome = await link.receive()
        except BaseException:
            link.close()
            raise
        if not isinstance(welcome, Welcome) or welcome.generation <= self.generation:
            _log.warning("refused a coordinator that does not lead any more")
            link.close()
            return
        self.generation = welcome.generation
        before, self.link = self.link, link
        before.send(Superseded(generation=welcome.generation))
        before.close()
        self._next = welcome
        self._changed.set()

    async def successor(self, within_ms: int) -> tuple[Welcome, int] | None:
        """The next coordinator, and for how many ms there was none; None: it did not come in time."""
        lost = self._clock.monotonic()
        if self._next is None:
            self._changed.clear()
        if self._next is None and within_ms:
            _log.warning("the coordinator is gone; working on for up to %s ms without", within_ms)
            try:
                async with asyncio.timeout(within_ms / 1000):
                    await self._changed.wait()
            except TimeoutError:
                _log.warning("no coordinator within %s ms", within_ms)
        welcome, self._next = self._next, None
        if welcome is None:
            return None
        return welcome, round(1000 * (self._clock.monotonic() - lost))

    def give_up(self) -> None:
        """There is nothing left that a successor could go on with."""
        self._changed.set()

    async def close(self) -> None:
        """Hang up."""
        tasks = list(self._courting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.link.close()
