"""Failures where they hurt: while deploying, restoring, committing, publishing, failing, stopping."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from typing import Any

import polars as pl
import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.connectors.collect import CollectSink, CollectWriter
from headgate.operators.sink import Guarantee
from headgate.runtime.job import runnable

ROWS = 1000


class CommitOnce(Exception):
    pass


class FailingCommitWriter(CollectWriter):
    """Its first commit of all raises; `path` remembers."""

    path = ""

    def commit(self, committables: Any, permit: Any) -> None:
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            super().commit(committables, permit)
        else:
            raise CommitOnce("the first commit")


class FailingCommitSink(CollectSink):
    def __init__(self, path: str) -> None:
        inner = collect(guarantee="exactly_once")
        super().__init__(inner._store, Guarantee.EXACTLY_ONCE)
        self.path = path

    def writer(self) -> FailingCommitWriter:
        writer = FailingCommitWriter(self._store, self.guarantee)
        writer.path = self.path
        return writer


def make_job(
    lab: Any, sink: Any, *, rows: int | None = ROWS, rate: float | None = 2000, **checkpoint: Any
) -> hg.Job:
    job = hg.Job("job", parallelism=2, max_parallelism=12)
    job.checkpoint(every="40ms", storage=lab.storage, **checkpoint)
    job.restart(attempts=20, delay="10ms")
    (
        job.read(numbers(rows, rate=rate, batch_rows=20, splits=6), name="numbers")
        .map(lambda n: (n % 200, 1, hashlib.shake_256(str(n % 200).encode()).digest(500)))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1], b[2]), name="count")
        .map(lambda r: r[:2])
        .write(sink, name="out")
    )
    return job


def expected(rows: int = ROWS) -> Counter[tuple[int, int]]:
    return Counter({(n % 200, n // 200 + 1): 1 for n in range(rows)})


def exactly_once() -> Any:
    return collect(guarantee="exactly_once")


def finished_exactly(ran: Any, sink: Any, rows: int = ROWS) -> None:
    assert ran.outcome.status == "FINISHED", ran.failures
    assert Counter(sink.rows) == expected(rows)


def test_a_commit_that_fails_is_done_again_after_the_restart(lab: Any) -> None:
    sink = FailingCommitSink(str(lab.path / "failed"))
    ran = lab.run(make_job(lab, sink))
    assert len(ran.failures) == 1
    assert "the first commit" in ran.failures[0]
    finished_exactly(ran, sink)


class Abandoned(BaseException):
    """As some libraries raise it, past every `except Exception`."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (pl.exceptions.PanicException("once"), "the function of `map` raised PanicException: once"),
        (Abandoned("once"), "Abandoned: once"),
    ],
)
def test_what_a_function_raises_need_not_be_an_exception(
    lab: Any, error: BaseException, said: str
) -> None:
    path = str(lab.path / "raised")

    def fails_once(n: int) -> int:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return n
        raise error

    sink = exactly_once()
    job = hg.Job("job")
    job.checkpoint(every="40ms", storage=lab.storage)
    job.restart(attempts=1, delay="10ms")
    job.read(numbers(10), name="numbers").map(fails_once).write(sink, name="out")
    ran = lab.run(job)
    assert said in ran.failures[0]
    assert sink.rows == list(range(10))


@pytest.mark.parametrize(("tolerable", "fails"), [(1, 0), (0, 1)])
def test_a_state_file_that_cannot_be_written(
    lab: Any, trouble: Any, tolerable: int, fails: int
) -> None:
    trouble.only = "-0000-"  # the state files of the first worker

    async def script(job: Any) -> None:
        await job.checkpoint()
        trouble.fail["write_file"] = 1
        await job.until("checkpoint", status="FAILED")

    sink = exactly_once()
    job = make_job(lab, sink, tolerable_failures=tolerable, rows=2000)
    ran = lab.run(job, script, opener=trouble.open)
    assert len(ran.failures) == fails
    if fails:
        assert "too many checkpoints failed" in ran.failures[0]
        assert "(0): StorageError: injected" in ran.failures[0]
    said = ran.job.texts("checkpoint")
    assert any(
        "refused or broke: count -> " in text and "(0): StorageError" in text for text in said
    )
    finished_exactly(ran, sink, 2000)
    assert not lab.state_files("job")


