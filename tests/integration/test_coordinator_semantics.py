"""The promises of a coordinator: checkpoints, stop, cancel, resume, retention, fencing, failures."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, csv_source, numbers
from headgate.errors import (
    BadRecordError,
    FencedError,
    HeadgateError,
    JobError,
    StateError,
    UsageError,
    UserCodeError,
)
from headgate.runtime.coordinator import regional, restarting
from headgate.runtime.job import runnable

ROWS = 1000
RATE = 2000
KEYS = 250
LONG_S = 120.0
"""Longer than any test waits, however slow the machine is."""


def bulk(key: int) -> bytes:
    """State that does not compress and is too large to lie in a manifest."""
    return hashlib.shake_256(str(key).encode()).digest(400)


def make_job(
    lab: Any,
    sink: Any,
    *,
    parallelism: int = 2,
    every: str = "40ms",
    attempts: int = 10,
    name: str = "job",
    rows: int = ROWS,
    rate: float | None = RATE,
    counter: str = "count",
    **checkpoint: Any,
) -> hg.Job:
    """Numbers, and per key a count that carries ballast: large keyed state."""
    job = hg.Job(name, parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every=every, storage=lab.storage, **checkpoint)
    job.restart(attempts=attempts, delay="10ms")
    (
        job.read(numbers(rows, rate=rate, batch_rows=20, splits=6), name="numbers")
        .map(lambda n: (n % KEYS, 1, n, bulk(n)))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1], b[2], a[3] + b[3][:1]), name=counter)
        .map(lambda r: (r[0], r[1]))
        .write(sink, name="out")
    )
    return job


def expected(rows: int = ROWS) -> Counter[tuple[int, int]]:
    """One output per record: the k-th of a key counts k."""
    counts: Counter[int] = Counter()
    found: Counter[tuple[int, int]] = Counter()
    for n in range(rows):
        counts[n % KEYS] += 1
        found[n % KEYS, counts[n % KEYS]] += 1
    return found


def exactly_once() -> Any:
    return collect(guarantee="exactly_once")


def files_of(view: Any) -> set[str]:
    """State files that the retained checkpoints refer to."""
    return {
        handle.file
        for logged in view.checkpoints
        for operator in logged.manifest.operators
        for subtask in operator.subtasks
        for snapshot in subtask.snapshots
        for handle in snapshot.handles
        if handle.file is not None
    }


# -- checkpoints, stop, cancel ----------------------------------------------------------------------


def test_checkpoint_on_demand_then_stop_then_resume(lab: Any, retained: Any) -> None:
    sink = exactly_once()

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        first = await job.request("checkpoint")
        second = await job.request("checkpoint")
        assert 0 < first["checkpoint"] < second["checkpoint"]
        while not sink.rows:  # committed by checkpoints only, and there are no others
            second = await job.request("checkpoint")
        assert (await job.status())["last_checkpoint"] == second["checkpoint"]
        stopped = await job.request("stop")
        assert stopped["status"] == "SUSPENDED"
        assert stopped["checkpoint"] > second["checkpoint"]

    first = lab.run(make_job(lab, sink, every="1h", rate=500), script, batches=5)
    assert first.outcome.status == "SUSPENDED"
    assert first.completed >= 3
    stopped_rows = len(sink.rows)
    assert 0 < stopped_rows < ROWS
    assert Counter(sink.rows) <= expected()
    assert retained("job").newest.checkpoint_id == first.outcome.checkpoint

    second = lab.run(make_job(lab, sink, every="1h", rate=None))
    assert second.outcome.status == "FINISHED"
    assert second.restores == [first.outcome.checkpoint]
    assert Counter(sink.rows) == expected()


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (None, True),
        ("RETAIN_ON_CANCELLATION", True),
        ("DELETE_ON_CANCELLATION", False),
        ("NO_EXTERNALIZED_CHECKPOINTS", False),
    ],
)
def test_cancel(lab: Any, retained: Any, retention: str | None, kept: bool) -> None:
    sink = exactly_once()
    job = make_job(lab, sink, rows=4000)
    if retention is not None:
        key = "execution.checkpointing.externalized-checkpoint-retention"
        job.options[key] = retention

    async def script(running: Any) -> None:
        await running.checkpoint()
        await running.checkpoint()
        answer = await running.request("cancel")
        assert answer["status"] == "CANCELED"

    ran = lab.run(job, script, batches=5)
    assert ran.outcome.status == "CANCELED"
    assert Counter(sink.rows) < expected(4000)
    view = retained("job")
    assert bool(view.checkpoints) is kept
    assert bool(lab.state_files("job")) is kept
    if not kept:
        sink = exactly_once()
    again = lab.run(make_job(lab, sink, rows=4000, rate=None))
    assert bool(again.restores) is kept
    assert Counter(sink.rows) == expected(4000)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [("DELETE_ON_CANCELLATION", True), ("NO_EXTERNALIZED_CHECKPOINTS", False)],
)
def test_retention_after_a_failed_job(lab: Any, retained: Any, retention: str, kept: bool) -> None:
    job = make_job(lab, exactly_once(), attempts=0, rate=500)
    job.options["execution.checkpointing.externalized-checkpoint-retention"] = retention

    async def script(running: Any) -> None:
        await running.checkpoint()
        running.live()[0].kill()

    assert lab.run(job, script).outcome.status == "FAILED"
    assert bool(retained("job").checkpoints) is kept


def test_requests_without_checkpoints_are_refused(lab: Any) -> None:
    job = hg.Job("plain")
    job.read(numbers(rate=100), name="numbers").write(collect(guarantee="none"), name="out")

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        with pytest.raises(UsageError, match="takes no checkpoints"):
            await running.request("checkpoint")
        with pytest.raises(HeadgateError, match="unknown request"):
            await running.request("dance")
        assert (await running.request("stop"))["status"] == "SUSPENDED"

    assert lab.run(job, script).outcome.status == "SUSPENDED"


@pytest.mark.parametrize("verb", ["stop", "cancel"])
def test_two_wishes_at_once_are_both_answered(lab: Any, verb: str) -> None:
    async def script(running: Any) -> None:
        await running.checkpoint()
        answers = await asyncio.gather(
            running.request("stop"), running.request(verb), return_exceptions=True
        )
        for answer in answers:
            assert isinstance(answer, HeadgateError) or answer["status"] in (
                "SUSPENDED",
                "CANCELED",
            )

    outcome = lab.run(make_job(lab, exactly_once(), rate=500), script).outcome
    assert outcome.status in ("SUSPENDED", "CANCELED")


# -- retention and orphans --------------------------------------------------------------------------


@pytest.mark.parametrize("retain", [1, 2])
def test_files_belong_to_retained_checkpoints(lab: Any, retained: Any, retain: int) -> None:
    import random

    rng = random.Random(retain)
    sink = exactly_once()

    async def script(job: Any) -> None:
        for _ in range(3):
            await job.checkpoint()
            job.kill(rng)
            await job.until("status", status="RUNNING")
        await job.checkpoint()
        await job.crash_coordinator()
        await job.checkpoint()
        await job.checkpoint()
        await job.checkpoint()
        await job.request("stop")

    lab.run(make_job(lab, sink, retain=retain, rows=8000), script)
    view = retained("job")
    assert len(view.checkpoints) == retain
    assert files_of(view)
    assert lab.state_files("job") == files_of(view)


def test_files_of_checkpoints_aborted_under_way_are_gone(
    lab: Any, retained: Any, trouble: Any
) -> None:
    """Cancelled while files are written: neither written ones nor those under way stay."""
    trouble.only = "-0001-"  # the state files of the second worker

    async def script(job: Any) -> None:
        await job.checkpoint()
        for _ in range(3):
            trouble.hold("write_file")
            await trouble.waiting["write_file"].wait()
            for end in list(job.live()[0].hub._accepting):
                end.shut_down()
            await job.until("status", status="FAILING")
            trouble.release("write_file")
            await job.until("status", status="RUNNING")
            await job.checkpoint()
        await job.request("stop")

    lab.run(make_job(lab, exactly_once(), rows=8000), script, opener=trouble.open)
    assert lab.state_files("job") == files_of(retained("job"))


# -- resume -----------------------------------------------------------------------------------------


def test_a_finished_job_runs_anew(lab: Any) -> None:
    sink = exactly_once()
    assert lab.run(make_job(lab, sink, rate=None)).outcome.status == "FINISHED"
    again = lab.run(make_job(lab, sink, rate=None))
    assert again.outcome.status == "FINISHED"
    assert not again.restores
    assert any("new run" in text for text in again.job.texts("start"))
    assert Counter(sink.rows) == expected()  # a collect in memory begins with no rows


def test_fresh_ignores_the_checkpoint_but_not_later_ones(lab: Any) -> None:
    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.request("stop")

    first = exactly_once()
    stopped = lab.run(make_job(lab, first, rate=500), stop)

    async def fail(job: Any) -> None:
        assert any("is ignored" in text for text in job.texts("start")) or not job.events
        await job.checkpoint()
        job.live()[0].kill()

    second = exactly_once()
    ran = lab.run(make_job(lab, second), fail, fresh=True)
    assert ran.outcome.status == "FINISHED"
    assert Counter(second.rows) == expected()
    assert len(ran.restores) == 1
    assert ran.restores[0] > stopped.outcome.checkpoint


def test_failure_of_a_fresh_run_before_its_first_checkpoint(lab: Any) -> None:
    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.request("stop")

    lab.run(make_job(lab, exactly_once(), rate=500), stop)

    async def fail(job: Any) -> None:
        await job.until("status", status="RUNNING")
        job.live()[0].kill()

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink, every="1h"), fail, fresh=True)
    assert not ran.restores
    assert Counter(sink.rows) == expected()


def test_a_takeover_in_a_fresh_run_goes_on_with_it(lab: Any) -> None:
    """The successor has the same arguments, `fresh` among them; it must not start from nothing again."""

    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.request("stop")

    lab.run(make_job(lab, exactly_once(), rate=500), stop)

    async def crash(job: Any) -> None:
        await job.checkpoint()
        await job.crash_coordinator()

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink), crash, fresh=True)
    assert ran.outcome.status == "FINISHED"
    assert len(ran.restores) == 1
    assert Counter(sink.rows) == expected()


def test_rescale_from_2_to_3_to_1(lab: Any) -> None:
    sink = exactly_once()

    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.checkpoint()
        await job.request("stop")

    counts = []
    for parallelism in (2, 3):
        lab.run(make_job(lab, sink, parallelism=parallelism, rate=None), stop, batches=5)
        counts.append(len(sink.rows))
    last = lab.run(make_job(lab, sink, parallelism=1, rate=None))
    assert last.outcome.status == "FINISHED"
    assert 0 < counts[0] < counts[1] < ROWS
    assert Counter(sink.rows) == expected()


def test_unclaimed_state_is_refused_by_name(lab: Any, retained: Any) -> None:
    sink = exactly_once()

    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.request("stop")

    lab.run(make_job(lab, sink, rate=500), stop)
    before = retained("job").newest
    refused = lab.run(make_job(lab, sink, counter="renamed", rate=None))
    assert refused.outcome.status == "FAILED"
    assert isinstance(refused.outcome.error, StateError)
    assert "operators=`count`" in str(refused.outcome.error)
    assert not refused.job.texts("restart")
    assert retained("job").newest == before

    dropped = lab.run(
        make_job(lab, sink, counter="renamed", rate=None), allow_non_restored_state=True
    )
    assert dropped.outcome.status == "FINISHED"
    assert dropped.restores == [before.checkpoint_id]


def test_another_number_of_key_groups_is_refused(lab: Any) -> None:
    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.request("stop")

    lab.run(make_job(lab, exactly_once(), rate=500), stop)
    job = make_job(lab, exactly_once())
    runnable(job).max_parallelism = 13
    refused = lab.run(job)
    assert isinstance(refused.outcome.error, StateError)
    assert "key groups" in str(refused.outcome.error)


# -- failures ---------------------------------------------------------------------------------------


def test_restarts_exhausted(lab: Any) -> None:
    def explode(n: int) -> int:
        if n == 7:
            raise ZeroDivisionError("number seven")
        return n

    job = hg.Job("broken", parallelism=2)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=2, delay="5ms")
    job.read(numbers(100), name="numbers").map(explode, name="explode").write(
        exactly_once(), name="out"
    )
    ran = lab.run(job)
    assert ran.outcome.status == "FAILED"
    assert isinstance(ran.outcome.error, UserCodeError)
    assert "explode" in str(ran.outcome.error)
    assert "number seven" in str(ran.outcome.error)
    assert "line" in ran.outcome.error.detail
    assert "explode" in ran.outcome.error.detail
    assert len(ran.failures) == 3
    assert len(ran.job.texts("restart")) == 2

    with pytest.raises(JobError, match="number seven"):
        job.run()


def test_a_bad_record_fails_at_once(lab: Any) -> None:
    path = lab.path / "bad.csv"
    path.write_text("n\n1\ntwo\n3\n")
    job = hg.Job("bad")
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=5, delay="5ms")
    schema = pa.schema([("n", pa.int64())])
    job.read(csv_source(str(path), schema), name="rows").write(exactly_once(), name="out")
    ran = lab.run(job)
    assert isinstance(ran.outcome.error, BadRecordError)
    assert not ran.job.texts("restart")


def wait_long_for_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection is not taken for the cause before the loss of its worker is heard of."""
    for module in (restarting, regional):
        monkeypatch.setattr(module, "ROOT_CAUSE_S", LONG_S)


