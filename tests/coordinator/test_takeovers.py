"""A coordinator takes over from one that is still at work: what that one did meanwhile counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.errors import FencedError, JobError
from headgate.operators.clock import SystemClock
from headgate.runtime.control.cluster import ControlEndpoint, WorkerHandle
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.plan import JobSpec
from headgate.runtime.protocol.checkpoints.manifest import Manifest
from headgate.runtime.protocol.job_result import JobFailure
from headgate.runtime.protocol.joblog import JobStatus
from headgate.runtime.storage.base import Created, Existed
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore


class NoCluster:
    """Has no workers to give."""

    def __init__(self) -> None:
        self.asked = 0

    async def start_worker(
        self, worker_id: str, control: ControlEndpoint, group: str
    ) -> WorkerHandle:
        self.asked += 1
        raise JobError("no workers here")

    async def find_worker(self, worker_id: str, control: ControlEndpoint) -> None:
        """There are none."""

    async def close(self) -> None:
        """Nothing was started."""


class MeanwhileStore(MemoryStore):
    """Something happens just before, or after, the claim of generation 2, which is not in the log yet."""

    at_claim: Callable[[], Awaitable[None]]
    meanwhile: Callable[[], Awaitable[None]]

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        if name.endswith("generation/0000000002.json"):
            await self.at_claim()
        result = await super().create_if_absent(name, data)
        if name.endswith("generation/0000000002.json"):
            await self.meanwhile()
        return result


def make_spec() -> JobSpec:
    job = hg.Job("taken", parallelism=1)
    job.checkpoint(every="1h", storage="memory://taken")
    job.restart(attempts=0, delay="1ms")
    job.read(numbers(10), name="numbers").write(blackhole(), name="out")
    return runnable(job).spec()


async def nothing(old: JobLog) -> None:
    """Nothing happens."""


def take_over(
    spec: JobSpec,
    meanwhile: Callable[[JobLog], Awaitable[None]] = nothing,
    before: Callable[[JobLog], Awaitable[None]] = nothing,
    at_claim: Callable[[JobLog], Awaitable[None]] = nothing,
) -> tuple[Any, ...]:
    """Outcome, workers asked for, and what the log says at the end."""

    async def main() -> tuple[Any, ...]:
        objects: dict[str, bytes] = {}
        old = JobLog(MemoryStore("taken", objects), "old", SystemClock())
        await old.start_generation(parallelism=1, max_parallelism=128, run=spec.run)
        await before(old)
        store, cluster = MeanwhileStore("taken", objects), NoCluster()
        store.meanwhile = lambda: meanwhile(old)
        store.at_claim = lambda: at_claim(old)
        coordinator = JobCoordinator(
            spec, cluster=cluster, clock=SystemClock(), open_store=lambda *_: store
        )
        outcome = await coordinator.run()
        await coordinator.close()
        view = await JobLog(MemoryStore("taken", objects), "reader", SystemClock()).load()
        return outcome, cluster.asked, view

    return asyncio.run(main())


def test_a_job_that_ends_meanwhile_does_not_begin_anew() -> None:
    async def end(old: JobLog) -> None:
        await old.end_job(JobStatus.FINISHED)

    outcome, asked, _ = take_over(make_spec(), end)
    assert outcome.status == "FINISHED"
    assert asked == 0


def test_the_coordinator_of_a_run_that_has_ended_leaves_the_next_run_alone() -> None:
    spec = make_spec()

    async def end_and_begin(old: JobLog) -> None:
        error = JobError("it broke", where="job.py:7")
        failure = JobFailure.of("job", "it broke", "map", error)
        await old.end_job(JobStatus.FAILED, "no attempts", checkpoint=4, failure=failure)
        newer = JobLog(old._store, "newer", SystemClock())
        await newer.start_generation(parallelism=1, max_parallelism=128, run="next")

    outcome, asked, view = take_over(spec, before=end_and_begin)
    assert (outcome.status, outcome.reason, outcome.checkpoint) == ("FAILED", "no attempts", 4)
    assert str(outcome.error) == "it broke\n  at job.py:7"
    assert asked == 0
    assert (view.run, view.writer) == ("next", "newer")


@pytest.mark.parametrize("late", [False, True], ids=["long before", "just before its claim"])
def test_the_coordinator_of_a_run_that_another_run_has_followed_begins_nothing(late: bool) -> None:
    """Its process died and was made again, on a cluster that knows nothing of the other run."""

    async def begin(old: JobLog) -> None:
        newer = JobLog(old._store, "newer", SystemClock())
        await newer.start_generation(parallelism=1, max_parallelism=128, run="next")

    hook: dict[str, Any] = {"at_claim" if late else "before": begin}
    with pytest.raises(FencedError, match="another run of the job has begun since"):
        take_over(make_spec(), **hook)


def test_a_job_that_is_rescaled_meanwhile_goes_on_at_the_new_parallelism() -> None:
    async def rescale(old: JobLog) -> None:
        manifest = Manifest(
            checkpoint_id=1, trigger_ms=1, completed_ms=1, duration_ms=0, max_parallelism=128
        )
        await old.complete_checkpoint(manifest, parallelism=3)

    outcome, asked, view = take_over(make_spec(), rescale)
    assert outcome.status == "FAILED"  # for want of workers
    assert asked == view.parallelism == 3
