"""The origin of a log line, for people and for machines."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import Crash, from_list
from headgate.operators.elements import Batch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.runtime.observe.logs import FORMAT_VARIABLE, configure_logging

Configure = Callable[[str], None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Configure:
    """Sets the format."""

    def set_format(format: str) -> None:
        monkeypatch.setenv(FORMAT_VARIABLE, format)
        configure_logging(logging.INFO)

    return set_format


class TalkativeSink(Sink):
    """Its writer says what it writes, and logs an exception."""

    guarantee = Guarantee.NONE

    def writer(self) -> SinkWriter:
        return TalkativeWriter()


class TalkativeWriter(SinkWriter):
    def write(self, batch: Batch) -> None:
        self.context.logger.info("writing rows=`%s`", len(batch))
        try:
            raise ValueError("not\nso good")
        except ValueError:
            self.context.logger.exception("it went wrong")


def run_talkative() -> None:
    job = hg.Job("chatty")
    job.read(from_list([1, 2]), name="items").write(TalkativeSink(), name="talk")
    job.run()


def test_json_lines_name_job_operator_and_subtask(configure: Configure, capsys: Any) -> None:
    configure("json")
    run_talkative()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    said, failed = (line for line in lines if line["logger"] == "headgate.operator")
    attempt = said.pop("attempt")
    assert attempt > 0
    assert said.pop("time_ms") > 1_600_000_000_000
    assert said == {
        "level": "INFO",
        "logger": "headgate.operator",
        "message": "writing rows=`2`",
        "job": "chatty",
        "operator": "talk",
        "subtask": 0,
    }
    assert failed["level"] == "ERROR"
    assert failed["exception"].startswith("Traceback (most recent call last):")
    assert failed["exception"].endswith("ValueError: not\nso good")
    of_the_job = [line for line in lines if line["logger"] == "headgate.job"]
    assert {line["job"] for line in of_the_job} == {"chatty"}
    assert "job chatty is FINISHED" in [line["message"] for line in of_the_job]
    ready = [line for line in lines if line["message"].startswith("worker ready")]
    assert [line["job"] for line in ready] == ["chatty"]
    assert all(line["worker"].startswith("chatty-") for line in ready)


def test_plain_lines_say_the_same(configure: Configure, capsys: Any) -> None:
    configure("plain")
    run_talkative()
    text = capsys.readouterr().err
    where = r"headgate\.operator \[job=chatty operator=talk subtask=0 attempt=\d+\]"
    assert re.search(rf"(?m)^\d\d:\d\d:\d\d\.\d{{3}} INFO {where} writing rows=`2`$", text)
    assert re.search(rf"(?m) ERROR {where} it went wrong\nTraceback \(most recent", text)
    assert "\nValueError: not\nso good\n" in text
    assert re.search(r"(?m) INFO headgate\.job \[job=chatty.*\] job chatty is FINISHED$", text)


def test_a_failure_comes_with_its_traceback(
    configure: Configure, capsys: Any, tmp_path: Path
) -> None:
    configure("json")
    job = hg.Job("failing", options={"restart-strategy.type": "none"})
    job.read(from_list([1, 2]), name="items").map(lambda n: n // 0, name="divide").write(
        TalkativeSink(), name="talk"
    )
    with pytest.raises(hg.errors.HeadgateError, match="divide"):
        job.run()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (failure,) = (line for line in lines if line["level"] == "WARNING")
    assert failure["job"] == "failing"
    assert failure["attempt"] > 0
    assert "ZeroDivisionError" in failure["message"]
    assert "Traceback" in failure["exception"]


def test_odd_values_do_not_break_a_line(configure: Configure, capsys: Any) -> None:
    configure("json")
    fields = {"job": "j", "operator": Path("a/b"), "subtask": 0, "worker": None, "other": "x"}
    logging.getLogger("headgate.test").info("hello %s", "wörld\n", extra=fields)
    logging.getLogger("somebody.else").warning("not ours")
    (line,) = capsys.readouterr().err.splitlines()
    shown = json.loads(line)
    assert shown["message"] == "hello wörld\n"
    assert (shown["job"], shown["operator"], shown["subtask"]) == ("j", "a/b", 0)
    assert not {"worker", "other", "exception"} & shown.keys()


def test_crash_is_not_hidden(configure: Configure, capsys: Any) -> None:
    """A restart is told with what caused it."""
    configure("plain")
    job = hg.Job("again")
    job.restart(attempts=1, delay="0s")
    job.read(from_list([1, Crash()]), name="items").write(TalkativeSink(), name="talk")
    job.run()
    text = capsys.readouterr().err
    assert re.search(r"(?m) WARNING headgate\.job \[job=again attempt=\d+\] items -> talk", text)
    assert " restart 1 in 0s" in text
