"""The check for another run of the job that still runs: a new run must not end it unless the user says so.

Whatever happens, the job log keeps two runs apart, because it fences the older one. This module is for
the user, who may not know that the job runs already. So a new run checks whether the coordinator of the
former one still listens:

* It answers: the new run is refused, unless the user wants the takeover.
* Its address is known, and nothing listens there: it is dead, and the new run goes on at once.
* It cannot be reached, for example on another machine: the new run watches the job log for a while. If an
  entry appears there, the former run lives; if none does, the new run goes on.

A coordinator that is restarted within its run (by Ray, or as the standby) is not a new run, so this does
not concern it.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import Final

from ...errors import UsageError
from ...operators.durations import format_duration
from ..control.link import connect, is_local
from ..protocol.joblog import Leader, LogView
from ..storage.joblog_store import JobLog

ANSWERS_FOR_S: Final = 5.0
"""A coordinator whose process is about to die may still answer for a moment."""
LOOK_EVERY_S: Final = 0.5
_BEGAN_MS: Final = time.time_ns() // 1_000_000
"""A time before which no coordinator of this process began."""


class Reach(enum.Enum):
    """The result of connecting to the address at which a coordinator listened."""

    ANSWERS = "it answers"
    GONE = "nobody listens"
    UNKNOWN = "it cannot be reached"


Ask = Callable[[Leader], Awaitable[Reach]]


def this_leader(addresses: list[str], now_ms: int, rest: tuple[str, ...] = ()) -> Leader:
    """Return the record of this process, for coordinators that come later."""
    return Leader(
        host=socket.gethostname(),
        pid=os.getpid(),
        started_ms=now_ms,
        addresses=tuple(addresses),
        rest=rest,
    )


def is_other_run(view: LogView, run: str) -> bool:
    """Return True if the log ends with another run than `run` that has not ended."""
    return not view.empty and view.run != run and view.ended is None


async def check_former(
    log: JobLog, run: str, *, take_over: bool, watch_ms: int, now_ms: int, ask: Ask
) -> str:
    """Check whether another run of the job goes on.

    Args:
        log: the log, as it was loaded; nothing is claimed yet.
        run: the new run.
        take_over: the user wants the new run in any case.
        watch_ms: how long the log of a coordinator that cannot be reached is watched.
        now_ms: the present time, from which the age of the former run is counted.
        ask: checks whether a coordinator listens.

    Returns:
        A text for the user about the end of the former run; empty if there was none.

    Raises:
        UsageError: the job runs already.
    """
    view = log.view
    if not is_other_run(view, run):
        return ""
    leader = await log.leader_of(view.generation)
    if leader is None:  # a log of before this was written down
        return ""
    who = describe(leader, view, now_ms)
    if take_over:
        return f"takes the job over from {who}"
    reach = await _reach(leader, ask)
    if reach is Reach.UNKNOWN:
        if not await _watch(log, watch_ms):
            watched = format_duration(watch_ms)
            return (
                f"the former run cannot be reached, and has written nothing for {watched}: it is "
                f"taken for dead ({who})"
            )
    elif reach is Reach.GONE:
        return f"the former run is dead ({who})"
    raise already_runs(who)


def already_runs(who: str) -> UsageError:
    """Return the error with which a second run is refused."""
    return UsageError(
        f"the job runs already: {who}",
        fix="stop that run first (headgate stop), or end it and go on from its newest checkpoint with "
        "--take-over, in Python take_over=True",
    )


def describe(leader: Leader, view: LogView, now_ms: int) -> str:
    """Describe for the user which process leads a run, since when, and its last checkpoint."""
    since = datetime.fromtimestamp(leader.started_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    age = format_duration(max(0, now_ms - leader.started_ms) // 1000 * 1000)
    newest = view.newest
    progress = f"checkpoint {newest.checkpoint_id}" if newest is not None else "no checkpoint yet"
    return f"process {leader.pid} on {leader.host} since {since} ({age}), {progress}"


async def _reach(leader: Leader, ask: Ask) -> Reach:
    for _ in range(int(ANSWERS_FOR_S / LOOK_EVERY_S)):
        reach = await ask(leader)
        if reach is not Reach.ANSWERS:
            return reach
        await asyncio.sleep(LOOK_EVERY_S)
    return Reach.ANSWERS


async def _watch(log: JobLog, watch_ms: int) -> bool:
    """Return True if the log grows."""
    for _ in range(max(1, int(watch_ms / 1000 / LOOK_EVERY_S))):
        if await log.has_grown():
            return True
        await asyncio.sleep(LOOK_EVERY_S)
    return await log.has_grown()


async def ask_leader(leader: Leader, own: Collection[str] = ()) -> Reach:
    """Check whether a process listens. Addresses that are valid on its own machine only are left out.

    Args:
        leader: the process.
        own: the addresses of this process. A leader that listened there before this process began is gone:
            pods get the addresses, the host names and even the process numbers of earlier pods.
    """
    if leader.started_ms < _BEGAN_MS and not set(leader.addresses).isdisjoint(own):
        return Reach.GONE
    here = leader.host == socket.gethostname()
    addresses = [a for a in leader.addresses if here or not is_local(a)]
    if not addresses:
        return _by_pid(leader) if here else Reach.UNKNOWN
    for address in addresses:
        try:
            link = await connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            continue
        except OSError as error:
            if error.errno == errno.ECONNRESET:
                return Reach.ANSWERS
            return Reach.UNKNOWN
        link.close()
        return Reach.ANSWERS
    return Reach.GONE


def _by_pid(leader: Leader) -> Reach:
    """Decide by its process alone whether a coordinator lives that listens nowhere, as in tests."""
    if leader.pid == os.getpid():
        return Reach.GONE
    try:
        os.kill(leader.pid, 0)
    except ProcessLookupError:
        return Reach.GONE
    except PermissionError:
        pass
    return Reach.UNKNOWN
