"""State that is not what it was, and files that dead coordinators left behind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import StateError
from headgate.runtime.job import runnable
from headgate.tests.support.lab import stop_with_savepoint

ROWS = 9000
RATE = 600
"""Rows per second of a job that is stopped: on a slow machine too there are some left then."""


def bulk(key: int) -> bytes:
    """State that does not compress and is too large to lie in a manifest."""
    return hashlib.shake_256(str(key).encode()).digest(400)


def make_job(lab: Any, *, rate: float | None = RATE, **options: str) -> hg.Job:
    job = hg.Job("job", parallelism=2, max_parallelism=12)
    job.checkpoint(every="50ms", storage=str(lab.path), retain=2)
    job.restart(attempts=3, delay="10ms")
    runnable(job).override(
        {"execution.checkpointing.incremental": "false"}
        | {key.replace("__", "."): value for key, value in options.items()}
    )
    (
        job.read(numbers(ROWS, rate=rate, batch_rows=20, splits=6), name="numbers")
        .map(lambda n: (n, bulk(n)))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: a, name="count")
        .write(collect(guarantee="exactly_once"), name="out")
    )
    return job


async def stop(job: Any) -> None:
    for _ in range(3):
        await job.checkpoint()
    await job.request("stop")


def completed(ran: Any) -> list[int]:
    """Ids of a run's checkpoints, in order; those that were aborted leave gaps."""
    texts = [text.split() for text in ran.job.texts("checkpoint")]
    return sorted(int(words[1]) for words in texts if words[2] == "completed")


def newest_files(lab: Any, suffix: str = ".segment") -> list[Path]:
    """State files of the newest checkpoint."""
    by_checkpoint: dict[int, list[Path]] = {}
    for path in (lab.path / "job" / "chk").glob(f"*/*{suffix}"):
        by_checkpoint.setdefault(int(path.parent.name.partition("-")[2]), []).append(path)
    return by_checkpoint[max(by_checkpoint)]


def corrupt_newest(lab: Any, suffix: str = ".segment") -> None:
    path = newest_files(lab, suffix)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def test_corrupt_state_is_an_error_that_names_its_file(lab: Any) -> None:
    lab.run(make_job(lab), stop)
    corrupt_newest(lab)
    ran = lab.run(make_job(lab, rate=None))
    assert ran.outcome.status == "FAILED"
    assert isinstance(ran.outcome.error, StateError)
    assert newest_files(lab)[0].parent.name in str(ran.outcome.error)
    assert not ran.job.texts("restart")


def test_the_checkpoint_before_is_restored_if_the_user_allows_it(lab: Any) -> None:
    *_, before, last = completed(lab.run(make_job(lab), stop))
    corrupt_newest(lab)
    ran = lab.run(make_job(lab, rate=None, headgate__restore__fallback="true"))
    assert ran.outcome.status == "FINISHED"
    assert ran.restores == [before]
    (text,) = ran.job.texts("fallback")
    assert f"checkpoint {last} cannot be restored" in text


class Remembering(hg.KeyedProcess[int, int, int]):
    """Operator state too large for the manifest: the coordinator reads it when it distributes it again."""

    seen = hg.OperatorListState[bytes]()

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[int]:
        if len(self.seen.get()) < 3:
            self.seen.update([*self.seen.get(), 1000 * bulk(record)])
        yield record


def make_remembering(
    lab: Any, parallelism: int, *, rate: float | None = RATE, **options: str
) -> Any:
    job = hg.Job("job", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="50ms", storage=str(lab.path), retain=2)
    job.restart(attempts=3, delay="10ms")
    runnable(job).override({key.replace("__", "."): value for key, value in options.items()})
    (
        job.read(numbers(ROWS, rate=rate, batch_rows=20, splits=6), name="numbers")
        .key_with(lambda n: n)
        .process(Remembering(), name="remember")
        .write(collect(guarantee="exactly_once"), name="out")
    )
    return job


@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_state_that_the_coordinator_reads_itself_is_verified_too(lab: Any, damage: str) -> None:
    *_, before, last = completed(lab.run(make_remembering(lab, 2), stop))
    if damage == "corrupt":
        corrupt_newest(lab)
    else:
        newest_files(lab)[0].unlink()
    refused = lab.run(make_remembering(lab, 3, rate=None))
    error = str(refused.outcome.error)
    assert isinstance(refused.outcome.error, StateError)
    assert damage in error
    assert "operator=`remember` state=`seen`" in error
    assert ".segment" in error
    assert not refused.job.texts("restart")
    ran = lab.run(make_remembering(lab, 3, rate=None, headgate__restore__fallback="true"))
    assert ran.outcome.status == "FINISHED"
    assert ran.restores == [before]
    (text,) = ran.job.texts("fallback")
    assert f"checkpoint {last} cannot be restored" in text


def test_what_no_checkpoint_can_give_is_no_reason_to_fall_back(lab: Any) -> None:
    lab.run(make_job(lab), stop)
    job = make_remembering(lab, 2, rate=None, headgate__restore__fallback="true")
    ran = lab.run(job)
    assert isinstance(ran.outcome.error, StateError)
    assert "no operator of the job claims" in str(ran.outcome.error)
    assert not ran.job.texts("fallback")


def test_files_of_dead_coordinators_are_swept_at_the_next_start(lab: Any) -> None:
    lab.run(make_job(lab), stop)
    dead = lab.path / "job" / "chk" / "1-99"
    dead.mkdir()
    (dead / "count-0-reduce-0.parquet").write_bytes(b"of a checkpoint that never completed")

    async def look(job: Any) -> None:
        await job.until("restored")
        assert not list(dead.glob("*"))
        await job.checkpoint()

    ran = lab.run(make_job(lab), look)
    assert ran.outcome.status == "FINISHED"
    assert ran.restores


def test_a_native_savepoint_restores(lab: Any) -> None:
    taken: list[str] = []
    lab.run(make_job(lab), stop_with_savepoint(lab.path / "kept", taken, native=True))
    ran = lab.run(make_job(lab, rate=None), restore_from=taken[0])
    assert ran.outcome.status == "FINISHED"
