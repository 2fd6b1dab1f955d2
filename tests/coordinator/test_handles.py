"""Handles of jobs, and jobs in an event loop that runs already.

Method: real jobs in this process, in a thread each; nothing is waited for but what a job says.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list, generator, json_sink
from headgate.errors import FencedError, HeadgateError, JobError, JobNotFound, UsageError
from headgate.runtime.control.job_client import HungUp
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.runtime.storage.joblog_store import JobLog


def endless(tmp_path: Path, name: str = "endless", *, checkpoints: bool = True) -> hg.Job:
    job = hg.Job(name)
    if checkpoints:
        job.checkpoint(every="1h", storage=tmp_path / "checkpoints")
    numbers = job.read(generator({"n": "sequence"}, rate=1000, batch_rows=50), name="numbers")
    numbers.key_by("n").agg(count=hg.count(), name="counts").write(blackhole(), name="out")
    return job


def broken(tmp_path: Path) -> hg.Job:
    job = hg.Job("broken", options={"restart-strategy.type": "none"})

    def fail(row: Any) -> Any:
        raise ValueError("no")

    job.read(from_list([{"n": 1}]), name="numbers").map(fail).write(blackhole(), name="out")
    return job


@pytest.fixture(autouse=True)
def own_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path / "run"))


def until_running(handle: hg.JobHandle) -> None:
    for _ in range(2_000):
        if handle.status()["status"] == "RUNNING":
            return
        time.sleep(0.03)
    raise AssertionError("it does not begin to run")


def test_a_handle_does_what_the_command_line_does(tmp_path: Path) -> None:
    handle = endless(tmp_path).start()
    until_running(handle)
    assert handle.status()["run"] == handle.run_id
    assert handle.checkpoint() == 1
    assert Path(handle.savepoint(tmp_path / "kept")).parent == tmp_path / "kept"
    handle.rescale(2)
    assert handle.status()["parallelism"] == 2
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.01)

    outcome = handle.stop()
    assert (outcome.status, outcome.run) == ("SUSPENDED", handle.run_id)
    assert outcome.checkpoint > 1
    assert 0 < outcome.began_ms < outcome.ended_ms
    assert handle.wait() == outcome
    assert handle.status()["status"] == "SUSPENDED"
    with pytest.raises(JobNotFound, match="the job has ended"):
        handle.checkpoint()


def test_the_block_of_a_handle_stops_the_job(tmp_path: Path) -> None:
    with endless(tmp_path).start() as handle:
        until_running(handle)
    assert handle.wait().status == "SUSPENDED"


def test_stop_and_cancel_of_a_job_that_has_ended_return_its_end(tmp_path: Path) -> None:
    job = hg.Job("short")
    job.read(from_list([{"n": 1}]), name="numbers").write(blackhole(), name="out")
    handle = job.start()
    assert handle.wait().status == "FINISHED"
    assert handle.stop() == handle.cancel() == handle.wait()


def test_stop_and_cancel_of_a_job_that_has_failed_raise_its_error(tmp_path: Path) -> None:
    handle = broken(tmp_path).start()
    for end in (handle.wait, handle.stop, handle.cancel):
        with pytest.raises(HeadgateError, match="ValueError: no"):
            end()


class EndsWhileItIsAsked:
    """A job whose coordinator closes before it has answered."""

    def __init__(self) -> None:
        self.ended = False

    async def connect(self) -> Any:
        self.ended = True
        raise HungUp

    async def outcome(self) -> JobOutcome | None:
        return JobOutcome("FAILED", "ValueError: no") if self.ended else None

    async def over(self) -> None:
        await asyncio.Event().wait()


def test_the_status_of_a_job_that_ends_while_it_is_asked_is_its_end() -> None:
    status = hg.JobHandle("brief", "run-1", EndsWhileItIsAsked()).status()
    assert (status["name"], status["status"], status["reason"]) == (
        "brief",
        "FAILED",
        "ValueError: no",
    )


class RefusesAsItEnds:
    """A job whose coordinator has just ended it, which the handle does not know yet."""

    def __init__(self) -> None:
        self.refused = False

    async def connect(self) -> Any:
        return self

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        self.refused = True
        raise JobError("the job has ended")

    async def close(self) -> None:
        pass

    async def outcome(self) -> JobOutcome | None:
        return JobOutcome("FAILED", "ValueError: no") if self.refused else None

    async def over(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("verb", ["stop", "cancel"])
def test_a_job_that_ends_before_it_is_stopped_tells_how(verb: str) -> None:
    handle = hg.JobHandle("brief", "run-1", RefusesAsItEnds())
    with pytest.raises(JobError, match="the job failed: ValueError: no"):
        getattr(handle, verb)()


def use_until_it_fails(job: hg.Job, error: Exception | None = None) -> None:
    with job.start() as handle:
        while handle.status()["status"] != "FAILED":
            time.sleep(0.01)
        if error is not None:
            raise error


def test_the_end_of_the_block_raises_the_error_of_a_job_that_has_failed(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="ValueError: no"):
        use_until_it_fails(broken(tmp_path))


def test_an_error_of_the_block_wins_over_that_of_the_job(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        use_until_it_fails(broken(tmp_path), KeyError("mine"))


def test_cancel_takes_no_checkpoint(tmp_path: Path) -> None:
    handle = endless(tmp_path).start()
    until_running(handle)
    outcome = handle.cancel()
    assert (outcome.status, outcome.checkpoint) == ("CANCELED", 0)


def test_a_job_that_fails_raises_where_it_is_waited_for(tmp_path: Path) -> None:
    handle = broken(tmp_path).start()
    with pytest.raises(HeadgateError, match="ValueError: no"):
        handle.wait()


def test_a_job_that_cannot_begin_raises_at_the_start(tmp_path: Path) -> None:
    first = endless(tmp_path).start()
    until_running(first)
    with pytest.raises(UsageError, match="the job runs already"):
        endless(tmp_path).start()
    assert first.stop().status == "SUSPENDED"


def test_a_job_that_runs_is_found_by_name_and_by_its_storage(tmp_path: Path) -> None:
    handle = endless(tmp_path).start(run_id="run-7")
    until_running(handle)
    for where in ({}, {"storage": tmp_path / "checkpoints"}):
        found = hg.attach("endless", **where)
        assert (found.run_id, found.status()["status"]) == ("run-7", "RUNNING")
    assert found.stop().status == "SUSPENDED"
    assert handle.wait().run == "run-7"
    with pytest.raises(JobNotFound, match="its last run ended as SUSPENDED"):
        hg.attach("endless", storage=tmp_path / "checkpoints")
    with pytest.raises(JobNotFound, match="no such job runs on this machine"):
        hg.attach("endless")


def test_in_an_event_loop_run_says_what_to_write_instead(tmp_path: Path) -> None:
    job = hg.Job("small")
    job.read(from_list([{"n": 1}, {"n": 2}]), name="numbers").write(blackhole(), name="out")

    async def notebook() -> hg.JobOutcome:
        with pytest.raises(UsageError, match="event loop") as refused:
            job.run()
        assert "await job.run_async(...)" in refused.value.fix
        assert "job.start(...)" in refused.value.fix
        return await job.run_async()

    assert asyncio.run(notebook()).status == "FINISHED"


def test_handles_work_in_an_event_loop(tmp_path: Path) -> None:
    async def notebook() -> hg.JobOutcome:
        handle = endless(tmp_path).start()
        until_running(handle)
        return handle.stop()

    assert asyncio.run(notebook()).status == "SUSPENDED"


def test_a_failed_run_raises_in_an_event_loop_too(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="ValueError: no"):
        asyncio.run(broken(tmp_path).run_async())


def test_a_run_is_handed_over_in_time_though_its_checkpoint_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    job = endless(tmp_path)
    job.options["headgate.shutdown.grace"] = "100ms"
    handle = job.start(run_id="a")
    until_running(handle)
    with monkeypatch.context() as patched:
        patched.setattr(JobLog, "complete_checkpoint", hang)
        assert handle._ask("hand-over")["status"] == "HANDED_OVER"
    outcome = handle.wait()
    assert (outcome.status, outcome.checkpoint, outcome.run) == ("HANDED_OVER", 0, "a")

    again = endless(tmp_path).start(run_id="a")
    until_running(again)
    assert again.stop().status == "SUSPENDED"


def test_a_run_without_checkpoints_is_handed_over_at_once(tmp_path: Path) -> None:
    handle = endless(tmp_path, checkpoints=False).start()
    until_running(handle)
    assert handle._ask("hand-over")["status"] == "HANDED_OVER"
    outcome = handle.wait()
    assert (outcome.status, outcome.checkpoint, outcome.restarts) == ("HANDED_OVER", 0, 0)


@pytest.mark.parametrize(
    ("run_id", "text"), [("", "not a run id"), ("a b", "not a run id"), ("x" * 129, "not a run id")]
)
def test_run_ids_are_plain(tmp_path: Path, run_id: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        endless(tmp_path).run(run_id=run_id)


def test_a_run_id_needs_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a run id needs checkpoints"):
        broken(tmp_path).run(run_id="a")


def test_a_run_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    job = hg.Job("small")
    job.checkpoint(every="1h", storage=tmp_path / "checkpoints")
    job.read(from_list([{"n": 1}]), name="numbers").write(blackhole(), name="out")
    first = job.run(run_id="a")
    again = job.run(run_id="a")
    assert (again.status, again.run, again.ended_ms) == ("FINISHED", "a", first.ended_ms)
    assert job.run(run_id="b").run == "b"
    with pytest.raises(FencedError, match="another run of the job has begun since"):
        job.run(run_id="a")


def test_a_run_that_has_ended_is_not_refused_for_its_own_output(tmp_path: Path) -> None:
    """Its checkpoints are deleted by then, so the log does not say any more that it was deployed."""
    job = hg.Job("small")
    job.checkpoint(every="1h", storage=tmp_path / "checkpoints")
    rows = job.read(from_list([{"n": 1}], schema={"n": "int64"}), name="numbers")
    rows.write(json_sink(tmp_path / "out", guarantee="exactly_once"), name="out")
    first = job.run(run_id="a")
    again = job.run(run_id="a")
    assert (again.status, again.run, again.ended_ms) == ("FINISHED", "a", first.ended_ms)
    with pytest.raises(UsageError, match="1 file of earlier runs"):
        job.run(run_id="b")


class DiesBehindTheEnd:
    """A job whose coordinator ends it as asked, and dies before it answers; or dies without ending it."""

    def __init__(self, ends: bool) -> None:
        self._ends, self._asked = ends, False

    async def connect(self) -> Any:
        return self

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        self._asked = True
        raise HungUp

    async def close(self) -> None:
        """Nothing is open."""

    async def outcome(self) -> JobOutcome | None:
        return JobOutcome("CANCELED", "") if self._ends and self._asked else None

    async def over(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("verb", ["stop", "cancel"])
def test_a_job_that_ended_as_asked_before_its_coordinator_died_has_ended(verb: str) -> None:
    ask = getattr(hg.JobHandle("job", "run", DiesBehindTheEnd(ends=True)), verb)
    assert ask().status == "CANCELED"
    with pytest.raises(HeadgateError, match="hung up"):
        getattr(hg.JobHandle("job", "run", DiesBehindTheEnd(ends=False)), verb)()