def test_a_log_entry_whose_answer_was_lost(lab: Any, trouble: Any) -> None:
    """The checkpoint is in the log though its author saw an error: the restart must find it."""
    trouble.only = "log/0"

    async def script(job: Any) -> None:
        await job.checkpoint()
        trouble.fail_after["create_if_absent"] = 1
        await job.until("failure")

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink, rows=2000), script, opener=trouble.open)
    assert len(ran.failures) == 1
    assert "could not be published" in ran.failures[0]
    finished_exactly(ran, sink, 2000)


def test_a_checkpoint_that_expires(lab: Any, trouble: Any) -> None:
    trouble.only = "-0000-"  # the state files of the first worker

    async def script(job: Any) -> None:
        await job.checkpoint()
        trouble.hold("write_file")
        await job.until("checkpoint", status="FAILED")
        trouble.release("write_file")
        await job.checkpoint()
        assert (await job.status())["checkpoints_failed"] == 1

    sink = exactly_once()
    job = make_job(lab, sink, timeout="5s", tolerable_failures=3, rows=2000)
    ran = lab.run(job, script, opener=trouble.open)
    assert not ran.failures
    finished_exactly(ran, sink, 2000)
    assert not lab.state_files("job")


def test_a_worker_dies_while_state_is_restored_and_again(lab: Any, trouble: Any) -> None:
    async def script(job: Any) -> None:
        await job.checkpoint()
        job.live()[0].kill()
        for _ in range(2):
            trouble.hold("read")
            await job.until("failure")
            await trouble.waiting["read"].wait()
            job.live()[-1].kill()
        await job.until("failure")
        trouble.release("read")
        await job.until("restored")

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink), script, opener=trouble.open)
    assert len(ran.failures) == 3
    finished_exactly(ran, sink)


@pytest.mark.parametrize(("verb", "status"), [("cancel", "CANCELED"), ("stop", "SUSPENDED")])
def test_a_wish_while_state_is_restored(lab: Any, trouble: Any, verb: str, status: str) -> None:
    async def script(job: Any) -> None:
        await job.checkpoint()
        trouble.hold("read")
        job.live()[0].kill()
        await trouble.waiting["read"].wait()
        assert (await job.request(verb))["status"] == status
        trouble.release("read")

    sink = exactly_once()
    assert lab.run(make_job(lab, sink), script, opener=trouble.open).outcome.status == status
    finished_exactly(lab.run(make_job(lab, sink, rate=None), opener=trouble.open), sink)


def test_a_wish_while_workers_start(lab: Any) -> None:
    """A cluster that gives no workers must not keep a client waiting."""

    async def script(job: Any) -> None:
        never = asyncio.Event()

        async def start_worker(worker_id: str, control: Any, group: str) -> Any:
            await never.wait()

        job.cluster.start_worker = start_worker
        await job.until("start")
        assert (await job.request("cancel"))["status"] == "CANCELED"

    assert lab.run(make_job(lab, exactly_once()), script).outcome.status == "CANCELED"


def test_a_worker_that_dies_right_after_its_hello(lab: Any) -> None:
    """Greeted, and gone before anybody looked: not a live worker for ever."""

    async def script(job: Any) -> None:
        start = job.cluster.start_worker
        stillborn: list[Any] = []

        async def start_worker(worker_id: str, control: Any, group: str) -> Any:
            handle = await start(worker_id, control, group)
            if not stillborn:
                stillborn.append(handle)
                serve = job.coordinator._pool.serve

                async def served(hello: Any, link: Any) -> None:
                    if hello.worker_id == handle.worker_id:
                        handle.kill()
                    await serve(hello, link)

                job.coordinator._pool.serve = served
            return handle

        job.cluster.start_worker = start_worker
        await job.until("failure")

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink), script)
    assert len(ran.failures) == 1
    assert "died while starting" in ran.failures[0]
    finished_exactly(ran, sink)


