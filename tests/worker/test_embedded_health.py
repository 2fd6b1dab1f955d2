"""A job on an embedded Ray ends when that Ray dies, and with nothing else of it."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.errors import JobError
from headgate.runtime.cluster.embedded import embedded_ray, while_ray_lives


def ray_with(dead: list[str]) -> Any:
    node = SimpleNamespace(dead_processes=lambda: [(kind, None) for kind in dead])
    return SimpleNamespace(_global_node=node)


async def for_ever(ended: list[bool]) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        ended.append(True)


@pytest.mark.parametrize("vital", ["raylet", "gcs_server"])
def test_the_job_ends_with_its_ray(vital: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.worker", ray_with(["log_monitor", vital]))
    ended: list[bool] = []

    async def main() -> None:
        # It has begun when it is cancelled, as a job has.
        following = asyncio.ensure_future(for_ever(ended))
        await asyncio.sleep(0)

        async def follow() -> None:
            await following

        await while_ray_lives(follow())

    with pytest.raises(JobError, match=f"process=`{vital}`"):
        asyncio.run(main())
    assert ended == [True]


@pytest.mark.parametrize("worker", [ray_with(["log_monitor"]), SimpleNamespace(), None])
def test_it_goes_on_otherwise(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.worker", worker)

    async def job() -> str:
        await asyncio.sleep(0)
        return "done"

    assert asyncio.run(while_ray_lives(job())) == "done"


def test_a_failure_of_the_job_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.worker", ray_with([]))

    async def job() -> None:
        raise JobError("its own")

    with pytest.raises(JobError, match="its own"):
        asyncio.run(while_ray_lives(job()))


@pytest.mark.parametrize("error", [RuntimeError("no raylet"), TimeoutError("gcs"), OSError("disk")])
def test_a_ray_that_does_not_start_is_an_error_with_a_way_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    def init(**_: object) -> None:
        raise error

    ray = SimpleNamespace(init=init, shutdown=lambda: stopped.append(True))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(JobError, match="the embedded Ray did not start") as raised, embedded_ray():
        pass
    assert "--cluster in-process" in raised.value.fix
    assert stopped == [True]
