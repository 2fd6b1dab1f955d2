"""Does another run of the job still run? A new run must not end it without the user's word.

The job log keeps two runs apart whatever happens: the older one is fenced. This is about the user, who may
not know that the job runs already. So a new run looks whether the coordinator of the former one listens:

* It answers: the new run is refused, unless the user has asked for the takeover.
* Nobody listens where it listened: it is dead, and the new run goes on at once.
* It cannot be reached, on another machine say: the new run watches the job log for a while. If an entry
  appears there, the former run lives; if none does, the new run goes on.

A coordinator that is restarted within its run (by Ray, or as the standby) is no new run, and not asked.
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
"""No coordinator of this process has begun earlier."""


class Reach(enum.Enum):
    """The answer of the address where a coordinator listened."""

    ANSWERS = "it answers"
    GONE = "nobody listens"
    UNKNOWN = "it cannot be reached"


Ask = Callable[[Leader], Awaitable[Reach]]


def this_leader(addresses: list[str], now_ms: int, rest: tuple[str, ...] = ()) -> Leader:
    """This process, for those who come later."""
    return Leader(
        host=socket.gethostname(),
        pid=os.getpid(),
        started_ms=now_ms,
        addresses=tuple(addresses),
        rest=rest,
    )


def is_other_run(view: LogView, run: str) -> bool:
    """True if the log ends with another run than `run`, and that one has not ended."""
    return not view.empty and view.run != run and view.ended is None


async def check_former(
    log: JobLog, run: str, *, take_over: bool, watch_ms: int, now_ms: int, ask: Ask
) -> str:
    """See whether another run of the job goes on.

    Args:
        log: as it was loaded; nothing is claimed yet.
        run: the new run.
        take_over: the user wants the new run in any case.
        watch_ms: how long the log of a coordinator that cannot be reached is watched.
        now_ms: the time, to say since when it has run.
        ask: looks whether a coordinator listens.

    Returns:
        What became of the former run, for the user; empty: there is nothing to say.

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
    """The refusal of a second run."""
    return UsageError(
        f"the job runs already: {who}",
        fix="stop that run first (headgate stop), or end it and go on from its newest checkpoint with "
        "--take-over, in Python take_over=True",
    )


def describe(leader: Leader, view: LogView, now_ms: int) -> str:
    """A text for the user: which process leads a run, since when, and its last checkpoint."""
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
    """True if the log grows."""
    for _ in range(max(1, int(watch_ms / 1000 / LOOK_EVERY_S))):
        if await log.has_grown():
            return True
        await asyncio.sleep(LOOK_EVERY_S)
    return await log.has_grown()


async def ask_leader(leader: Leader, own: Collection[str] = ()) -> Reach:
    """Look whether the process listens. An address that means another machine's own is left out.

    Args:
        leader: the process.
        own: where this process listens. A leader that listened there before this process began has gone:
            pods are given the addresses, the host names and even the process numbers of pods before them.
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
    """Judge a coordinator that listens nowhere, as in tests, by its process alone."""
    if leader.pid == os.getpid():
        return Reach.GONE
    try:
        os.kill(leader.pid, 0)
    except ProcessLookupError:
        return Reach.GONE
    except PermissionError:
        pass
    return Reach.UNKNOWN
