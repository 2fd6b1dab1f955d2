"""Goal: a profile shows what a subtask runs, what it waits for, and who has its thread instead."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.errors import JobNotReady, UsageError
from headgate.runtime.control.messages import ProfileAnswer, StateOutcome, TakeProfile
from headgate.runtime.rest.routes import ROUTES
from headgate.runtime.worker import profiler
from headgate.runtime.worker.deployment import RunningRegions
from headgate.tests.rest.conftest import serving
from headgate.tests.rest.test_server import valid

(PROFILE,) = [route for route in ROUTES if route.name == "profile"]


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def works() -> None:
    while True:
        spin(0.01)
        await asyncio.sleep(0)


async def waits_for(event: asyncio.Event) -> None:
    await event.wait()


def names(answer: ProfileAnswer, kind: str) -> set[str]:
    """Return the functions on the stacks of one kind, without their files."""
    return {
        answer.functions[frame].split(" ")[0]
        for stack in answer.stacks
        if getattr(stack, kind)
        for frame in stack.frames
    }


async def sampled(task: asyncio.Task[Any], looks: int = 30) -> ProfileAnswer:
    sampler = profiler.Sampler(asyncio.get_running_loop(), threading.get_ident(), task)
    return await asyncio.to_thread(sampler.sample, 7, looks / 100, 100)


def test_a_task_that_works_and_one_that_waits() -> None:
    async def both() -> tuple[ProfileAnswer, ProfileAnswer]:
        worker = asyncio.create_task(works(), name="worker")
        waiter = asyncio.create_task(waits_for(asyncio.Event()), name="waiter")
        try:
            return await sampled(worker), await sampled(waiter)
        finally:
            worker.cancel()
            waiter.cancel()

    working, waiting = asyncio.run(both())
    assert working.query == 7
    assert 0 < working.running <= working.samples <= 30
    assert names(working, "running") >= {"works", "spin"}
    assert waiting.running == 0
    assert names(waiting, "waiting") >= {"waits_for", "Event.wait"}
    assert waiting.others["worker"] > 0
    for answer in (working, waiting):
        assert sum(each.running + each.waiting for each in answer.stacks) == answer.samples
        assert sum(each.running for each in answer.stacks) == answer.running


def test_a_profile_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            spin(0.05)

    async def dives() -> None:
        levels = 0
        while True:
            levels += 7
            deep(levels % 60)
            await asyncio.sleep(0)

    async def run() -> ProfileAnswer:
        task = asyncio.create_task(dives())
        try:
            return await sampled(task, looks=60)
        finally:
            task.cancel()

    monkeypatch.setattr(profiler, "STACKS_MAX", 2)
    monkeypatch.setattr(profiler, "DEPTH_MAX", 10)
    answer = asyncio.run(run())
    assert len(answer.stacks) == 3
    assert names(answer, "running") >= {"(other"}
    assert max(len(each.frames) for each in answer.stacks) <= 10


def test_a_sampler_ends_with_its_task_and_when_it_is_stopped() -> None:
    async def run() -> None:
        done = asyncio.create_task(asyncio.sleep(0))
        await done
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        ended = profiler.Sampler(loop, thread, done)
        assert (await asyncio.to_thread(ended.sample, 1, 3600, 10)).samples == 0
        task = asyncio.create_task(waits_for(asyncio.Event()))
        stopped = profiler.Sampler(loop, thread, task)
        sampling = asyncio.create_task(asyncio.to_thread(stopped.sample, 1, 3600, 10))
        await asyncio.sleep(0)
        stopped.stop()
        await sampling
        task.cancel()

    asyncio.run(run())


def test_a_profile_whose_region_stops_at_once_is_answered() -> None:
    """A worker that was asked, and told to stop the region in the same step, takes profiles later."""

    async def run() -> list[Any]:
        sent: list[Any] = []
        answered = asyncio.Event()

        def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 2:
                answered.set()

        waiter = asyncio.create_task(waits_for(asyncio.Event()))
        nothing = SimpleNamespace(begin=lambda *given: None)
        regions = RunningRegions(cast(Any, nothing), cast(Any, nothing))
        env = SimpleNamespace(vertex=SimpleNamespace(id=1), index=0)
        subtask = SimpleNamespace(env=env, awaits=waiter)
        regions.add(cast(Any, SimpleNamespace(region=0, attempt=1, subtasks=[subtask])))
        profiles = profiler.Profiler(regions, send)
        for query in (1, 2):
            profiles.take(
                TakeProfile(attempt=1, query=query, vertex=1, index=0, milliseconds=20, hertz=100)
            )
            if query == 1:
                await regions.stop([0])
        await answered.wait()
        waiter.cancel()
        return sent

    first, second = asyncio.run(asyncio.wait_for(run(), 60))
    assert (first.query, first.outcome) == (1, StateOutcome.ELSEWHERE)
    assert (second.query, second.outcome) == (2, StateOutcome.READ)


def heavy(record: Any) -> bool:
    spin(0.0001)
    return True


def test_profiles_over_http(lab: Any) -> None:
    job = hg.Job("heavy", parallelism=2)
    rows = job.read(numbers(10**9, batch_rows=5, splits=4), name="in")
    rows.rebalance().filter(heavy, name="heavy").write(blackhole(), name="out")

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        async with serving(running) as api, api.client() as client:
            seen: set[str] = set()
            subtask = 0
            while not seen >= {"heavy", "spin"}:
                subtask = 1 - subtask
                with contextlib.suppress(JobNotReady):  # it starts
                    found = await client.profile(1, subtask, seconds=1)
                    assert (found.job, found.samples > 0) == ("heavy", True)
                    assert found.task == f"heavy -> out ({subtask + 1}/2)"
                    assert not [name for name in found.functions if "(/" in name]
                    seen |= {
                        found.functions[frame].split(" ")[0]
                        for stack in found.stacks
                        if stack.running
                        for frame in stack.frames
                    }
            status, _, body = await api.ask("GET", "/v1/job/vertices/1/profile?subtask=0&seconds=1")
            valid(PROFILE, status, body)
            both = [client.profile(1, 0, seconds=1), client.profile(1, 0, seconds=1)]
            first, second = await asyncio.gather(*both, return_exceptions=True)
            refused = first if isinstance(first, Exception) else second
            assert isinstance(refused, JobNotReady)
            assert "takes another profile" in str(refused)
            with pytest.raises(UsageError, match="subtasks are 0 to 1"):
                await client.profile(1, 2, seconds=1)
            for path, expected in (
                ("9/profile", 404),
                ("x/profile", 404),
                ("1/profile?seconds=61", 400),
                ("1/profile?subtask=-1", 400),
            ):
                assert (await api.ask("GET", f"/v1/job/vertices/{path}"))[0] == expected
        await running.request("cancel")

    lab.run(job, script)
