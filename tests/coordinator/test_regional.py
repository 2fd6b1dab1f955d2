"""Some regions of a job restart while the others run on.

The tests run on the loop of the simulation, so a seed decides when each failure happens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import headgate as hg
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.control.messages import (
    CheckpointAcked,
    LoopRoundBack,
    SubtaskFailed,
    SubtaskFinished,
)
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.coordinator.placement import Executions, failover_of
from headgate.runtime.coordinator.status import describe
from headgate.runtime.job import runnable
from headgate.runtime.protocol.ids import SubtaskId
from headgate.runtime.storage.memory import MemoryStore
from headgate.testing.loop import VirtualClock
from headgate.tests.coordinator.pipelines import CUTS, FAILS, MARKED, TOKEN, CutAnew, Seen, graph
from headgate.tests.sim.cluster import SimCluster
from headgate.tests.sim.counting import check_count
from headgate.tests.sim.loop import SimLoop
from headgate.tests.sim.outside import SPLITS, WORLDS, Numbers, World

ROWS = 800
DOWN_S = 4


def make_job(
    *,
    keyed: bool,
    parallelism: int = 2,
    every: str = "400ms",
    source: type[Numbers] = Numbers,
    **options: str,
) -> hg.Job:
    """Two pipelines with two splits each, or, if not keyed, one whose subtasks are on their own."""
    texts = {key.replace("_", "."): text for key, text in options.items()}
    job = hg.Job("job", parallelism=parallelism, max_parallelism=12, options=texts)
    job.checkpoint(every=every, storage="memory://regional")
    job.restart(attempts=1_000, delay=f"{DOWN_S}s")
    if keyed:
        graph(job, range(2), "left", keyed=True)
        graph(job, range(2, 4), "right", keyed=True)
    else:
        graph(job, range(SPLITS), "alone", keyed=False, source=source)
    return job


class Regional:
    """A job under way."""

    def __init__(self, job: hg.Job) -> None:
        rng = random.Random(1)
        self.loop = SimLoop(rng)
        self.clock = VirtualClock(self.loop)
        self.world = WORLDS[TOKEN]
        self.world.on_effect = self._effect
        self.seen: list[tuple[float, int]] = []
        self.events: list[PublishedEvent] = []
        self._objects: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self.cluster = SimCluster(self.loop, rng, self.clock, self._open)
        self._spec = replace(runnable(job).spec(), slots_per_worker=1)
        self.coordinator = self._coordinator()

    def _coordinator(self) -> JobCoordinator:
        coordinator = JobCoordinator(
            self._spec,
            cluster=self.cluster,
            clock=self.clock,
            open_store=self._open,
            token="token",
        )
        coordinator.on_event = self._on_event
        return coordinator

    def _open(self, uri: str, name: str, options: Mapping[str, str]) -> MemoryStore:
        return MemoryStore(uri, self._objects)

    def _effect(self, text: str) -> None:
        if text.isdecimal():
            self.seen.append((self.loop.time(), int(text)))

    def _on_event(self, event: PublishedEvent) -> None:
        self.events.append(event)
        body = json.loads(event.body)
        if event.kind == "checkpoint" and body["status"] == "COMPLETED":
            self.world.completed.add(body["id"])
        self._news.set()

    @property
    def context(self) -> Any:
        return self.coordinator._context

    def attempts(self) -> dict[str, int]:
        """Of all subtasks, by name."""
        executions: Executions = self.context.attempt.executions
        return {
            executions.name(task): executions.attempt_of(task) or 0
            for region in executions.failover.regions
            for task in region
        }

    def kill(self, worker_id: str) -> None:
        """A process dies."""
        next(each for each in self.cluster.workers if each.worker_id == worker_id).crash()

    async def take_over(self) -> str:
        """The coordinator dies as a process does; returns what the next one says of what runs."""
        before = len(self.events)
        self.coordinator._pool.abandon()
        self.ended.cancel()
        await asyncio.gather(self.ended, return_exceptions=True)
        self.coordinator = self._coordinator()
        self.ended = asyncio.ensure_future(self.coordinator.run())
        await self.until(lambda: any(e.kind == "adopted" for e in self.events[before:]))
        (text,) = [event.text for event in self.events[before:] if event.kind == "adopted"]
        await self.running()
        return text

    def patience(self) -> set[int]:
        """For how many ms the workers go on without a coordinator."""
        return {each.worker._orphaned_ms() for each in self.cluster.live if each.worker is not None}

    def restarts(self) -> list[dict[str, Any]]:
        return [json.loads(e.body) for e in self.events if e.kind == "restart"]

    async def until(self, happened: Callable[[], object]) -> None:
        while not happened():
            self._news.clear()
            await self._news.wait()

    async def checkpoints(self, count: int) -> None:
        """Wait until this number of further ones is complete."""
        before = len(self.world.completed)
        await self.until(lambda: len(self.world.completed) >= before + count)

    async def running(self) -> None:
        await self.until(
            lambda: self.context is not None and self.context.lifecycle.status == "RUNNING"
        )

    async def run_to_the_end(self) -> None:
        await self.ended
        assert self.ended.result().status == "FINISHED"
        assert not self.world.violations
        assert sorted(record[2] for record in self.world.visible) == list(range(ROWS))

    def drive(self, script: Callable[[Regional], Any]) -> None:
        """Run `script` beside the job."""

        async def main() -> None:
            self.ended = asyncio.ensure_future(self.coordinator.run())
            try:
                await script(self)
            finally:
                self.ended.cancel()
                await asyncio.gather(self.ended, return_exceptions=True)
                await self.coordinator.close()
                await self.cluster.close()

        task = self.loop.create_task(main())
        task.add_done_callback(lambda _: self.loop.stop())
        self.loop.drive(10_000)
        task.result()


@pytest.fixture(autouse=True)
def world() -> Iterator[World]:
    world = World(random.Random(1), ROWS, check_count, batch_rows=1, pause_s=0.05)
    WORLDS[TOKEN] = world
    FAILS.clear()  # a test that failed may have left its number there
    CUTS.clear()
    yield world
    del WORLDS[TOKEN]


@pytest.fixture
def drive() -> Iterator[Callable[[hg.Job, Callable[[Regional], Any]], Regional]]:
    made: list[Regional] = []

    def drive(job: hg.Job, script: Callable[[Regional], Any]) -> Regional:
        run = Regional(job)
        made.append(run)
        run.drive(script)
        return run

    logging.getLogger("headgate").setLevel(logging.CRITICAL)
    yield drive
    logging.getLogger("headgate").setLevel(logging.NOTSET)
    for run in made:
        run.loop.close()


UNALIGNED = {"execution.checkpointing.unaligned.enabled": "true"}
FULL = {"jobmanager.execution.failover-strategy": "full"}


def gaps(run: Regional, began: float, ours: Callable[[int], bool]) -> float:
    """The longest silence at the sinks in the time that the other pipeline was down."""
    times = [at for at, number in run.seen if ours(number) and began <= at <= began + DOWN_S]
    points = [began, *times, began + DOWN_S]
    return max(b - a for a, b in itertools.pairwise(points))


@pytest.mark.parametrize("options", [{}, UNALIGNED], ids=["aligned", "unaligned"])
def test_one_of_two_pipelines_fails_and_the_other_never_stops(
    drive: Any, options: dict[str, str]
) -> None:
    async def script(run: Regional) -> None:
        await run.running()
        before = run.attempts()
        await run.checkpoints(2)
        FAILS.add(MARKED)
        await run.until(run.restarts)
        began = run.loop.time()
        completed = set(run.world.completed)
        await run.until(lambda: run.context.lifecycle.status == "RESTARTING")
        await run.running()
        assert run.loop.time() - began >= DOWN_S
        assert gaps(run, began, lambda number: number % SPLITS >= 2) < 1
        after = run.attempts()
        again = {name for name in before if after[name] != before[name]}
        assert again == {name for name in before if "left" in name}
        assert len({after[name] for name in again}) == 1
        await run.checkpoints(2)
        assert min(run.world.completed - completed) > max(completed)
        status = describe(run.context)
        assert (status["restarts"], status["restarted_tasks"]) == (1, len(again))
        (record,) = status["exceptions"]
        assert (sorted(record["tasks"]), record["tasks_total"]) == (sorted(again), len(before))
        await run.run_to_the_end()

    run = drive(make_job(keyed=True, **options), script)
    (restart,) = [e.text for e in run.events if e.kind == "restart"]
    assert restart.startswith("restart 1 in 4s: region 1 of 2 (numbers left")
    numbers = [number for _, number in run.seen if number % SPLITS >= 2]
    assert len(numbers) == len(set(numbers)), "what was not restarted sends nothing twice"


def test_with_the_strategy_full_all_of_it_restarts(drive: Any) -> None:
    async def script(run: Regional) -> None:
        await run.running()
        before = run.attempts()
        await run.checkpoints(2)
        FAILS.add(MARKED)
        await run.until(run.restarts)
        began = run.loop.time()
        await run.until(lambda: run.context.attempt.begun == 2)
        await run.running()
        assert gaps(run, began, lambda _: True) > DOWN_S - 0.1
        after = run.attempts()
        assert all(after[name] != before[name] for name in before)
        await run.run_to_the_end()

    run = drive(make_job(keyed=True, **FULL), script)
    (restart,) = [e.text for e in run.events if e.kind == "restart"]
    assert restart.endswith(f"all {len(run.attempts())} tasks")


def test_a_worker_takes_its_regions_along_and_a_second_one_joins_the_same_restart(
    drive: Any,
) -> None:
    async def script(run: Regional) -> None:
        await run.running()
        before = run.attempts()
        await run.checkpoints(2)
        first, second, _ = run.context.attempt.executions.slots
        run.kill(first)
        await run.until(lambda: len(run.restarts()) == 1)
        await asyncio.sleep(1)
        run.kill(second)
        await run.until(lambda: len(run.restarts()) == 2)
        await run.until(lambda: run.context.lifecycle.status == "RUNNING")
        after = run.attempts()
        assert {name for name in before if after[name] == before[name]} == {
            name for name in before if name.endswith("(3/3)")
        }
        status = describe(run.context)
        assert status["restarts"] == 1
        (record,) = status["exceptions"]
        assert [also["kind"] for also in record["concurrent"]] == ["worker_lost"]
        await run.run_to_the_end()

    run = drive(make_job(keyed=False, parallelism=3), script)
    first, second = run.restarts()
    assert first["number"] == second["number"] == 1
    assert 2 * first["tasks"] == second["tasks"] < second["tasks_total"]
    assert first["delay_ms"] - second["delay_ms"] >= 1_000, "the pause goes on"


def test_only_a_whole_deployment_is_adopted(drive: Any) -> None:
    async def script(run: Regional) -> None:
        await run.running()
        before = run.attempts()
        await run.checkpoints(1)
        assert "goes on with attempt" in await run.take_over()
        assert run.attempts() == before
        assert run.patience() == {60_000}
        FAILS.add(MARKED)
        await run.until(run.restarts)
        await run.until(lambda: run.context.lifecycle.status == "RESTARTING")
        await run.running()
        after = run.attempts()
        again = {name for name in before if after[name] != before[name]}
        assert again == {name for name in before if "left" in name}
        assert run.patience() == {0}, "whatever becomes of the entry in the log"
        await run.checkpoints(1)
        assert "restarts the job: some of its regions were restarted" in await run.take_over()
        after = run.attempts()
        assert len(set(after.values())) == 1
        await run.checkpoints(1)
        assert "goes on with attempt" in await run.take_over()
        assert run.attempts() == after
        await run.run_to_the_end()

    drive(make_job(keyed=True), script)


@pytest.mark.parametrize("later_s", [0, 1, DOWN_S + 0.01])
def test_a_coordinator_that_dies_while_regions_restart_has_all_of_it_restarted(
    drive: Any, later_s: float
) -> None:
    async def script(run: Regional) -> None:
        await run.running()
        await run.checkpoints(2)
        FAILS.add(MARKED)
        await run.until(run.restarts)
        await asyncio.sleep(later_s)  # by the clock of the simulation
        assert run.context.attempt.restarting
        assert "restarts the job" in await run.take_over()
        assert len(set(run.attempts().values())) == 1
        await run.run_to_the_end()

    drive(make_job(keyed=True), script)


def test_a_worker_that_does_not_say_what_it_runs_is_replaced(drive: Any) -> None:
    """It lives, and was still busy with the last word of the coordinator that died."""

    async def script(run: Regional) -> None:
        await run.running()
        await run.checkpoints(1)
        stuck = run.cluster.live[0]
        assert stuck.worker is not None
        may_end = asyncio.Event()
        stuck.worker._regions.drop_all = may_end.wait  # type: ignore[assignment]
        FAILS.add(MARKED)
        await run.until(lambda: run.context.lifecycle.status == "FAILING")
        await asyncio.sleep(1)  # by the clock of the simulation
        assert "restarts the job" in await run.take_over()
        assert stuck not in run.cluster.live
        may_end.set()
        await run.run_to_the_end()

    drive(make_job(keyed=True, **FULL), script)


def test_a_source_that_has_to_be_cut_anew_is_not_cut_for_a_part_of_its_subtasks(
    drive: Any,
) -> None:
    """Only the first coordinator knew which subtask had which split, and no checkpoint does yet."""

    async def script(run: Regional) -> None:
        await run.running()
        assert "goes on with attempt" in await run.take_over()
        FAILS.add(MARKED)
        await run.until(run.restarts)
        await run.until(lambda: run.context.lifecycle.status == "RESTARTING")
        await run.running()
        await run.run_to_the_end()

    job = make_job(keyed=False, every="1h", source=CutAnew)
    (restart,) = drive(job, script).restarts()
    assert restart["tasks"] == restart["tasks_total"]
    assert len(CUTS) == 2


def plan_of(build: Callable[[hg.Job], Any], parallelism: int = 2) -> Any:
    job = hg.Job("job", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="1h", storage="never-made")
    build(job)
    return runnable(job).spec().plan


def test_the_regions_of_plans() -> None:
    def alone(job: hg.Job) -> None:
        graph(job, range(SPLITS), "alone", keyed=False)

    def both(job: hg.Job) -> None:
        graph(job, range(2), "left", keyed=True)
        alone(job)

    assert [len(region) for region in failover_of(plan_of(alone, 3), "region").regions] == [1] * 3
    regions = failover_of(plan_of(both), "region").regions
    assert [len(region) for region in regions] == [4, 1, 1]
    assert len(failover_of(plan_of(both), "full").regions) == 1


def test_what_is_said_of_an_attempt_that_is_over_is_late() -> None:
    executions = Executions(plan_of(lambda job: graph(job, range(4), "a", keyed=False)), "region")
    first, second = executions.failover.everything
    executions.begin([first, second], 1)
    executions.begin([second], 2)
    where = {
        index: executions.failover.region_of(SubtaskId(0, index)) == second for index in (0, 1)
    }

    def finished(attempt: int, index: int) -> SubtaskFinished:
        return SubtaskFinished(attempt=attempt, vertex=0, index=index)

    def acked(attempt: int) -> CheckpointAcked:
        return CheckpointAcked(attempt=attempt, checkpoint_id=1, subtasks=())

    def failed(attempt: int, region: int) -> SubtaskFailed:
        said = {"task_name": "exchange", "error": b"", "text": "", "kind": "exchange"}
        return SubtaskFailed(attempt=attempt, vertex=-1, index=-1, region=region, **said)

    for index, restarted in where.items():
        assert executions.is_current(finished(1, index)) is not restarted
        assert executions.is_current(finished(2, index)) is restarted
    assert executions.is_current(failed(1, first))
    assert not executions.is_current(failed(1, second))
    assert not executions.is_current(finished(3, 0))
    # A worker acknowledges for all its subtasks of an attempt, whatever their region.
    assert [executions.is_current(acked(attempt)) for attempt in (1, 2, 3)] == [True, True, False]
    assert executions.attempts == [1, 2]


def test_a_loop_is_one_region_and_its_rounds_are_those_of_its_attempt() -> None:
    def build(job: hg.Job) -> None:
        numbers = job.read(Numbers(TOKEN), name="numbers")

        def count_down(stream: Any) -> tuple[Any, Any]:
            less = stream.map(lambda n: n - 1)
            return less.filter(lambda n: n > 0), less

        numbers.iterate(count_down, name="loop").write(Seen(), name="out")

    plan = plan_of(build)
    executions = Executions(plan, "region")
    (loop,) = plan.loops
    heads = {executions.failover.region_of(SubtaskId(loop.head, index)) for index in (0, 1)}
    assert len(heads) == 1
    executions.begin(executions.failover.everything, 4)
    back = LoopRoundBack(attempt=4, loop=loop.name, index=0, number=1, records=0)
    assert executions.is_current(back)
    executions.begin(heads, 5)
    assert not executions.is_current(back)
