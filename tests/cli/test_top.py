"""`headgate top`: a table of a running job, from another process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate.errors import JobError, JobNotFound
from headgate.runtime.cli import top
from headgate.runtime.control.job_client import HungUp, PublishedEvent
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.tests.support.commands import ended_with

ENDED = {"status": "FINISHED", "reason": "", "checkpoint": 3, "dropped": [], "run": "r", "began_ms": 1,
         "ended_ms": 2, "restarts": 0, "error": None}  # fmt: skip


def event(kind: str, text: str = "", body: Any = None) -> PublishedEvent:
    return PublishedEvent(kind=kind, text=text, body=json.dumps(body).encode())


class Coordinator:
    """A client that yields some events, and then hangs up."""

    def __init__(self, *events: PublishedEvent) -> None:
        self._events = events
        self.closed = False

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        raise AssertionError(verb)

    async def events(self) -> AsyncIterator[PublishedEvent]:
        for each in self._events:
            yield each
        raise HungUp("it went away")

    async def close(self) -> None:
        self.closed = True


class Shown:
    """A reporter that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.notes: list[str] = []

    def event(self, event: PublishedEvent) -> None:
        self.events.append(event.text or event.kind)

    def note(self, text: str) -> None:
        self.notes.append(text)


def followed(answers: list[Coordinator | JobError]) -> tuple[JobOutcome | None, Shown]:
    shown = Shown()
    waiting = iter(answers)

    async def connect() -> Coordinator:
        answer = next(waiting)
        if isinstance(answer, JobError):
            raise answer
        return answer

    outcome = asyncio.run(top._follow(connect, shown))  # type: ignore[arg-type]
    return outcome, shown


def test_it_goes_over_to_the_coordinator_that_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_LOOK_S", 0.0)
    first = Coordinator(event("progress"), event("failure", "a worker died"))
    second = Coordinator(event("progress"), event("ended", "over", ENDED))
    gone = JobNotFound("no such job runs on this machine")
    outcome, shown = followed([first, gone, gone, second])
    assert outcome is not None
    assert outcome.status == "FINISHED"
    assert shown.events == ["progress", "a worker died", "progress", "over"]
    assert shown.notes == ["the coordinator went away; looking for the one that takes over"]
    assert (first.closed, second.closed) == (True, True)


def test_it_gives_up_when_none_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "RETURN_S_MAX", -1.0)
    monkeypatch.setattr(top, "_LOOK_S", 0.0)
    outcome, _ = followed([Coordinator(), JobNotFound("no such job runs on this machine")])
    assert outcome is None


def test_a_coordinator_that_hangs_up_at_once_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)

    monkeypatch.setattr("headgate.runtime.cli.top.asyncio.sleep", sleep)
    followed([Coordinator(), Coordinator(), Coordinator(event("ended", "over", ENDED))])
    assert pauses == [1.0, 1.0]


def test_what_happened_before_is_left_out() -> None:
    old = [event("status", "RUNNING"), event("failure", "yesterday")]
    new = [event("progress"), event("failure", "now"), event("ended", "over", ENDED)]
    _, shown = followed([Coordinator(*old, *new)])
    assert shown.events == ["RUNNING", "progress", "now", "over"]


def test_a_job_that_does_not_run_is_an_error() -> None:
    with pytest.raises(JobNotFound):
        followed([JobNotFound("no such job runs on this machine")])


def test_an_interrupt_leaves_the_job_running(cli: Any, ticker: str) -> None:
    run = cli.start("run", ticker, "--cluster", "in-process")
    run.wait_for("RUNNING")
    looking = cli.start("top", "ticker")
    looking.wait_for("ticks")
    looking.interrupt()
    assert looking.end()[0] == 0
    watching = cli.start("top", "ticker")
    watching.wait_for("ticks")
    ended_with(cli("stop", "ticker"), 0)
    code, text = watching.end()
    assert code == 0
    assert "job ticker ended: SUSPENDED" in text
    assert run.end()[0] == 0
    missing = cli("top", "ticker")
    ended_with(missing, 1)
    assert "no such job runs on this machine" in missing.stderr
