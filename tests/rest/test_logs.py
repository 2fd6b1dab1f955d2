"""Goal: the last lines of the log are in the REST API, without credentials and those of other jobs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.errors import UsageError
from headgate.runtime.observe.logs import tapped
from headgate.runtime.observe.recent_logs import LogLine, UnsentLogs
from headgate.runtime.rest import answers
from headgate.runtime.rest.client import RestClient
from headgate.tests.rest.test_server import hosted

_log = logging.getLogger("headgate.test")


def test_lines_behind_a_number_and_of_a_level(with_api: Any) -> None:
    async def script(api: Any) -> None:
        async with api.client() as client:
            with tapped(api.job.coordinator.keep_line):
                _log.warning("for all")
                _log.warning("ours", extra={"job": "clicks", "worker": "w7", "subtask": 3})
                _log.warning("not ours", extra={"job": "other"})
                _log.error("no bucket s3://key:secret@bucket/path")
            told = await client.logs(level="WARNING")
            lines = [each for each in told.lines if each.logger == "headgate.test"]
            assert [(each.process, each.message) for each in lines] == [
                ("coordinator", "for all"),
                ("w7", "ours"),
                ("coordinator", "no bucket s3://******@bucket/path"),
            ]
            assert lines[1].fields == {"job": "clicks", "worker": "w7", "subtask": "3"}
            assert (told.skipped, told.kept) == (0, 500)
            errors = await client.logs(after=lines[1].number, level="ERROR")
            assert [each.number for each in errors.lines] == [lines[2].number]
            assert (await client.logs(after=lines[2].number)).lines == []
        for query in ("level=LOUD", "after=x"):
            status, _, body = await api.ask("GET", f"/v1/job/logs?{query}")
            assert (status, query.partition("=")[0] in body["detail"]) == (400, True)

    with_api(script)


def test_a_worker_sends_the_lines_of_its_process(with_api: Any) -> None:
    line = LogLine(at_ms=5, level="ERROR", logger="l", message="m", fields={"a": "b"}, detail="d")

    async def script(api: Any) -> None:
        worker = api.job.cluster.workers[0]
        worker._worker._logs = unsent = UnsentLogs(1)
        unsent.add(line)
        unsent.add(line)
        async with api.client() as client:
            while not (told := await client.logs(level="ERROR")).lines:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (found,) = told.lines
        assert (found.process, found.at_ms, found.message) == (worker.worker_id, 5, "m")
        assert (found.fields, found.detail, told.skipped) == ({"a": "b"}, "d", 1)

    with_api(script)


def test_a_hosted_coordinator_keeps_what_it_logs(lab: Any, monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))

    async def use(coordinator: Any) -> list[str]:
        async with RestClient(coordinator.rest_url, coordinator.server.token) as client:
            _log.warning("before the end")
            told = await client.logs()
            await client.carry_out(answers.CancelCommand(trigger_id="c"))
            return [each.message for each in told.lines]

    job = hg.Job("logged", options={"rest.port": "0"})
    job.read(numbers(rate=1), name="in").write(blackhole(), name="out")
    assert "before the end" in hosted(job, use)


def test_no_lines_are_kept_on_demand(with_api: Any) -> None:
    async def script(api: Any) -> None:
        with tapped(api.job.coordinator.keep_line):
            _log.error("forgotten")
        async with api.client() as client:
            told = await client.logs()
            assert (told.lines, told.kept) == ([], 0)
            assert (await client.request("logs", after=0, level="INFO"))["lines"] == []
            with pytest.raises(UsageError, match="level"):
                await client.logs(level="LOUD")

    with_api(script, **{"headgate.rest.log-lines": "0"})
