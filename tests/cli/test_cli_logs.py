"""Goal: `headgate logs` prints each wanted line of a job's log once, across coordinators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate.errors import JobError, JobNotFound
from headgate.runtime.cli import logs, top
from headgate.runtime.control.job_client import HungUp, PublishedEvent
from headgate.runtime.rest.evidence import LogLineAnswer, LogsAnswer
from headgate.tests.cli.test_top import ENDED

EVERYTHING = logs.Wanted("INFO", "", "", 100, False)


def line(number: int, process: str = "coordinator", **more: Any) -> LogLineAnswer:
    told = {
        "logger": "headgate.job",
        "message": f"line {number}",
        "fields": {},
        "detail": "",
        **more,
    }
    return LogLineAnswer(number=number, at_ms=number, level="INFO", process=process, **told)


def answer(*lines: LogLineAnswer, skipped: int = 0, kept: int = 500) -> LogsAnswer:
    return LogsAnswer(lines=list(lines), skipped=skipped, kept=kept)


class Coordinator:
    """A client that has lines, and hangs up or ends after some questions."""

    def __init__(self, *answers: LogsAnswer, ends: bool) -> None:
        self._answers = answers
        self._ends = ends
        self._over = asyncio.Event()
        self.asked: list[tuple[int, str]] = []

    async def logs(self, after: int = 0, level: str = "DEBUG") -> LogsAnswer:
        self.asked.append((after, level))
        if len(self.asked) > len(self._answers):
            raise JobError("it is gone")
        if len(self.asked) == len(self._answers):
            self._over.set()
        return self._answers[len(self.asked) - 1]

    async def events(self) -> AsyncIterator[PublishedEvent]:
        await self._over.wait()
        if not self._ends:
            raise HungUp("it went away")
        yield PublishedEvent(kind="ended", text="over", body=json.dumps(ENDED).encode())

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_EVERY_S", 0.01)
    monkeypatch.setattr(top, "_LOOK_S", 0.0)


def followed(coordinators: list[Coordinator]) -> tuple[Any, list[str]]:
    printed: list[str] = []
    waiting = iter(coordinators)

    async def connect() -> Any:
        return next(waiting)

    printer = logs._Printer(EVERYTHING, printed.append)
    return asyncio.run(logs._follow(connect, printer)), [text.split()[-1] for text in printed]


def test_each_line_is_printed_once_also_under_the_next_coordinator() -> None:
    first = Coordinator(answer(line(1), line(2)), answer(), answer(line(3)), ends=False)
    second = Coordinator(answer(line(1)), answer(line(2)), ends=True)
    outcome, printed = followed([first, second])
    assert outcome.status == "FINISHED"
    assert printed == ["1", "2", "3", "1", "2"]
    assert first.asked[:3] == [(0, "INFO"), (2, "INFO"), (2, "INFO")]
    assert second.asked[:2] == [(0, "INFO"), (1, "INFO")]


def test_it_gives_up_when_no_coordinator_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "RETURN_S_MAX", -1.0)
    printed: list[str] = []
    first = Coordinator(answer(line(1)), ends=False)
    waiting: list[Any] = [first]

    async def connect() -> Any:
        if waiting:
            return waiting.pop()
        raise JobNotFound("no such job runs on this machine")

    printer = logs._Printer(EVERYTHING, printed.append)
    assert asyncio.run(logs._follow(connect, printer)) is None
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("process", "step", "found"),
    [
        ("", "", [1, 2, 3]),
        ("w7", "", [2, 3]),
        ("coordinator", "", [1]),
        ("", "b", [2]),
        ("", "sum", [3]),
    ],
)
def test_lines_of_a_process_or_a_step(process: str, step: str, found: list[int]) -> None:
    lines = [
        line(1),
        line(2, "job-w7", fields={"task": "a -> b", "subtask": "0"}),
        line(3, "job-w7", fields={"operator": "sum"}),
    ]
    wanted = logs.Wanted("INFO", process, step, 100, False)
    assert [each.number for each in wanted.of(lines)] == found


def test_the_last_lines_are_limited_and_what_is_missing_is_said(capsys: Any) -> None:
    printed: list[str] = []
    printer = logs._Printer(logs.Wanted("INFO", "", "", 1, True), printed.append)
    printer.take(answer(line(1), line(2), skipped=3))
    printer.take(answer(line(3), line(4), skipped=4))
    assert [json.loads(text)["number"] for text in printed] == [2, 3, 4]
    said = capsys.readouterr().err
    assert "3 lines are missing" in said
    assert "1 lines are missing" in said
    logs._Printer(EVERYTHING, printed.append).take(answer(kept=0))
    assert "headgate.rest.log-lines" in capsys.readouterr().err


def test_the_form_of_a_line() -> None:
    fields = {"job": "clicks", "worker": "w1", "operator": "sum", "attempt": str((3 << 16) + 2)}
    found = line(1_500, "w1", fields=fields, detail="Traceback\nValueError: no")
    clock, _, text = logs.plain(found).partition(" ")
    assert clock.endswith(":01.500")
    assert text == (
        "INFO w1 headgate.job [operator=sum attempt=2] line 1500\nTraceback\nValueError: no"
    )
