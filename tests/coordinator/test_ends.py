"""The end of a job, while something else is under way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import JobError
from headgate.runtime.coordinator.checkpointing import Outcome
from headgate.runtime.coordinator.running import Running
from headgate.runtime.protocol.checkpoints.coordinator import RequestFailed
from headgate.runtime.protocol.failures import CheckpointFailure


def make_job(lab: Any) -> hg.Job:
    job = hg.Job("job", parallelism=1, max_parallelism=4)
    job.checkpoint(every="1h", storage=lab.storage)
    source = job.read(numbers(100_000, rate=100, batch_rows=10), name="numbers")
    source.write(collect(guarantee="exactly_once"), name="out")
    return job


def test_a_checkpoint_that_is_being_published_counts_when_the_job_is_cancelled(
    lab: Any, trouble: Any, retained: Any
) -> None:
    answers: list[dict[str, Any]] = []

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        trouble.only = "log/"
        trouble.hold("create_if_absent")
        checkpoint = asyncio.ensure_future(job.request("checkpoint"))
        await trouble.waiting["create_if_absent"].wait()
        cancel = asyncio.ensure_future(job.request("cancel"))
        with pytest.raises(JobError):
            await checkpoint  # so the job has heard of the wish to cancel it
        trouble.release("create_if_absent")
        answers.append(await cancel)

    ran = lab.run(make_job(lab), script, opener=trouble.open)
    assert ran.outcome.status == "CANCELED"
    newest = retained("job").newest
    assert newest is not None
    assert answers[0]["checkpoint"] == ran.outcome.checkpoint == newest.checkpoint_id


def test_a_final_checkpoint_is_asked_for_again_only_in_the_attempt_whose_data_has_ended() -> None:
    """Else the next attempt, which begins at once, would be finished before its data is through."""
    asked: list[str] = []

    class Checkpoints:
        savepoints: dict[str, Any] = {}

        def request(self, token: str, *, final: bool) -> Outcome:
            asked.append(token)
            return Outcome()

    async def main() -> None:
        plan = SimpleNamespace(vertices=[], loops=[])
        job: Any = SimpleNamespace(
            env=SimpleNamespace(events=asyncio.Queue()),
            attempt=SimpleNamespace(number=1, plan=plan),
            checkpoints=Checkpoints(),
        )
        failed = RequestFailed("final", CheckpointFailure.CANCEL_MARKER)  # type: ignore[arg-type]
        first, second = Running(job, []), Running(job, [])
        first._apply(Outcome(refused=(failed,)))
        again = await job.env.events.get()
        first._handle(again)
        assert asked == ["final"]
        job.attempt.number = 2
        second._handle(again)
        assert asked == ["final"]

    asyncio.run(main())


def broken(number: int) -> int:
    raise ValueError("no such number")


@pytest.mark.parametrize("fails", [True, False])
def test_who_asks_after_the_end_is_told_the_same(lab: Any, fails: bool) -> None:
    """By another coordinator of the run, which knows what is in the log, and runs nothing."""
    job = hg.Job("job", parallelism=1, max_parallelism=4)
    job.checkpoint(every="10ms", storage=lab.storage)
    job.restart(attempts=0, delay="1ms")
    source = job.read(numbers(200, rate=2000, batch_rows=10), name="numbers")
    (source.map(broken) if fails else source).write(collect(), name="out")
    told: list[Any] = []

    async def script(job: Any) -> None:
        job.over.set()
        told.append(await job.task)
        job.begin()
        told.append(await job.task)

    ran = lab.run(job, script)
    first, again = told
    assert (first.status, first.checkpoint > 0) == (
        ("FAILED", False) if fails else ("FINISHED", True)
    )
    assert (again.status, again.reason) == (first.status, first.reason)
    assert again.checkpoint == first.checkpoint
    assert (type(again.error), str(again.error)) == (type(first.error), str(first.error))
    assert len(ran.job.coordinator.failures) == fails
    assert len(ran.job.cluster.workers) == 1
    if fails:
        assert "in broken" in again.error.detail
