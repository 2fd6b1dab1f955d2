"""The thread of a worker process that says it is alive, whatever user code does with the event loop.

It has a control connection of its own, on which it also hears that an attempt is to end: the event loop
reads its mail only once user code returns. A function that holds the interpreter's lock (a C extension)
stops this thread as well; then the worker is silent, and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence

from ...operators.clock import Clock
from ..control.blocking_link import BlockingLink
from ..control.messages import Cancel, Heartbeat, Hello, StepStuck, Welcome
from .watch import StepWatch

LOOK_S = 1.0
"""The thread looks at what the subtasks do, and says so, at least this often."""
EXIT_CODE = 70
"""Of a worker that kills itself."""
_log = logging.getLogger("headgate.worker")


class Pulse:
    """The thread, seen from the event loop that it watches."""

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        worker_id: str,
        clock: Clock,
        *,
        die: Callable[[int], None] = os._exit,
    ) -> None:
        self._addresses = list(addresses)
        self._hello = Hello(token=token, role="pulse", worker_id=worker_id, pid=os.getpid())
        self._clock = clock
        self._die = die
        self._fields = {"worker": worker_id}
        self._stopped = threading.Event()
        self._link: BlockingLink | None = None
        self._alone_s: float | None = None
        """Since when the coordinator has not been reached."""
        self._thread: threading.Thread | None = None

    def start(
        self,
        welcome: Welcome,
        watch: StepWatch,
        hang_up: Callable[[], None],
        orphaned_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin to beat.

        Args:
            welcome: how often, and what else the coordinator wants.
            watch: knows what the subtasks do.
            hang_up: gives the coordinator up; called in this event loop.
            orphaned_ms: how long the worker goes on without a coordinator; called in any thread.
        """
        self._watch, self._watching = watch, welcome.watching
        self._interval_s = min(welcome.heartbeat_interval_ms / 1000, LOOK_S)
        self._timeout_s = welcome.heartbeat_timeout_ms / 1000
        self._loop, self._hang_up = asyncio.get_running_loop(), hang_up
        self._orphaned_ms = orphaned_ms
        self._thread = threading.Thread(target=self._run, name="headgate-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The worker exits, or has another coordinator. The thread ends by itself: nobody waits for it."""
        self._stopped.set()
        if (link := self._link) is not None:
            link.close()

    # -- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        failed = 0
        while not self._stopped.is_set():
            try:
                heard = self._serve_one()
            except (OSError, ValueError) as error:  # ValueError: `stop` closed what is waited for
                _log.info("the heartbeat connection failed: %s", error, extra=self._fields)
                heard = False
            failed = 1 if heard else failed + 1
            if failed >= self._watching.unreachable_after:
                self._give_up()
            self._look()
            self._stopped.wait(self._interval_s)

    def _serve_one(self) -> bool:
        """Beat on a new connection until it ends; True if the coordinator said anything on it."""
        self._link = link = BlockingLink.connect(self._addresses)
        begun = heard = self._clock.monotonic()
        try:
            link.send(self._hello)
            while not self._stopped.is_set() and self._clock.monotonic() - heard < self._timeout_s:
                link.send(Heartbeat(steps=self._watch.steps()))
                for stuck in self._look():
                    link.send(stuck)
                if self._read(link):
                    heard = self._clock.monotonic()
        except OSError:
            if heard == begun:
                raise
        finally:
            link.close()
        return heard > begun

    def _read(self, link: BlockingLink) -> bool:
        """Read for one interval; True if anything came."""
        heard, until = False, self._clock.monotonic() + self._interval_s
        while (left := until - self._clock.monotonic()) > 0 and not self._stopped.is_set():
            message = link.receive(left)
            heard = heard or message is not None
            if isinstance(message, Cancel):
                self._watch.cancelling(message.attempt)
        return heard

    def _look(self) -> list[StepStuck]:
        stuck = self._watch.look()
        if self._alone_s is not None:
            alone_ms = 1000 * (self._clock.monotonic() - self._alone_s)
            # It may wait for another coordinator first, and only then has to end. A worker that has ended,
            # or obeys another one, has stopped this thread.
            if alone_ms >= self._orphaned_ms() + self._watching.cancellation_timeout_ms:
                _log.error(
                    "no coordinator, and a call that does not end: exiting", extra=self._fields
                )
                self._die(EXIT_CODE)
        return stuck

    def _give_up(self) -> None:
        """The coordinator is gone: the worker is to do what it does when its other link breaks."""
        if self._alone_s is None:
            _log.warning("the coordinator cannot be reached", extra=self._fields)
            self._alone_s = self._clock.monotonic()
            self._in_loop(self._hang_up)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(call)
