"""Two threads of a worker process that go on while user code holds the event loop.

The first one beats: it says that the worker is alive. It has a control connection of its own, on which it
also hears that an attempt is to end, because the event loop reads its mail only once user code returns.
A function that holds the interpreter's lock (a C extension) stops this thread as well; then the worker is
silent, and is replaced.

The second one looks at what the subtasks do, logs calls that do not return, and hands reports about them to
the first. It is a thread of its own because a look may take long: the text of a stack reads source files,
a log may block, and beside a function that computes each of these system calls waits for the
interpreter's lock. No beat may wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ...operators.clock import Clock
from ..control.link import BlockingLink
from ..control.messages import Cancel, Heartbeat, Hello, StepStuck, Welcome
from .watch import StepWatch

LOOK_S = 1.0
"""The threads beat, and look at what the subtasks do, at least this often."""
REPORTS_MAX = 100
"""Reports about stuck calls that wait for a beat. The oldest are dropped first; the log has all of them."""
EXIT_CODE = 70
"""The exit code of a worker that kills itself."""
_log = logging.getLogger("headgate.worker")


class HeartbeatThreads:
    """The two threads, seen from the event loop that they watch."""

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
        self._reports: deque[StepStuck] = deque(maxlen=REPORTS_MAX)

    def start(
        self,
        welcome: Welcome,
        watch: StepWatch,
        hang_up: Callable[[], None],
        orphaned_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin to beat, and to look.

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
        for run, name in ((self._beat, "headgate-pulse"), (self._look, "headgate-watch")):
            threading.Thread(target=run, name=name, daemon=True).start()

    def stop(self) -> None:
        """The worker exits, or has another coordinator. Both threads end by themselves."""
        self._stopped.set()
        if (link := self._link) is not None:
            link.close()

    # -- in the thread that looks -------------------------------------------------------------------

    def _look(self) -> None:
        while not self._stopped.is_set():
            self._reports.extend(self._watch.look())
            self._stopped.wait(self._interval_s)

    # -- in the thread that beats -------------------------------------------------------------------

    def _beat(self) -> None:
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
            self._exit_if_abandoned()
            self._stopped.wait(self._interval_s)

    def _serve_one(self) -> bool:
        """Beat on a new connection until it ends; True if the coordinator said anything on it."""
        self._link = link = BlockingLink.connect(self._addresses)
        begun = heard = self._clock.monotonic()
        try:
            link.send(self._hello)
            while not self._stopped.is_set() and self._clock.monotonic() - heard < self._timeout_s:
                link.send(Heartbeat(steps=self._watch.steps()))
                while self._reports:
                    link.send(self._reports.popleft())
                self._exit_if_abandoned()
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

    def _exit_if_abandoned(self) -> None:
        if self._alone_s is None:
            return
        alone_ms = 1000 * (self._clock.monotonic() - self._alone_s)
        # It may wait for another coordinator first, and only then has to end. A worker that has ended,
        # or obeys another one, has stopped this thread.
        if alone_ms >= self._orphaned_ms() + self._watching.cancellation_timeout_ms:
            _log.error("no coordinator, and a call that does not end: exiting", extra=self._fields)
            self._die(EXIT_CODE)

    def _give_up(self) -> None:
        """The coordinator is gone: the worker is to do what it does when its other link breaks."""
        if self._alone_s is None:
            _log.warning("the coordinator cannot be reached", extra=self._fields)
            self._alone_s = self._clock.monotonic()
            self._in_loop(self._hang_up)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(call)
