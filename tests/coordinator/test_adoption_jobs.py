"""A new coordinator goes on with what runs, and the old one, should it live, can harm nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.connectors import collect
from headgate.errors import FencedError, HeadgateError, StorageError
from headgate.operators.clock import SystemClock
from headgate.runtime.control.messages import (
    Cancel,
    CheckpointCompleted,
    FinishSources,
    Shutdown,
    Terminate,
)
from headgate.runtime.coordinator import leadership
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.coordinator.workers import WorkerPool
from headgate.runtime.protocol.checkpoints.manifest import Manifest
from headgate.runtime.protocol.joblog import JobStatus
from headgate.runtime.savepoint import store as savepoints
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.worker.worker import Worker
from headgate.tests.coordinator.counted import check_exact, make_job


class Succession:
    """One coordinator after the other, with the same secret, as the processes of a cluster have."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self.old: JobCoordinator

    def follow(self) -> None:
        """Another coordinator begins, whatever the one before does."""
        job = self._job
        self.old = job.coordinator
        job.coordinator = JobCoordinator(
            job.spec,
            cluster=job.cluster,
            clock=SystemClock(),
            open_store=job._open_store,
            token=self.old.server.token,
            takes_over=True,
        )
        job.coordinator.on_event = job._on_event
        job.task = asyncio.get_running_loop().create_task(job.coordinator.run())

    async def crash(self) -> None:
        """The coordinator dies as a process does: its links break, and it says nothing."""
        job = self._job
        job.coordinator._pool.abandon()
        job.task.cancel()
        await asyncio.gather(job.task, return_exceptions=True)
        self.follow()

    async def taken_over(self) -> dict[str, Any]:
        event = await self._job.until("adopted")
        return dict(json.loads(event.body))


