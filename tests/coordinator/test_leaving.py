"""A worker whose process has to end: its tasks go elsewhere from a checkpoint, and that is no failure.

Method: real jobs in this process that may not restart, so that a lost worker would fail them. Workers are
told to leave as SIGTERM tells them; `tests/cli/test_cli_detached.py` sends that to a process.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from headgate.connectors import collect
from headgate.errors import JobError
from headgate.tests.coordinator.counted import check_exact, make_job


def leave(job: Any, number: int) -> str:
    """SIGTERM for a worker."""
    worker = job.live()[number]
    worker._worker.leave()
    return str(worker.worker_id)


def workers(status: dict[str, Any]) -> list[str]:
    return [each["worker"] for each in status["workers"]]


def test_tasks_of_a_worker_that_leaves_go_to_another(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")
    left: list[str] = []
    after: list[list[str]] = []

    async def script(job: Any) -> None:
        for number in range(2):
            await job.checkpoint()
            left.append(leave(job, number))
            await job.until("rescaled")
            after.append(workers(await job.status()))
            job.events.clear()
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(make_job(lab, sink), script)
    assert ran.outcome.status == "SUSPENDED"
    assert ran.outcome.restarts == 0, "that a worker leaves is no failure"
    for gone, there in zip(left, after, strict=True):
        assert len(there) == 2
        assert gone not in there
    check_exact(sink)


def test_what_is_said_of_it(lab: Any) -> None:
    texts: list[str] = []

    async def script(job: Any) -> None:
        await job.checkpoint()
        name = leave(job, 0)
        moved = await job.until("rescaled")
        texts.extend(job.texts("leaving"))
        texts.append(moved.text)
        assert texts[0] == f"{name} has to leave; its tasks go to another worker"
        assert json.loads(moved.body)["before"] == json.loads(moved.body)["after"] == 2
        await job.request("stop")

    lab.run(make_job(lab, collect(guarantee="exactly_once")), script)
    assert texts[-1].startswith("tasks were moved to other workers; the job paused for ")


def test_a_cluster_without_room_leaves_the_job_where_it_is(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job works on until the worker is gone; then it restarts, like after any death."""
    sink = collect(guarantee="exactly_once")

    async def no_room(*_: object) -> None:
        raise JobError("no room")

    async def script(job: Any) -> None:
        await job.checkpoint()
        monkeypatch.setattr(job.cluster, "start_worker", no_room)
        name = leave(job, 0)
        while len(job.texts("leaving")) < 2:
            await job.tick()
        assert "no room" in job.texts("leaving")[1]
        assert name in workers(await job.status())
        await job.checkpoint()
        await job.request("stop")

    assert lab.run(make_job(lab, sink), script).outcome.status == "SUSPENDED"
    check_exact(sink)
