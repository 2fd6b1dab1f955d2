"""`headgate logs`: the last lines of a running job's log, of its coordinator and of all workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from ...errors import JobError
from ..control.job_client import watch
from ..finding import connect_to_job
from .console import FAILED, OK, report, say
from .foreground import run_until_interrupted
from .progress import attempt_of
from .top import gone, successor

if TYPE_CHECKING:
    from ..finding import Where
    from ..protocol.job_result import JobOutcome
    from ..rest.client import RestClient
    from ..rest.evidence import LogLineAnswer, LogsAnswer

_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class Wanted:
    """The lines that are printed, and their form.

    Attributes:
        level: lines of this level and more severe ones are printed.
        process: only lines of processes with this text in their name; empty: of all processes.
        step: only lines that name this step as their task or operator; empty: all lines.
        lines: the most lines that are printed of those there are at the start.
        as_json: an object per line.
    """

    level: str
    process: str
    step: str
    lines: int
    as_json: bool

    def of(self, found: Sequence[LogLineAnswer]) -> list[LogLineAnswer]:
        """Return those lines that are wanted."""
        return [line for line in found if self.process in line.process and self._of_step(line)]

    def _of_step(self, line: LogLineAnswer) -> bool:
        if not self.step:
            return True
        task = line.fields.get("task", "")
        return self.step in (task, line.fields.get("operator"), *task.split(" -> "))

    def text(self, line: LogLineAnswer) -> str:
        """Return a line as it is printed."""
        return json.dumps(msgspec.to_builtins(line)) if self.as_json else plain(line)


def plain(line: LogLineAnswer) -> str:
    """Return `12:30:01.250 INFO coordinator headgate.job [attempt=1] message`, and the traceback below."""
    clock = time.strftime("%H:%M:%S", time.localtime(line.at_ms / 1000))
    fields = " ".join(
        f"{name}={attempt_of(int(value)) if name == 'attempt' else value}"
        for name, value in line.fields.items()
        if name not in ("job", "worker")
    )
    where = f"{line.process} {line.logger}" + (f" [{fields}]" if fields else "")
    text = f"{clock}.{line.at_ms % 1000:03} {line.level} {where} {line.message}"
    return f"{text}\n{line.detail}" if line.detail else text


def show(name: str, place: Where, wanted: Wanted) -> int:
    """Print the last lines, and return the exit code.

    Raises:
        HeadgateError: no such job runs there, or it cannot be asked from here.
    """

    async def ask() -> LogsAnswer:
        client = await connect_to_job(name, place)
        try:
            return await client.logs(level=wanted.level)
        finally:
            await client.close()

    found = asyncio.run(ask())
    printer = _Printer(wanted, print)
    printer.take(found)
    return OK


def follow(name: str, place: Where, wanted: Wanted) -> int:
    """Print the last lines and then each new one until the job ends, and return the exit code.

    With Ctrl-C the job goes on.

    Raises:
        HeadgateError: no such job runs there, or it cannot be asked from here.
    """
    connect = partial(connect_to_job, name, place)
    try:
        outcome = run_until_interrupted(
            _follow(connect, _Printer(wanted, partial(print, flush=True)))
        )
    except KeyboardInterrupt:
        return OK
    if outcome is None:
        raise gone(name)
    say(f"job {name} ended: {outcome.status}")
    return OK if outcome.error is None else max(FAILED, report(outcome.error))


class _Printer:
    """Prints the lines of answers, each line once."""

    def __init__(self, wanted: Wanted, put: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._put = put
        self._first = True
        self._skipped = 0
        self.after = 0
        """The number of the last line that was taken from the present coordinator."""
        self.level = wanted.level

    def restart(self) -> None:
        """Note that another coordinator answers from here on; it numbers its lines from 1."""
        self.after = self._skipped = 0

    def take(self, found: LogsAnswer) -> None:
        """Print what is wanted of an answer."""
        if self._first and not found.kept:
            say("no lines are kept for this job (headgate.rest.log-lines)")
        lines = self._wanted.of(found.lines)
        for line in lines[-self._wanted.lines :] if self._first else lines:
            self._put(self._wanted.text(line))
        if found.skipped > self._skipped:
            say(
                f"{found.skipped - self._skipped} lines are missing: workers wrote more than they send"
            )
        self._first, self._skipped = False, found.skipped
        self.after = found.lines[-1].number if found.lines else self.after


async def _follow(
    connect: Callable[[], Awaitable[RestClient]], printer: _Printer
) -> JobOutcome | None:
    """Print lines until the job ends; return None if its coordinator went away for good."""
    client: RestClient | None = await connect()
    while client is not None:
        try:
            outcome = await _until_it_ends(client, printer)
        finally:
            await client.close()
        if outcome is not None:
            return outcome
        say("the coordinator went away; looking for the one that takes over")
        printer.restart()
        client = await successor(connect)
    return None


async def _until_it_ends(client: RestClient, printer: _Printer) -> JobOutcome | None:
    ended = asyncio.create_task(watch(client))
    try:
        while not ended.done():
            printer.take(await client.logs(printer.after, printer.level))
            await asyncio.wait([ended], timeout=_EVERY_S)
        with contextlib.suppress(JobError):  # it may be closed already
            printer.take(await client.logs(printer.after, printer.level))
    except JobError:
        return await ended
    finally:
        ended.cancel()
    return ended.result()