def test_a_coordinator_that_dies_leaves_the_job_at_work(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")
    before: dict[str, Any] = {}
    found: list[dict[str, Any]] = []

    async def script(job: Any) -> None:
        succession = Succession(job)
        for _ in range(2):
            await job.checkpoint()
            before.update(await job.status())
            await succession.crash()
            found.append(await succession.taken_over())
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(make_job(lab, sink), script)
    assert [each["adopted"] for each in found] == [True, True]
    assert {each["attempt"] for each in found} == {before["attempt"]}
    assert [each["workers"] for each in found] == [before["workers"]] * 2
    assert ran.restores == ran.failures == []
    assert len(ran.job.cluster.workers) == 2
    ids = [json.loads(e.body)["id"] for e in ran.job.events if e.kind == "checkpoint"]
    assert ids == sorted(set(ids))
    check_exact(sink)


def test_an_old_coordinator_that_lives_can_do_nothing(lab: Any) -> None:
    """Each thing it could do is tried after its successor has adopted the attempt."""
    sink = collect(guarantee="exactly_once")
    errors: list[BaseException | None] = []

    async def script(job: Any) -> None:
        succession = Succession(job)
        await job.checkpoint()
        zombie, task = job.coordinator, job.task
        pool, context = zombie._pool, zombie._context
        workers = list(pool.live.values())
        succession.follow()
        assert (await succession.taken_over())["adopted"]
        await asyncio.wait({task})
        errors.append(task.exception())
        # It commands, on the links it had.
        for message in (
            Cancel(attempt=context.attempt.number),
            CheckpointCompleted(attempt=context.attempt.number, checkpoint_id=10_000, generation=1),
            FinishSources(attempt=context.attempt.number),
            Terminate(attempt=context.attempt.number),
            Shutdown(),
        ):
            for worker in workers:
                worker.send(message)
        # It completes a checkpoint, ends the job, and takes a worker for lost.
        manifest = Manifest(
            checkpoint_id=10_000, trigger_ms=1, completed_ms=1, duration_ms=0, max_parallelism=12
        )
        for forbidden in (
            context.env.log.complete_checkpoint(manifest),
            context.env.log.end_job(JobStatus.FAILED),
            context.env.log.trim(1),
            context.env.log.confirm(),
        ):
            with pytest.raises(FencedError):
                await forbidden
        for worker in workers:
            pool.live[worker.worker_id] = worker
            pool.lose(worker.worker_id, "the test says so")
        await pool.close()
        assert len(job.live()) == 2
        # It asks for the workers again.
        assert await pool.find({worker.worker_id: worker.group for worker in workers}) == []
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(make_job(lab, sink), script)
    assert isinstance(errors[0], FencedError)
    assert ran.outcome.status == "SUSPENDED"
    assert ran.restores == ran.failures == []
    check_exact(sink)


@pytest.mark.parametrize("verb", ["savepoint", "stop"])
def test_an_old_coordinator_that_lives_leaves_no_savepoint(
    lab: Any, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor knows nothing of it, and may run the job behind it as if it had not been taken."""
    publish = savepoints.publish
    kept: list[Path] = []

    async def script(job: Any) -> None:
        held, released = asyncio.Event(), asyncio.Event()

        async def published_late(*given: Any) -> None:
            held.set()
            await released.wait()
            await publish(*given)
            kept.extend(lab.path.glob("*/_metadata"))

        monkeypatch.setattr(savepoints, "publish", published_late)
        succession = Succession(job)
        await job.checkpoint()
        request = asyncio.create_task(job.request(verb, savepoint=str(lab.path)))
        await held.wait()
        old = job.task
        succession.follow()
        await succession.taken_over()
        released.set()
        await asyncio.wait({old})
        assert isinstance(old.exception(), FencedError)
        with pytest.raises(HeadgateError):
            await request
        assert len(kept) == 1
        assert list(lab.path.glob("*/_metadata")) == []
        await job.checkpoint()
        await job.request("stop")

    sink = collect(guarantee="exactly_once")
    ran = lab.run(make_job(lab, sink), script)
    assert ran.outcome.status == "SUSPENDED"
    assert not [file for file in lab.path.rglob("*.parquet") if file.is_file()]
    check_exact(sink)


def test_a_lost_worker_has_the_job_restarted(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")
    found: list[dict[str, Any]] = []

    async def script(job: Any) -> None:
        succession = Succession(job)
        await job.checkpoint()
        job.live()[0].kill()
        await succession.crash()
        found.append(await succession.taken_over())
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(make_job(lab, sink), script)
    assert not found[0]["adopted"]
    assert "of 2 workers are gone" in found[0]["reason"]
    assert len(ran.restores) == 1
    check_exact(sink)


def test_workers_that_may_not_wait_stop_at_once(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        succession = Succession(job)
        await job.checkpoint()
        workers = job.live()
        await succession.crash()
        await asyncio.gather(*(worker.died() for worker in workers))
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(make_job(lab, sink, **{"headgate.worker.orphaned-max": "0 ms"}), script)
    assert not ran.job.texts("adopted")
    assert len(ran.restores) == 1
    check_exact(sink)


def test_who_finds_no_workers_since_another_leads_does_not_say_that_they_are_gone(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is taken over while a coordinator looks for workers, and they obey the newer one."""
    sink = collect(guarantee="exactly_once")
    errors: list[BaseException | None] = []
    find = WorkerPool.find

    async def script(job: Any) -> None:
        succession = Succession(job)
        await job.checkpoint()

        async def superseded(pool: WorkerPool, worker_ids: Any) -> list[Any]:
            monkeypatch.setattr(WorkerPool, "find", find)
            context = job.coordinator._context
            newer = JobLog(context.env.store, "newer", SystemClock())
            await newer.start_generation(
                parallelism=2, max_parallelism=12, run=context.env.spec.run
            )
            return []

        monkeypatch.setattr(WorkerPool, "find", superseded)
        await succession.crash()
        await asyncio.wait({job.task})
        errors.append(job.task.exception())
        assert not job.texts("adopted")
        succession.follow()
        assert (await succession.taken_over())["adopted"]
        await job.request("stop")

    ran = lab.run(make_job(lab, sink), script)
    assert isinstance(errors[0], FencedError)
    assert ran.restores == ran.failures == []
    check_exact(sink)


def test_a_store_that_is_away_when_the_coordinator_dies_does_not_end_the_job(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = collect(guarantee="exactly_once")
    monkeypatch.setattr(leadership, "RETRY_S", 0.01)
    away = StorageError("the store is away")
    failures = [away] * 3
    adopted: list[bool] = []
    real = JobLog.load

    async def load(log: JobLog) -> Any:
        if failures:
            raise failures.pop()
        return await real(log)

    async def script(job: Any) -> None:
        succession = Succession(job)
        await job.checkpoint()
        monkeypatch.setattr(JobLog, "load", load)
        await succession.crash()
        adopted.append((await succession.taken_over())["adopted"])
        await job.request("stop")

    ran = lab.run(make_job(lab, sink), script)
    assert adopted == [True]
    assert failures == ran.restores == ran.failures == []
    check_exact(sink)


@pytest.mark.parametrize(("patience_ms", "tries"), [(0, 1), (999, 1), (1_000, 2), (5_500, 6)])
def test_a_store_that_stays_away_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, patience_ms: int, tries: int
) -> None:
    tried: list[float] = []
    now_s = 100.0

    class Clock(SystemClock):
        def monotonic(self) -> float:
            return now_s

    async def begin() -> None:
        tried.append(now_s)
        raise StorageError("the store is away")

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(StorageError, match="away"):
        asyncio.run(leadership.patiently(begin, Clock(), patience_ms))
    assert len(tried) == tries


def test_spares_of_a_coordinator_that_took_over_are_ready_too(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = collect(guarantee="exactly_once")
    warmed: list[str] = []
    warm_up = Worker._warm_up

    async def noted(worker: Worker, message: Any) -> None:
        await warm_up(worker, message)
        warmed.append(worker.worker_id)

    monkeypatch.setattr(Worker, "_warm_up", noted)

    async def script(job: Any) -> None:
        succession = Succession(job)
        await job.checkpoint()
        old = {worker.worker_id for worker in job.cluster.workers}
        await succession.crash()
        assert (await succession.taken_over())["adopted"]
        while not set(warmed) - old:
            await job.checkpoint()
        await job.request("stop")

    options = {"slotmanager.redundant-taskmanager-num": "1"}
    ran = lab.run(make_job(lab, sink, **options), script)
    assert ran.restores == ran.failures == []
    check_exact(sink)


def test_workers_of_several_groups_are_adopted(lab: Any) -> None:
    """Whose slots a worker gives is not said by the worker: it follows from its place in the log."""
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        succession = Succession(job)
        await job.checkpoint()
        before = await job.status()
        await succession.crash()
        assert (await succession.taken_over())["adopted"]
        await job.until("status", status="RUNNING")
        after = await job.status()
        assert [each["group"] for each in after["workers"]] == ["default"] * 2 + ["state"] * 2
        assert after["workers"] == before["workers"]
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(make_job(lab, sink, "state"), script)
    assert ran.outcome.status == "SUSPENDED"
    assert ran.restores == ran.failures == []
    check_exact(sink)


def test_workers_with_another_number_of_slots_are_not_adopted(lab: Any) -> None:
    """The next process says another number, and so cannot tell whose slots they are; it ends them."""
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        succession = Succession(job)
        await job.checkpoint()
        old = job.live()
        job.spec = replace(job.spec, group_slots={"state": 2})
        await succession.crash()
        found = await succession.taken_over()
        assert found["reason"] == "its workers had another number of slots"
        await job.until("status", status="RUNNING")
        assert len((await job.status())["workers"]) == 3
        await job.checkpoint()
        assert not any(each.alive for each in old)
        await job.request("stop")

    ran = lab.run(make_job(lab, sink, "state"), script)
    assert ran.outcome.status == "SUSPENDED"
    check_exact(sink)