def test_a_lost_worker_is_named_as_the_cause(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers see broken connections first; even so the failure must name the worker."""
    wait_long_for_causes(monkeypatch)
    killed: list[str] = []

    async def script(job: Any) -> None:
        for victim in (0, 1, 2):
            await job.checkpoint()
            worker = job.live()[victim]
            killed.append(worker.worker_id)
            worker.kill()
            await job.until("status", status="RUNNING")

    ran = lab.run(make_job(lab, exactly_once(), parallelism=3, rows=2000), script)
    wheres = [json.loads(e.body)["where"] for e in ran.job.events if e.kind == "failure"]
    assert wheres == killed
    assert all("worker lost" in text for text in ran.failures)


def test_a_worker_that_dies_after_its_connections_is_the_cause(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_long_for_causes(monkeypatch)

    async def script(job: Any) -> None:
        await job.checkpoint()
        worker = job.live()[0]
        for end in list(worker.hub._accepting):
            end.shut_down()
        asyncio.get_running_loop().call_later(0.05, worker.kill)
        event = await job.until("failure")
        assert json.loads(event.body)["where"] == worker.worker_id

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink), script)
    assert len(ran.failures) == 1
    assert Counter(sink.rows) == expected()


def test_a_broken_connection_alone_is_a_failure_too(lab: Any) -> None:
    """No worker is lost behind it: after a short wait the connection itself is the cause."""

    async def script(job: Any) -> None:
        await job.checkpoint()
        for end in list(job.live()[0].hub._accepting):
            end.shut_down()
        await job.until("failure")

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink), script)
    assert len(ran.failures) == 1
    assert "connection" in ran.failures[0]
    assert Counter(sink.rows) == expected()
    assert len(ran.job.cluster.workers) == 2


def test_an_old_coordinator_is_fenced(lab: Any) -> None:
    """Two coordinators on one storage: the old one must stop, and commit nothing any more."""
    old_sink, new_sink = exactly_once(), exactly_once()
    started = asyncio.Event()
    at_takeover: list[int] = []

    async def both() -> None:
        from headgate.operators.clock import SystemClock
        from headgate.runtime.cluster.launch import InProcessCluster
        from headgate.runtime.storage.open_store import open_store

        kind, over = lab.running, asyncio.Event()
        clusters = [InProcessCluster(clock=SystemClock(), open_store=open_store) for _ in "ab"]
        with lab.held(over, batches=5):
            old = kind(runnable(make_job(lab, old_sink)).spec(), clusters[0], open_store)
            await old.checkpoint()
            await old.checkpoint()
            new = kind(runnable(make_job(lab, new_sink)).spec(), clusters[1], open_store)
            await new.until("restored")
            at_takeover.append(len(old_sink.rows))
            started.set()
            with pytest.raises(FencedError):
                await old.task
            over.set()
            outcome = await new.task
        assert outcome.status == "FINISHED"
        for cluster in clusters:
            await cluster.close()

    asyncio.run(both())
    assert started.is_set()
    # The new one commits again what its checkpoint says, under the same names; sinks differ here.
    assert len(old_sink.rows) == at_takeover[0]
    total = Counter(old_sink.rows) | Counter(new_sink.rows)
    assert total == expected()
    assert len(old_sink.rows) < ROWS