def test_a_second_worker_dies_while_failing(lab: Any) -> None:
    async def script(job: Any) -> None:
        await job.checkpoint()
        workers = job.live()
        workers[0].kill()
        await job.until("status", status="FAILING")
        workers[1].kill()
        await job.until("restored")

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink), script)
    assert len(ran.failures) in (1, 2)
    finished_exactly(ran, sink)


def test_a_failure_while_stopping(lab: Any, trouble: Any) -> None:
    """The stop's checkpoint fails: the client hears so, the job goes on, and can be stopped again."""
    trouble.only = "-0000-"  # the state files of the first worker

    async def script(job: Any) -> None:
        await job.checkpoint()
        await job.checkpoint()
        trouble.hold("write_file")
        stopping = asyncio.ensure_future(job.request("stop"))
        await job.until("stopping")
        await trouble.waiting["write_file"].wait()
        job.live()[0].kill()
        with pytest.raises(hg.errors.JobError, match="no checkpoint was taken|job failed"):
            await stopping
        trouble.release("write_file")
        await job.until("restored")
        await job.checkpoint()
        assert (await job.request("stop"))["status"] == "SUSPENDED"

    sink = exactly_once()
    job = make_job(lab, sink, rows=4000)
    # Deltas may lie in the manifest.
    runnable(job).override({"execution.checkpointing.incremental": "false"})
    ran = lab.run(job, script, opener=trouble.open)
    assert ran.outcome.status == "SUSPENDED"
    finished_exactly(lab.run(make_job(lab, sink, rows=4000, rate=None)), sink, 4000)


def without_terminate(send: Any) -> Any:
    """No subtask hears that it may leave."""
    return lambda message: None if type(message).__name__ == "Terminate" else send(message)


def test_a_worker_dies_after_the_last_checkpoint_of_a_stop(lab: Any, trouble: Any) -> None:
    """The checkpoint is there, but some subtasks have not left: the client still gets an answer."""

    async def script(job: Any) -> None:
        await job.checkpoint()
        before = list(job.coordinator._pool.live.values())
        stopping = asyncio.ensure_future(job.request("stop"))
        await job.until("stopping")
        for worker in before:
            worker.link.send = without_terminate(worker.link.send)
        await job.checkpoint()
        job.live()[0].kill()
        with pytest.raises(hg.errors.JobError):
            await stopping
        for worker in before:
            del worker.link.send
        await job.until("restored")
        assert (await job.request("stop"))["status"] == "SUSPENDED"

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink, rows=4000), script)
    assert ran.outcome.status == "SUSPENDED"
    finished_exactly(lab.run(make_job(lab, sink, rows=4000, rate=None)), sink, 4000)


def test_the_coordinator_crashes_while_state_is_restored(lab: Any, trouble: Any) -> None:
    async def script(job: Any) -> None:
        await job.checkpoint()
        trouble.hold("read")
        job.live()[0].kill()
        await trouble.waiting["read"].wait()
        await job.crash_coordinator()
        trouble.release("read")
        await job.until("restored")

    sink = exactly_once()
    finished_exactly(lab.run(make_job(lab, sink), script, opener=trouble.open), sink)


def test_the_history_says_what_failed_and_how_long_it_took(lab: Any, faults: Any) -> None:
    told: list[dict[str, Any]] = []

    async def script(running: Any) -> None:
        await faults.kills(1, 2)(running)
        told.extend((await running.status())["exceptions"])
        await running.request("stop")

    lab.run(make_job(lab, exactly_once(), rows=None), script)
    assert len(told) == 2
    for failure in told:
        assert failure["kind"] == "worker_lost"
        assert failure["worker"] == failure["where"]
        assert failure["outcome"].startswith("restart ")
        assert failure["restored"].startswith("checkpoint ")
        phases = [failure[name] for name in ("cancelling_ms", "waiting_ms", "deploying_ms")]
        assert all(phase is not None for phase in phases)
        assert failure["down_ms"] >= sum(phases)
