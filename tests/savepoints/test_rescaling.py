"""A running job at another parallelism: nothing lost, nothing twice, and it survives a crash."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import JobError, UsageError

ROWS = 1200
KEYS = 50


def make_job(lab: Any, sink: Any, parallelism: int, *, name: str = "job", rate: float = 600) -> Any:
    job = hg.Job(name, parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=5, delay="10ms")
    (
        job.read(numbers(ROWS, rate=rate, batch_rows=10, splits=8), name="numbers")
        .map(lambda n: (n % KEYS, 1))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1]), name="count")
        .write(sink, name="out")
    )
    return job


def expected() -> Counter[tuple[int, int]]:
    return Counter((n % KEYS, n // KEYS + 1) for n in range(ROWS))


def rescale_to(parallelism: int, answers: list[dict[str, Any]]) -> Any:
    async def script(job: Any) -> None:
        await job.checkpoint()
        answers.append(await job.request("rescale", parallelism=parallelism))
        answers.append(await job.status())
        await job.checkpoint()

    return script


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 7), (7, 3), (3, 1), (4, 8)])
def test_a_running_job_is_rescaled(lab: Any, before: int, after: int) -> None:
    sink, answers = collect(guarantee="exactly_once"), []
    ran = lab.run(make_job(lab, sink, before), rescale_to(after, answers))
    done, status = answers
    assert ran.outcome.status == "FINISHED"
    assert not ran.failures
    assert Counter(sink.rows) == expected()
    assert done["parallelism"] == status["parallelism"] == after
    assert done["pause_ms"] == status["last_rescale_ms"] > 0
    assert {vertex["parallelism"] for vertex in status["vertices"]} == {after}
    assert len(status["workers"]) == after
    assert any("paused for" in text for text in ran.job.texts("rescaled"))


def test_a_takeover_keeps_the_new_parallelism(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        await job.checkpoint()
        await job.request("rescale", parallelism=3)
        await job.crash_coordinator()
        await job.until("status", status="RUNNING")
        assert (await job.status())["parallelism"] == 3
        await job.checkpoint()
        await job.crash_coordinator()
        await job.until("status", status="RUNNING")
        assert (await job.status())["parallelism"] == 3

    ran = lab.run(make_job(lab, sink, 2), script)
    assert ran.outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def test_a_new_run_has_the_parallelism_that_its_job_says(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def first(job: Any) -> None:
        await job.checkpoint()
        await job.request("rescale", parallelism=3)
        await job.request("stop")

    async def second(job: Any) -> None:
        await job.until("status", status="RUNNING")
        assert (await job.status())["parallelism"] == 2

    lab.run(make_job(lab, sink, 2), first)
    lab.run(make_job(lab, sink, 2), second)
    assert Counter(sink.rows) == expected()


def test_a_worker_that_dies_while_rescaling_loses_nothing(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        await job.checkpoint()
        asking = asyncio.ensure_future(job.request("rescale", parallelism=3))
        await job.until("rescaling")
        job.live()[0].kill()
        # Whether the checkpoint was complete before the worker died decides which of the two it is.
        (answer,) = await asyncio.gather(asking, return_exceptions=True)
        refused = isinstance(answer, JobError) and "before the checkpoint" in str(answer)
        assert refused or answer["parallelism"] == 3
        await job.checkpoint()

    ran = lab.run(make_job(lab, sink, 2), script)
    assert ran.outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def test_what_cannot_be_is_refused_and_the_job_goes_on(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        await job.checkpoint()
        for wrong, text in ((2, "nothing would change"), (13, "key groups"), (0, "not a parall")):
            with pytest.raises(UsageError, match=text):
                await job.request("rescale", parallelism=wrong)

    ran = lab.run(make_job(lab, sink, 2), script)
    assert ran.outcome.status == "FINISHED"
    assert not ran.failures
    attempts = {json.loads(e.body)["attempt"] for e in ran.job.events if e.kind == "restored"}
    assert attempts == set()


def test_a_cluster_without_room_refuses_and_the_job_goes_on(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        await job.checkpoint()
        start_worker = job.cluster.start_worker

        asked: list[str] = []

        async def start_one_of_three(worker_id: str, control: Any, group: str) -> Any:
            asked.append(worker_id)
            if len(asked) in (2, 3):
                raise JobError("all machines are full")
            return await start_worker(worker_id, control, group)

        job.cluster.start_worker = start_one_of_three
        with pytest.raises(JobError, match="no workers for parallelism 5: all machines are full"):
            await job.request("rescale", parallelism=5)
        status = await job.status()
        assert (status["parallelism"], len(status["workers"])) == (2, 2)
        assert status["restored_checkpoint"] == 0  # the attempt is still the first one
        done = await job.request("rescale", parallelism=3)
        assert done["parallelism"] == 3

    ran = lab.run(make_job(lab, sink, 2), script)
    assert ran.outcome.status == "FINISHED"
    assert not ran.failures
    assert len(ran.restores) == 1
    assert Counter(sink.rows) == expected()


def test_data_that_ends_while_workers_are_looked_for_ends_the_job(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        await job.checkpoint()
        held = asyncio.Event()

        async def never(worker_id: str, control: Any, group: str) -> Any:
            await held.wait()
            raise JobError("all machines are full")

        job.cluster.start_worker = never
        asking = asyncio.ensure_future(job.request("rescale", parallelism=3))
        await job.until("rescaling")
        while len(sink.rows) < ROWS:
            await job.checkpoint()
        await (
            job.checkpoint()
        )  # what the subtasks said of their end came before what they say of this
        held.set()
        with pytest.raises(JobError, match="all machines are full"):
            await asking

    ran = lab.run(make_job(lab, sink, 2), script)
    assert ran.outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def test_a_job_cancelled_while_workers_are_looked_for_leaves_none(lab: Any) -> None:
    async def script(job: Any) -> None:
        await job.checkpoint()
        start_worker = job.cluster.start_worker
        started = asyncio.Event()

        async def slow(worker_id: str, control: Any, group: str) -> Any:
            handle = await start_worker(worker_id, control, group)
            started.set()
            await asyncio.Event().wait()
            return handle

        job.cluster.start_worker = slow
        asking = asyncio.ensure_future(job.request("rescale", parallelism=3))
        await started.wait()
        await job.request("cancel")
        (answer,) = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(answer, JobError)

    ran = lab.run(make_job(lab, collect(), 2), script)
    assert ran.outcome.status == "CANCELED"
