"""A job that fails or hangs does so in the test that drives it, and says where."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import BadRecordError, JobError, StateError, UsageError, UserCodeError
from headgate.runtime.storage.memory import MemoryStore
from headgate.testing import harness


def half(n: int) -> int:
    if n % 2:
        raise ValueError(f"{n} is odd")
    return n // 2


def halves() -> hg.Job:
    job = hg.Job("halves")
    job.checkpoint(every="1h", storage="never-made")
    job.restart(attempts=5)
    job.read(from_list([]), name="numbers").map(half).write(  # the user's line
        collect(guarantee="exactly_once"), name="out"
    )
    return job


@pytest.mark.parametrize("parallelism", [1, 2])
def test_an_error_of_the_users_function(parallelism: int) -> None:
    with harness(halves(), parallelism=parallelism) as h:
        h.push("numbers", 4)
        h.checkpoint()
        with pytest.raises(UserCodeError) as caught:
            h.push("numbers", 7)
        text = str(caught.value)
        assert "the function of `map` raised ValueError: 7 is odd record=`7`" in text
        assert f"{__file__.rpartition('/')[2]}:" in text
        assert ".map(half)" in text
        assert 'raise ValueError(f"{n} is odd")' in "".join(caught.value.__notes__)
        # The job is over, in spite of its restarts; what it committed is still there.
        for call in (h.settle, h.checkpoint, h.crash, h.end):
            with pytest.raises(UserCodeError, match="7 is odd"):
                call()
        assert h.drain("out") == [2]


def test_an_error_in_a_timer_surfaces_where_time_passes() -> None:
    async def late(n: int) -> int:
        await asyncio.sleep(5)
        return half(n)

    job = hg.Job("late")
    job.read(from_list([]), name="numbers").map(late).write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("numbers", 7)
        with pytest.raises(UserCodeError, match="7 is odd"):
            h.advance_time("5s")


def test_a_job_that_cannot_begin_fails_at_the_start(tmp_path: Path) -> None:
    h = harness(halves(), restore_from=tmp_path / "nowhere")
    with pytest.raises(StateError, match="no such directory"), h:
        raise AssertionError("it runs")


def stuck_job() -> hg.Job:
    async def stuck(n: int) -> int:
        await asyncio.get_running_loop().create_future()  # for ever
        return n

    job = hg.Job("stuck")
    job.checkpoint(every="1h", storage="never-made")
    job.read(from_list([]), name="numbers").map(stuck, name="call").write(
        collect(guarantee="exactly_once"), name="out"
    )
    return job


def test_a_checkpoint_that_hangs_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def append(self: Any, name: str, data: bytes) -> Any:
        await asyncio.get_running_loop().create_future()  # for ever

    with harness(halves()) as h:
        h.checkpoint()
        h.push("numbers", 2)
        monkeypatch.setattr(MemoryStore, "create_if_absent", append)
        with pytest.raises(JobError) as caught:
            h.checkpoint()
        monkeypatch.undo()
    text = str(caught.value)
    assert "the checkpoint does not complete without time passing" in text
    assert f"{__file__}:" in text
    assert "# for ever" in text


def test_a_job_that_does_not_end_says_what_it_waits_for() -> None:
    with harness(stuck_job()) as h:
        h.push("numbers", 1)
        with pytest.raises(JobError, match="the job does not end") as caught:
            h.end()
    assert "# for ever" in str(caught.value)


def test_time_goes_on_behind_a_job_that_ends_late() -> None:
    async def slowly(n: int) -> int:
        await asyncio.sleep(5_400)
        return n

    job = hg.Job("late")
    job.read(from_list([]), name="numbers").map(slowly).write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        begun = h.now
        h.push("numbers", 1)
        with pytest.raises(JobError, match="the job does not end"):
            h.end()
        h.advance_time("1h")
        assert h.drain("out") == [1]
        assert h.now - begun == timedelta(hours=2)


def test_a_job_that_hangs_can_crash() -> None:
    with harness(stuck_job(), parallelism=2) as h:
        h.checkpoint()
        h.push("numbers", 1)
        h.crash()
        assert h.pending("out") == []


def test_the_block_may_be_left_at_any_time() -> None:
    h = harness(stuck_job())
    with h:
        h.push("numbers", 1)
    for call in (h.settle, h.checkpoint, lambda: h.push("numbers", 1)):
        with pytest.raises(UsageError, match="the `with` block of the harness is over"):
            call()
    with pytest.raises(UsageError, match="used once"), h:
        pass


def test_a_record_that_does_not_fit_later_on() -> None:
    job = hg.Job("typed")
    job.read(from_list([]), name="numbers").map(lambda n: {"n": n}, into={"n": "long"}).write(
        collect(guarantee="none"), name="out"
    )
    with harness(job) as h:
        h.push("numbers", 1)
        with pytest.raises((UserCodeError, BadRecordError), match="column `n`"):
            h.push("numbers", "one")
        assert h.drain("out") == [{"n": 1}]
