"""The ends of former runs are read from the log alone, however it was trimmed, and do not pile up.

Method: real logs on a store in memory, one coordinator after the other, with a clock that the test sets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headgate.errors import JobNotFound
from headgate.runtime.protocol import names
from headgate.runtime.protocol.checkpoints.manifest import Manifest
from headgate.runtime.protocol.job_result import JobFailure
from headgate.runtime.protocol.joblog import JobStatus
from headgate.runtime.storage.base import CheckpointStore
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.stored_jobs import StoredJob, find_job, find_jobs


class Clock:
    def __init__(self) -> None:
        self.ms = 0

    def now_ms(self) -> int:
        self.ms += 1
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000


class Lab:
    """The logs of jobs below `memory://lab`."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, bytes]] = {}
        self.clock = Clock()
        self.writers = 0
        self.checkpoints = 0

    def open_at(self, address: str, _: object = None) -> CheckpointStore:
        directory = address.removeprefix("memory://lab").strip("/")
        if directory:
            return MemoryStore(directory, self.objects.setdefault(directory, {}))
        below = {
            f"{name}/{key}": data
            for name, all_ in self.objects.items()
            for key, data in all_.items()
        }
        return MemoryStore("lab", below)

    def log(self, job: str = "clicks") -> JobLog:
        self.writers += 1
        store = self.open_at(f"memory://lab/{names.job_dir(job)}")
        return JobLog(store, f"writer-{self.writers}", self.clock)

    def lead(self, run: str, kept: int = 20, job: str = "clicks") -> JobLog:
        log = self.log(job)
        self.do(
            log.start_generation(parallelism=1, max_parallelism=4, run=run, job=job, ends_kept=kept)
        )
        return log

    def checkpoint(self, log: JobLog) -> None:
        self.checkpoints += 1
        manifest = Manifest(
            checkpoint_id=self.checkpoints,
            trigger_ms=1,
            completed_ms=2,
            duration_ms=1,
            max_parallelism=4,
            operators=(),
        )
        self.do(log.complete_checkpoint(manifest))
        self.do(log.trim(1))

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    def read(self, job: str = "clicks", address: str = "memory://lab") -> StoredJob:
        found: StoredJob = self.do(find_job(self.open_at, address, job, {}, self.clock))
        return found


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_ends_of_runs_outlive_the_trimming_of_their_entries(lab: Lab) -> None:
    failure = JobFailure(
        kind="user_code", text="it broke", vertex="map", error="JobError", message="it broke"
    )
    for run, status in (
        ("a", JobStatus.STOPPED),
        ("b", JobStatus.FAILED),
        ("c", JobStatus.FINISHED),
    ):
        log = lab.lead(run)
        for _ in range(3):
            lab.checkpoint(log)
        failed = failure if status is JobStatus.FAILED else None
        lab.do(log.end_job(status, f"end of {run}", failure=failed))
    log = lab.lead("d")
    for _ in range(3):
        lab.checkpoint(log)

    job = lab.read()
    assert job.name == "clicks"
    assert [(end.run, end.status.status_name, end.reason) for end in job.ends] == [
        ("a", "SUSPENDED", "end of a"),
        ("b", "FAILED", "end of b"),
        ("c", "FINISHED", "end of c"),
    ]
    assert job.ends[1].failure == failure
    assert [end.checkpoint for end in job.ends] == [3, 6, 9]
    assert all(0 < end.history.began_ms < end.ended_ms for end in job.ends)
    assert job.ended is None
    assert (job.view.run, job.view.history.began_ms > job.ends[-1].ended_ms) == ("d", True)


def test_as_many_are_kept_as_the_option_says(lab: Lab) -> None:
    sizes = []
    for number in range(12):
        log = lab.lead(f"run-{number}", kept=3)
        lab.checkpoint(log)
        lab.checkpoint(log)
        lab.do(log.end_job(JobStatus.FINISHED))
        lab.do(log.trim(0))
        ends = [end.run for end in lab.read().ends]
        assert ends == [f"run-{each}" for each in range(max(0, number - 3), number + 1)]
        starts = number + 1  # and as many generation records, which stay for ever
        sizes.append(len(lab.objects["clicks"]) - 2 * starts)
    assert sizes[-1] == sizes[4], "what is beyond the bound is deleted"


def test_none_but_the_last_if_none_is_wanted(lab: Lab) -> None:
    for run in ("a", "b"):
        log = lab.lead(run, kept=0)
        lab.checkpoint(log)
        lab.do(log.end_job(JobStatus.STOPPED))
    assert [end.run for end in lab.read().ends] == ["b"]


def test_a_takeover_goes_on_with_the_beginning_and_the_restarts_of_its_run(lab: Lab) -> None:
    first = lab.lead("a")
    began = first.view.history.began_ms
    first.restarts = 2
    lab.checkpoint(first)
    lab.checkpoint(first)
    second = lab.lead("a")
    second.restarts = 1
    lab.do(second.end_job(JobStatus.FAILED, "out of attempts"))
    (end,) = lab.read().ends
    assert (end.run, end.history.began_ms, end.history.restarts) == ("a", began, 3)

    lab.lead("b")
    assert lab.read().view.history.restarts == 0


def test_a_run_that_is_ended_again_by_its_next_coordinator_is_one_run(lab: Lab) -> None:
    first = lab.lead("a")
    lab.checkpoint(first)
    lab.do(first.end_job(JobStatus.STOPPED, "stopped"))
    (before,) = lab.read().ends
    lab.do(lab.lead("a").end_job(JobStatus.STOPPED, "stopped"))
    (after,) = lab.read().ends
    assert (after.run, after.ended_ms) == ("a", before.ended_ms)


def test_a_job_is_found_by_its_storage_or_its_own_directory(lab: Lab) -> None:
    lab.do(lab.lead("x", job="Clicks of Ada").end_job(JobStatus.FINISHED))
    lab.lead("y", job="orders")
    lab.objects["not-a-job"] = {"a/b.parquet": b""}
    listed = lab.do(find_jobs(lab.open_at, "memory://lab", {}, lab.clock))
    assert [(job.name, job.ended is None) for job in listed] == [
        ("Clicks of Ada", False),
        ("orders", True),
    ]
    own = f"memory://lab/{names.job_dir('orders')}"
    assert lab.read("orders", own).view.run == "y"
    (only,) = lab.do(find_jobs(lab.open_at, own, {}, lab.clock))
    assert only.name == "orders"
    with pytest.raises(JobNotFound, match="name=`nobody`"):
        lab.read("nobody")
