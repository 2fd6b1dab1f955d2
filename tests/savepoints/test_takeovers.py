"""Coordinators that die one after the other do so for a bounded number of times."""

from __future__ import annotations

from collections import Counter
from typing import Any

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import JobError
from headgate.runtime.job import runnable

ROWS = 400


def make_job(lab: Any, sink: Any, *, rate: float | None, every: str) -> hg.Job:
    job = hg.Job("job", parallelism=1, max_parallelism=12)
    job.checkpoint(every=every, storage=lab.storage)
    runnable(job).override({"headgate.coordinator.takeovers-max": "3"})
    job.read(numbers(ROWS, rate=rate, batch_rows=10), name="numbers").write(sink, name="out")
    return job


def test_a_crash_loop_ends_and_the_next_run_resumes(lab: Any, retained: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.request("stop")

    lab.run(make_job(lab, sink, rate=500, every="50ms"), stop)

    async def crash(job: Any) -> None:
        for _ in range(3):
            await job.until("status", status="RUNNING")
            await job.crash_coordinator()
        await job.until("status", status="RUNNING")  # as often as allowed
        await job.crash_coordinator()

    ran = lab.run(make_job(lab, sink, rate=100, every="1h"), crash)
    assert ran.outcome.status == "FAILED"
    assert isinstance(ran.outcome.error, JobError)
    assert "the coordinator died 4 times within 10m," in str(ran.outcome.error)
    assert retained("job").newest is not None

    again = lab.run(make_job(lab, sink, rate=None, every="1h"))
    assert again.outcome.status == "FINISHED"
    assert Counter(sink.rows) == Counter(range(ROWS))


def test_deaths_with_checkpoints_in_between_are_forgiven(lab: Any, faults: Any) -> None:
    sink = collect(guarantee="exactly_once")
    ran = lab.run(make_job(lab, sink, rate=500, every="20ms"), faults.takeovers(5))
    assert ran.outcome.status == "FINISHED"
    assert Counter(sink.rows) == Counter(range(ROWS))
