"""`headgate top`: a running job as a live table, until it ends or the user has seen enough."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from ...errors import JobError
from ..control.job_client import Connect, JobClient, PublishedEvent, watch
from ..finding import connect_to_job
from ..options.recovery import COORDINATOR_RETURN_TIMEOUT
from .console import FAILED, OK, report
from .foreground import run_until_interrupted
from .run import make_reporter

if TYPE_CHECKING:
    from ..finding import Where
    from ..protocol.job_result import JobOutcome
    from .progress import Reporter

C = TypeVar("C")
RETURN_S_MAX: Final = COORDINATOR_RETURN_TIMEOUT.default / 1000
"""The time for which a successor of a coordinator that went away is looked for."""
_LOOK_S: Final = 1.0
_LINE_EVERY_S: Final = 1.0


def follow(name: str, place: Where) -> int:
    """Show the job until it ends, and return the exit code. With Ctrl-C the job goes on.

    Raises:
        JobNotFound: no such job runs there.
        JobError: it cannot be asked from here.
    """
    reporter = make_reporter(name, _LINE_EVERY_S)
    try:
        with reporter:
            outcome = run_until_interrupted(_follow(partial(connect_to_job, name, place), reporter))
    except KeyboardInterrupt:
        return OK
    if outcome is None:
        raise gone(name)
    reporter.note(f"job {name} ended: {outcome.status}")
    return OK if outcome.error is None else max(FAILED, report(outcome.error))


def gone(name: str) -> JobError:
    """Return the error that a coordinator went away, and that none has taken over."""
    return JobError(
        f"the coordinator of job {name} went away, and none has taken over",
        fix=f"headgate list shows the jobs that run; headgate history {name} how this one fared",
    )


async def _follow(connect: Connect, reporter: Reporter) -> JobOutcome | None:
    """Pass events on until the job ends; return None if its coordinator went away for good."""
    client: JobClient | None = await connect()
    while client is not None:
        try:
            outcome = await watch(client, _SinceNow(reporter))
        finally:
            await client.close()
        if outcome is not None:
            return outcome
        reporter.note("the coordinator went away; looking for the one that takes over")
        client = await successor(connect)
    return None


async def successor(connect: Callable[[], Awaitable[C]]) -> C | None:
    """Connect to the coordinator that takes over; return None if none does."""
    deadline = time.monotonic() + RETURN_S_MAX
    while True:
        await asyncio.sleep(_LOOK_S)  # also a coordinator that is about to close lets us connect
        try:
            return await connect()
        except JobError:
            if time.monotonic() > deadline:
                return None


class _SinceNow:
    """Leaves out what happened before, of which a coordinator remembers the last events."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._now = False

    def __call__(self, event: PublishedEvent) -> None:
        """Pass on progress, and with the first one everything."""
        self._now = self._now or event.kind == "progress"
        if self._now or event.kind == "status":
            self._reporter.event(event)
