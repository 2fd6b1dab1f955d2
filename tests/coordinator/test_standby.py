"""A process that stands by leads as soon as the leader is gone, or seems to be."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headgate.connectors import collect
from headgate.errors import FencedError
from headgate.operators.clock import SystemClock
from headgate.runtime.cluster.standby import Standby, StandbyAnswer
from headgate.runtime.options.registry import Options
from headgate.runtime.protocol.standby import Turn
from headgate.runtime.rest.server import RestServer

from .test_adoption_jobs import Succession, check_exact, make_job


def stand_by(job: Any, turns: list[Turn] | None = None, *, silent_max_ms: int = 60_000) -> Standby:
    """Beside the coordinator of `job`, which answers truly, or says these things first."""

    async def ask() -> StandbyAnswer:
        if turns:
            return StandbyAnswer(turns.pop(0))
        return StandbyAnswer(Turn.LEADS, job.coordinator.rest_addresses)

    return Standby(
        ask,
        job.coordinator.server.token,
        SystemClock(),
        first=False,
        restarted=False,
        interval_ms=10,
        silent_max_ms=silent_max_ms,
    )


async def listen(job: Any, tmp_path: Path, make: type[RestServer] = RestServer) -> RestServer:
    """Open the REST API of a coordinator."""
    coordinator = job.coordinator
    rest = make(coordinator.clients, coordinator.server.token, Options({}), SystemClock())
    await rest.listen_unix(str(tmp_path / "leader.sock"))
    coordinator.rest_addresses = rest.addresses
    return rest


async def follow_the_lost(job: Any, waiting: asyncio.Task[bool]) -> dict[str, Any]:
    """It is our turn: what becomes of the attempt."""
    assert await waiting
    succession = Succession(job)
    succession.follow()
    return await succession.taken_over()


def test_a_leader_that_dies_is_followed_at_once(lab: Any, tmp_path: Path) -> None:
    sink = collect(guarantee="exactly_once")
    found: list[Any] = []

    async def script(job: Any) -> None:
        rest = await listen(job, tmp_path)
        waiting = asyncio.ensure_future(stand_by(job, [Turn.STANDS_BY, Turn.SILENT]).wait())
        await job.checkpoint()
        while not job.coordinator.clients.followed:
            await job.tick()
        assert not waiting.done()
        old = job.coordinator
        old._pool.abandon()
        job.task.cancel()
        await asyncio.gather(job.task, return_exceptions=True)
        await rest.close()
        found.append(await follow_the_lost(job, waiting))
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(make_job(lab, sink), script)
    assert found[0]["adopted"]
    assert ran.restores == ran.failures == []
    check_exact(sink)


def test_a_leader_that_is_wrongly_taken_for_dead_harms_nothing(lab: Any, tmp_path: Path) -> None:
    """Its connection breaks, and nothing else. It is fenced, and stands by for its successor."""
    sink = collect(guarantee="exactly_once")
    found: list[Any] = []

    async def script(job: Any) -> None:
        rest = await listen(job, tmp_path)
        standby = stand_by(job)
        waiting = asyncio.ensure_future(standby.wait())
        await job.checkpoint()
        while not job.coordinator.clients.followed:
            await job.tick()
        old, task = job.coordinator, job.task
        await rest.close()
        found.append(await follow_the_lost(job, waiting))
        with pytest.raises(FencedError):
            await task
        assert await stand_by(job).is_fenced_by_other()
        await old.close()
        await job.checkpoint()
        await job.request("stop")

    ran = lab.run(make_job(lab, sink), script)
    assert found[0]["adopted"]
    assert ran.restores == ran.failures == []
    check_exact(sink)


@pytest.mark.parametrize("handler", ["_get_healthz", "_get_status"])
def test_a_leader_that_hangs_is_followed(lab: Any, tmp_path: Path, handler: str) -> None:
    """Before it has answered anything, or later."""

    async def script(job: Any) -> None:
        never = asyncio.Event()

        async def hang(*_: Any) -> web.Response:
            await never.wait()
            return web.Response()

        rest = await listen(job, tmp_path, type("Hangs", (RestServer,), {handler: hang}))
        await job.checkpoint()
        assert await stand_by(job, silent_max_ms=50).wait()
        never.set()
        await rest.close()
        await job.request("stop")

    lab.run(make_job(lab, collect(guarantee="exactly_once")), script)


@pytest.mark.parametrize("fenced", [False, True])
def test_nobody_stands_by_for_a_job_that_has_ended(lab: Any, tmp_path: Path, fenced: bool) -> None:
    """Or that a run has taken which is not of this pair."""

    async def script(job: Any) -> None:
        rest = await listen(job, tmp_path)
        turns: list[Turn] = []
        waiting = asyncio.ensure_future(stand_by(job, turns).wait())
        await job.checkpoint()
        while not job.coordinator.clients.followed:
            await job.tick()
        turns.append(Turn.OVER)
        if fenced:
            job.coordinator._leadership.lose(FencedError("another run"))
            with contextlib.suppress(FencedError):
                await job.task
            Succession(job).follow()
            await job.until("adopted")
        else:
            await job.request("stop")
        assert not await waiting
        await rest.close()
        if fenced:
            await job.request("stop")

    lab.run(make_job(lab, collect(guarantee="exactly_once")), script)
