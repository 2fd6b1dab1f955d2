"""The life of a savepoint: taken, moved, restored, forked, claimed, deleted; and what it never does."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import JobError, StateError, UsageError
from headgate.runtime.job import runnable
from headgate.runtime.storage.open_store import open_store_at
from headgate.tests.support.lab import stop_with_savepoint

ROWS = 1200
KEYS = 50


def make_job(
    lab: Any,
    sink: Any,
    *,
    parallelism: int = 2,
    name: str = "job",
    rate: float | None = 500,
    storage: bool = True,
    groups: int | None = 12,
    counter: str = "count",
) -> hg.Job:
    job = hg.Job(name, parallelism=parallelism, max_parallelism=groups)
    if storage:
        job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=5, delay="10ms")
    (
        job.read(numbers(ROWS, rate=rate, batch_rows=20, splits=6), name="numbers")
        .map(lambda n: (n % KEYS, 1))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1]), name=counter)
        .write(sink, name="out")
    )
    return job


def expected() -> Counter[tuple[int, int]]:
    """One output per record: the k-th of a key counts k."""
    return Counter((n % KEYS, n // KEYS + 1) for n in range(ROWS))


def exactly_once() -> Any:
    return collect(guarantee="exactly_once")


def savepoints_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*/_metadata"))


def test_a_job_goes_on_after_a_savepoint_which_is_none_of_its_checkpoints(
    lab: Any, retained: Any
) -> None:
    taken: list[dict[str, Any]] = []

    async def script(job: Any) -> None:
        await job.checkpoint()
        taken.append(await job.request("savepoint", savepoint=str(lab.path)))
        await job.checkpoint()
        await job.request("stop")

    sink = exactly_once()
    job = make_job(lab, sink)
    runnable(job).override({"execution.checkpointing.num-retained": "100"})
    ran = lab.run(job, script)
    assert ran.outcome.status == "SUSPENDED"
    ids = [logged.checkpoint_id for logged in retained("job").checkpoints]
    assert ids[0] < taken[0]["checkpoint"] < ids[-1]
    assert taken[0]["checkpoint"] not in ids
    assert Path(taken[0]["savepoint"], "_metadata").is_file()
    lab.run(make_job(lab, sink, rate=None))
    assert Counter(sink.rows) == expected()


def test_stop_with_savepoint_moved_and_restored_at_another_parallelism(lab: Any) -> None:
    sink, taken = exactly_once(), []
    ran = lab.run(make_job(lab, sink), stop_with_savepoint(lab.path, taken), batches=5)
    assert ran.outcome.status == "SUSPENDED"
    before = len(sink.rows)
    assert 0 < before < ROWS
    assert all(any(path.iterdir()) for path in Path(taken[0]).rglob("*") if path.is_dir())
    assert not Path(taken[0], "probe").exists()
    moved = lab.path / "elsewhere" / "kept"
    shutil.copytree(taken[0], moved)
    shutil.rmtree(taken[0])
    again = lab.run(make_job(lab, sink, parallelism=3, rate=None), restore_from=str(moved))
    assert again.outcome.status == "FINISHED"
    assert any("savepoint" in text for text in again.job.texts("restored"))
    assert Counter(sink.rows) == expected()
    assert (moved / "_metadata").is_file()  # nobody claimed it


def test_two_jobs_from_one_savepoint(lab: Any) -> None:
    sink, taken = exactly_once(), []
    lab.run(make_job(lab, sink), stop_with_savepoint(lab.path, taken))
    behind = expected() - Counter(sink.rows)
    for name in ("one", "two"):
        fork = exactly_once()
        ran = lab.run(make_job(lab, fork, name=name, rate=None), restore_from=taken[0])
        assert ran.outcome.status == "FINISHED"
        assert behind - Counter(fork.rows) == Counter()
        assert Counter(fork.rows) <= expected()


def test_what_a_savepoint_has_pending_and_what_comes_behind_it_are_both_kept(lab: Any) -> None:
    """The new job's first portion has the number that the old one's only portion had."""
    first, second, taken = exactly_once(), exactly_once(), []

    async def script(job: Any) -> None:
        # Until the job is deployed its status has no vertices.
        while not ((await job.status()).get("vertices") or [{}, {"records_in": 0}])[1][
            "records_in"
        ]:
            await job.tick()
        taken.append((await job.request("savepoint", savepoint=str(lab.path)))["savepoint"])
        await job.request("cancel")

    job = make_job(lab, first)
    runnable(job).override({"execution.checkpointing.interval": "1h"})
    lab.run(job, script)
    lab.run(make_job(lab, second, name="fork", rate=None), restore_from=taken[0])
    assert Counter(second.rows) == expected()


def test_a_claimed_savepoint_is_deleted_behind_the_first_checkpoint(lab: Any) -> None:
    sink, taken = exactly_once(), []
    lab.run(make_job(lab, sink), stop_with_savepoint(lab.path, taken))

    async def script(job: Any) -> None:
        await job.until("disposed")

    lab.run(make_job(lab, sink), script, restore_from=taken[0], claim=True)
    assert not Path(taken[0]).exists()
    assert Counter(sink.rows) == expected()


def test_a_restart_before_the_first_checkpoint_restores_the_savepoint_again(lab: Any) -> None:
    sink, taken = exactly_once(), []
    lab.run(make_job(lab, sink), stop_with_savepoint(lab.path, taken))
    job = make_job(lab, sink)
    runnable(job).override({"execution.checkpointing.interval": "1h"})

    async def script(running: Any) -> None:
        await running.until("restored")
        await running.crash_coordinator()
        await running.until("restored")
        running.live()[0].kill()
        await running.until("restored")

    ran = lab.run(job, script, restore_from=taken[0])
    assert len(set(ran.restores)) == 1
    assert Counter(sink.rows) == expected()


def test_a_run_from_a_savepoint_that_got_nowhere_is_not_followed_by_an_empty_one(lab: Any) -> None:
    sink, taken = exactly_once(), []
    lab.run(make_job(lab, sink), stop_with_savepoint(lab.path, taken))
    for name in ("job", "fork"):  # with and without checkpoints of before
        failed = lab.run(make_job(lab, sink, groups=13, name=name), restore_from=taken[0])
        assert failed.outcome.status == "FAILED"
        with pytest.raises(UsageError, match="completed no checkpoint") as refused:
            lab.run(make_job(lab, sink, name=name))
        assert f"--from {taken[0]}, or --fresh" in str(refused.value)
    again = lab.run(make_job(lab, sink), stop_with_savepoint(lab.path, []), restore_from=taken[0])
    assert again.outcome.status == "SUSPENDED"
    resumed = lab.run(make_job(lab, sink, rate=None))
    assert resumed.restores == [again.outcome.checkpoint]
    assert Counter(sink.rows) == expected()
    assert lab.run(make_job(lab, exactly_once(), name="fork"), fresh=True).restores == []


def test_drain_ends_the_data_and_then_the_job(lab: Any) -> None:
    sink, taken = exactly_once(), []
    stop = stop_with_savepoint(lab.path, taken, drain=True)
    ran = lab.run(make_job(lab, sink), stop, batches=5)
    assert ran.outcome.status == "SUSPENDED"
    assert Path(taken[0], "_metadata").is_file()
    assert 0 < len(sink.rows) < ROWS


def test_a_savepoint_that_cannot_be_written_is_refused_and_the_job_goes_on(lab: Any) -> None:
    blocked = lab.path / "blocked"
    blocked.write_text("a file, not a directory")

    async def script(job: Any) -> None:
        await job.checkpoint()
        with pytest.raises(JobError, match="no savepoint was taken"):
            await job.request("savepoint", savepoint=str(blocked))
        await job.checkpoint()

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink), script)
    assert ran.outcome.status == "FINISHED"
    assert not ran.failures
    assert Counter(sink.rows) == expected()


def test_a_stop_whose_savepoint_fails_leaves_no_half_stopped_job(lab: Any) -> None:
    blocked = lab.path / "blocked"
    blocked.write_text("a file, not a directory")

    async def script(job: Any) -> None:
        await job.checkpoint()
        with pytest.raises(JobError, match="no savepoint was taken"):
            await job.request("stop", savepoint=str(blocked))
        await job.until("restored")

    sink = exactly_once()
    ran = lab.run(make_job(lab, sink), script)
    assert ran.outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def test_a_job_without_checkpoint_storage_takes_savepoints_all_the_same(lab: Any) -> None:
    taken: list[str] = []

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        await job.tick()
        done = await job.request("stop", savepoint=str(lab.path))
        assert done["reason"] == f"stopped with savepoint {done['savepoint']}"
        assert not done["checkpoint"], "there is none to resume from"
        taken.append(done["savepoint"])

    first, second = collect(guarantee="none"), collect(guarantee="none")
    ran = lab.run(make_job(lab, first, storage=False), script)
    assert ran.outcome.status == "SUSPENDED"
    assert first.rows
    again = lab.run(make_job(lab, second, storage=False, rate=None), restore_from=taken[0])
    assert again.outcome.status == "FINISHED"
    assert Counter(first.rows) + Counter(second.rows) == expected()


def test_without_a_directory_a_savepoint_is_refused(lab: Any) -> None:
    async def script(job: Any) -> None:
        await job.checkpoint()
        with pytest.raises(UsageError, match="nobody says where"):
            await job.request("savepoint")

    lab.run(make_job(lab, exactly_once()), script)


def test_key_groups_are_adopted_unless_the_user_says_otherwise(lab: Any) -> None:
    sink, taken = exactly_once(), []
    lab.run(make_job(lab, sink), stop_with_savepoint(lab.path, taken))
    refused = lab.run(make_job(lab, sink, groups=13), restore_from=taken[0])
    assert isinstance(refused.outcome.error, StateError)
    assert "checkpoint=`12` job=`13`" in str(refused.outcome.error)
    wide = lab.run(make_job(lab, sink, groups=None, parallelism=13), restore_from=taken[0])
    assert wide.outcome.status == "FAILED"
    assert "max_parallelism=`12`" in str(wide.outcome.error)
    adopted = lab.run(make_job(lab, sink, groups=None, rate=None), restore_from=taken[0])
    assert adopted.outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def test_key_groups_nobody_set_are_those_of_the_first_checkpoint(lab: Any) -> None:
    sink, taken = exactly_once(), []
    lab.run(make_job(lab, sink, groups=None), stop_with_savepoint(lab.path, taken))
    for restore_from in (None, taken[0]):
        wide = lab.run(make_job(lab, sink, groups=None, parallelism=200), restore_from=restore_from)
        assert wide.outcome.status == "FAILED"
        error = str(wide.outcome.error)
        assert "parallelism=`200` max_parallelism=`128`" in error
        assert "lower the parallelism, or start the job fresh with more key groups" in error
        other = lab.run(make_job(lab, sink, groups=129), restore_from=restore_from)
        assert isinstance(other.outcome.error, StateError)
        assert "checkpoint=`128` job=`129`" in str(other.outcome.error)
        assert "set pipeline.max-parallelism to 128, or to nothing" in str(other.outcome.error)
        for ran in (wide, other):
            assert not ran.job.texts("restart")
            assert not ran.job.cluster.workers  # found out before anything was started
    same = lab.run(make_job(lab, sink, groups=128, rate=None), restore_from=taken[0])
    assert same.outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def checkpointed(lab: Any) -> tuple[Path, int]:
    """A stopped job: the directory of its checkpoints, and the number of the last."""

    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.request("stop")

    job = make_job(lab, exactly_once())
    runnable(job).override({"execution.checkpointing.dir": str(lab.path / "checkpoints")})
    ran = lab.run(job, stop)
    return lab.path / "checkpoints" / "job", ran.outcome.checkpoint


def test_a_checkpoint_of_another_job_can_be_restored_by_its_number(lab: Any) -> None:
    source, last = checkpointed(lab)
    fork = exactly_once()
    again = lab.run(make_job(lab, fork, name="fork", rate=None), restore_from=f"{source}@{last}")
    assert again.outcome.status == "FINISHED"
    assert again.restores == [last]
    missing = lab.run(make_job(lab, fork, name="other"), restore_from=f"{source}@{last + 99}")
    assert isinstance(missing.outcome.error, StateError)


def test_a_checkpoint_cannot_be_claimed(lab: Any) -> None:
    storage, last = checkpointed(lab)
    for path in (f"{storage}", f"{storage}@{last}"):
        ran = lab.run(make_job(lab, exactly_once(), name="fork"), restore_from=path, claim=True)
        assert isinstance(ran.outcome.error, UsageError)
        assert "only a savepoint can be claimed" in str(ran.outcome.error)
        assert "--claim-mode" in str(ran.outcome.error)
        assert not ran.job.texts("restart")
    assert (storage / "log").is_dir()


def test_there_must_be_something_to_claim(lab: Any) -> None:
    with pytest.raises(UsageError, match="nothing to claim"):
        runnable(make_job(lab, exactly_once())).spec(claim=True)
    unused = make_job(lab, exactly_once())
    runnable(unused).override({"execution.state-recovery.claim-mode": "CLAIM"})
    runnable(unused).spec()  # as an option it is only what holds if something is restored


@pytest.mark.parametrize("where", ["nothing", "empty"])
def test_what_is_no_savepoint_is_refused(lab: Any, where: str) -> None:
    (lab.path / "empty").mkdir()
    ran = lab.run(make_job(lab, exactly_once()), restore_from=str(lab.path / where))
    assert isinstance(ran.outcome.error, StateError)
    assert not ran.job.texts("restart")
    assert open_store_at(str(lab.path), {}).describe() == str(lab.path)


def test_a_relative_directory_for_savepoints_is_meant_from_where_the_job_is_started(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run elsewhere: each would write its part of the savepoint somewhere else."""
    monkeypatch.chdir(lab.path)
    key = "execution.checkpointing.savepoint-dir"
    for said, meant in (("kept", str(lab.path / "kept")), ("s3://bucket/kept", "s3://bucket/kept")):
        job = make_job(lab, exactly_once())
        runnable(job).override({key: said})
        assert runnable(job).spec().options[key] == meant
    assert key not in runnable(make_job(lab, exactly_once())).spec().options
