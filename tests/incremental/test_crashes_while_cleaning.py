"""Deaths in the sweep of orphans, an end whose deletions fail, and uploads that arrive too late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate.runtime.protocol import names


def half_way(disk: Any, call: Any) -> bool:
    """Some files of a checkpoint are written: a process that dies now leaves them behind."""
    if (call.verb, call.moment) != ("write_file", "after") or disk.counts["completed"] < 3:
        return False
    directory = call.name.rpartition("/")[0]
    return sum(name.startswith(directory + "/") for name in disk.objects) > 5


def of_new_coordinator(verb: str, moment: str) -> Any:
    """The first such call of the coordinator that took over: the sweep is what it begins with."""

    def when(disk: Any, call: Any) -> bool:
        coordinators = [process for process in disk.processes if process.role == "coordinator"]
        return call.process is coordinators[-1] and (call.verb, call.moment) == (verb, moment)

    return when


SWEEPS = {
    "before the sweep lists": of_new_coordinator("list_files", "before"),
    "before it deletes": of_new_coordinator("delete_files", "before"),
    "while it deletes": of_new_coordinator("delete_files", "after"),
    "before it removes what is half written": of_new_coordinator("delete_incomplete", "before"),
}


def finish(lab: Any, goods: Any) -> None:
    """Run the job to its end: output and storage are exact."""
    ran = lab.run(goods.job(hurried=True))
    assert ran.outcome.status == "FINISHED", ran.failures
    goods.check()
    assert not lab.disk.violations
    assert not lab.disk.retained()
    assert not lab.disk.unreachable()


@pytest.mark.parametrize("victim", ["coordinator", "everybody"])
@pytest.mark.parametrize("point", SWEEPS)
def test_a_death_in_a_sweep(lab: Any, shop: Any, strike: Any, point: str, victim: str) -> None:
    goods = shop()
    strikes = [strike(half_way, "everybody"), strike(SWEEPS[point], victim)]
    lab.disk.strikes = list(strikes)
    orphans: list[set[str]] = []

    async def script(job: Any) -> None:
        await job.execute(strikes[0])
        orphans.append(lab.disk.unreachable())
        await job.execute(strikes[1])
        await job.until("restored")
        assert not orphans[0] & lab.disk.objects.keys()
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(goods.job(), script)
    assert ran.outcome.status == "SUSPENDED", ran.failures
    assert orphans[0]
    assert not lab.disk.unreachable()
    finish(lab, goods)


def test_an_upload_that_arrives_after_its_writer_died_and_was_swept_behind(
    lab: Any, shop: Any, strike: Any
) -> None:
    goods, blow = shop(), strike(half_way, "everybody")
    lab.disk.strikes = [blow]

    async def script(job: Any) -> None:
        await job.execute(blow)
        await job.until("restored")
        generation, _ = names.checkpoint_of(blow.call.name)
        assert generation < job.coordinator._context.env.generation
        assert blow.call.name not in lab.disk.objects
        lab.disk.objects[blow.call.name] = b"late"
        for _ in range(2):
            await job.checkpoint()
        assert blow.call.name in lab.disk.objects
        await job.request("stop")

    assert lab.run(goods.job(), script).outcome.status == "SUSPENDED"
    assert not lab.disk.unreachable()
    finish(lab, goods)


def behind_the_end(verb: str) -> Any:
    """The end of the job is in the log; its coordinator only has to tidy up."""

    def when(disk: Any, call: Any) -> bool:
        ended = any(type(entry).__name__ == "JobEnded" for entry in disk.entries.values())
        return ended and (call.verb, call.moment) == (verb, "after")

    return when


@pytest.mark.parametrize("verb", ["create_if_absent", "put", "delete_files", "delete_incomplete"])
def test_a_death_behind_the_end_of_a_job_that_has_finished(
    lab: Any, shop: Any, strike: Any, verb: str
) -> None:
    """The successor of the same run does not begin again: it tidies up."""
    goods, blow = shop(), strike(behind_the_end(verb), "coordinator")
    lab.disk.strikes = [blow]

    async def script(job: Any) -> None:
        job.over.set()
        await job.execute(blow)

    ran = lab.run(goods.job(hurried=True), script)
    assert ran.outcome.status == "FINISHED"
    assert not ran.restores
    goods.check()
    assert not lab.disk.violations
    assert not lab.disk.retained()
    assert not lab.disk.unreachable()


@pytest.mark.parametrize(("verb", "status"), [("stop", "SUSPENDED"), ("cancel", "CANCELED")])
def test_a_death_behind_the_end_of_a_job_that_somebody_ended(
    lab: Any, shop: Any, strike: Any, verb: str, status: str
) -> None:
    """The successor does not bring it back to life; the next run does."""
    goods, blow = shop(), strike(behind_the_end("create_if_absent"), "coordinator")
    lab.disk.strikes = [blow]

    async def script(job: Any) -> None:
        await job.checkpoint()
        asking = asyncio.ensure_future(job.request(verb))
        await job.execute(blow)
        await asyncio.gather(asking, return_exceptions=True)

    ran = lab.run(goods.job(), script)
    assert ran.outcome.status == status
    assert not ran.restores
    assert len(lab.disk.retained()) == 1
    assert not lab.disk.unreachable()
    finish(lab, goods)


def test_a_run_that_has_ended_stays_so_however_many_coordinators_die(
    lab: Any, shop: Any, strike: Any
) -> None:
    """The second dies when its start is in the log behind the end, and the end not yet behind that."""
    goods = shop()

    def restarted(disk: Any, call: Any) -> bool:
        return call.moment == "after" and type(call.entry).__name__ == "GenerationStarted"

    blows = [
        strike(behind_the_end("delete_incomplete"), "coordinator"),
        strike(restarted, "coordinator"),
    ]
    lab.disk.strikes = list(blows)

    async def script(job: Any) -> None:
        job.over.set()
        for blow in blows:
            await job.execute(blow)

    assert lab.run(goods.job(hurried=True), script).outcome.status == "FINISHED"
    goods.check()
    assert not lab.disk.unreachable()
