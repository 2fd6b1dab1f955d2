"""Goal: the coordinator has the last lines of the log, in bounds, and nothing else changes for the log."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list, numbers
from headgate.runtime.observe.logs import process_tapped, tapped
from headgate.runtime.observe.recent_logs import (
    DETAIL_MAX,
    MESSAGE_MAX,
    LogLine,
    RecentLogs,
    UnsentLogs,
)


def line(message: str, level: str = "INFO", **more: Any) -> LogLine:
    return LogLine(at_ms=1, level=level, logger="headgate.x", message=message, **more)


def texts(logs: RecentLogs, number: int = 0, level: str = "DEBUG") -> list[str]:
    return [each.line.message for each in logs.since(number, level)]


def test_each_level_keeps_its_own_lines_in_the_order_of_all() -> None:
    logs = RecentLogs(2)
    logs.add("w1", [line("bad", "ERROR")])
    logs.add("w2", [line(f"i{number}") for number in range(100)], skipped=3)
    logs.add("coordinator", [line("warned", "WARNING")])
    assert texts(logs) == ["bad", "i98", "i99", "warned"]
    assert texts(logs, level="WARNING") == ["bad", "warned"]
    assert logs.skipped == 3
    *_, before_last, last = logs.since(0)
    assert (before_last.process, last.process) == ("w2", "coordinator")
    assert texts(logs, before_last.number) == ["warned"]
    assert texts(logs, last.number) == []
    assert texts(RecentLogs(0)) == []


def test_long_lines_are_cut() -> None:
    logs = RecentLogs(1)
    logs.add("w", [line("m" * (2 * MESSAGE_MAX), detail="begin" + "d" * DETAIL_MAX + "end")])
    (found,) = logs.since(0)
    assert len(found.line.message) == MESSAGE_MAX
    assert found.line.message.endswith("m…")
    assert len(found.line.detail) == DETAIL_MAX
    assert found.line.detail.startswith("…d")
    assert found.line.detail.endswith("dend")


def test_lines_that_find_no_room_are_counted() -> None:
    unsent = UnsentLogs(2)
    for number in range(5):
        unsent.add(line(str(number)))
    lines, skipped = unsent.take()
    assert ([each.message for each in lines], skipped) == (["0", "1"], 3)
    assert unsent.take() == ((), 0)


@contextlib.contextmanager
def unconfigured() -> Iterator[None]:
    """Leave the loggers as Python has them when nobody has configured anything; pytest has handlers."""
    loggers = [logging.getLogger(), logging.getLogger("headgate")]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:] = []
    loggers[0].setLevel(logging.WARNING)
    loggers[1].setLevel(logging.NOTSET)
    loggers[1].propagate = True
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate


def test_lines_are_kept_and_printed_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        keep_and_print(capsys)


def keep_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = logging.getLogger("headgate.test"), logging.getLogger("users.module")
    kept: list[LogLine] = []
    also: list[LogLine] = []
    with tapped(kept.append), tapped(also.append):
        ours.info("not at this level")
        ours.warning("once %s", "only", extra={"operator": "o", "subtask": 1})
        theirs.warning("a stranger")
    assert [each.message for each in kept] == [each.message for each in also] == ["once only"]
    assert (kept[0].level, kept[0].fields) == ("WARNING", {"operator": "o", "subtask": "1"})
    assert capsys.readouterr().err == "once only\na stranger\n"
    ours.warning("later")
    assert len(kept) == 1

    with process_tapped(kept.append):
        try:
            raise ValueError("broken")
        except ValueError:
            theirs.exception("it failed")
        ours.critical("the end")
    found = [(each.level, each.logger, each.message) for each in kept[1:]]
    assert found == [
        ("ERROR", "users.module", "it failed"),
        ("ERROR", "headgate.test", "the end"),
    ]
    assert kept[1].detail.endswith("ValueError: broken")
    printed = capsys.readouterr().err
    assert printed.count("it failed") == printed.count("the end") == printed.count("later") == 1
    # A handler of the user's own gets everything as before, and nothing is printed twice.
    logging.getLogger().addHandler(handler := logging.StreamHandler(sys.stderr))
    with process_tapped(kept.append):
        ours.warning("configured")
    logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err == "configured\n"
    assert kept[-1].message == "configured"


def warn(number: int) -> int:
    logging.getLogger("users.module").warning("a strange number: %s", number)
    return number


@pytest.mark.ray
def test_the_log_of_workers_reaches_the_coordinator(watch: Any) -> None:
    job = hg.Job("warned")
    job.read(from_list([7]), name="in").map(warn, name="warn").write(blackhole(), name="out")
    job.read(numbers(rate=1), name="endless").write(blackhole(), name="out-2")

    async def script(watched: Any) -> None:
        while True:
            told = await watched.client.request("logs", after=0, level="WARNING")
            for each in told["lines"]:
                if each["message"] == "a strange number: 7":
                    assert each["process"].startswith("warned-")
                    assert each["logger"] == "users.module"
                    return

    watch(job, script, cluster="local")
