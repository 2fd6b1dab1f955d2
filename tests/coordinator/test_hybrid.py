"""A history and then a live source, in jobs that crash around the switch; on the loop of the simulation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import from_list
from headgate.operators.splits import History
from headgate.runtime.coordinator.sources import read_histories
from headgate.runtime.coordinator.status import describe
from headgate.tests.coordinator.pipelines import TOKEN, Seen
from headgate.tests.coordinator.test_regional import Regional, drive
from headgate.tests.sim.counting import alone
from headgate.tests.sim.outside import SPLITS, WORLDS, Ledger, Numbers, World

__all__ = ["drive"]
ROWS = 120
PLAIN = from_list([1])
HYBRID = hg.hybrid_source(PLAIN, PLAIN)
PAST = [n for n in range(ROWS) if n % SPLITS != SPLITS - 1]
"""In three splits: of two subtasks one has read its part long before the other."""


def once(world: World, record: tuple[int, ...]) -> None:
    if record in world.visible:
        raise world.violated(f"twice: {record}")


@pytest.fixture(autouse=True)
def world() -> Iterator[World]:
    WORLDS[TOKEN] = World(random.Random(1), ROWS, once, batch_rows=1, pause_s=0.05)
    yield WORLDS[TOKEN]
    del WORLDS[TOKEN]


def make_job(parallelism: int, in_backlog: str | None, every: str = "300ms") -> hg.Job:
    job = hg.Job("job", parallelism=parallelism, max_parallelism=12)
    if in_backlog is not None:
        job.options["execution.checkpointing.interval-during-backlog"] = in_backlog
    job.checkpoint(every=every, storage="memory://hybrid")
    job.restart(attempts=1_000, delay="100ms")
    source = hg.hybrid_source(
        Numbers(TOKEN, range(SPLITS - 1), rows=ROWS), Numbers(TOKEN, part=1, rows=ROWS)
    )
    rows = job.read(source, name="numbers").map(alone, name="alone")
    rows.write(Ledger(TOKEN), name="out")
    rows.write(Seen(), name="seen")
    return job


async def until(run: Regional, happened: Callable[[Regional], bool]) -> None:
    """Looks with each record that comes."""
    come, effect = asyncio.Event(), run.world.on_effect

    def on_effect(text: str) -> None:
        effect(text)
        come.set()

    run.world.on_effect = on_effect
    while not happened(run):
        come.clear()
        await come.wait()


def stages(run: Regional) -> list[History]:
    """Return the reports of the subtasks of the source."""
    statistics = run.context.attempt.statistics.values() if run.context is not None else ()
    return [each.history for each in statistics]


def seen(run: Regional, live: bool) -> list[int]:
    return [index for index, (_, number) in enumerate(run.seen) if (number >= ROWS) == live]


def in_the_history(run: Regional) -> bool:
    return len(run.seen) > len(PAST) // 2


def one_waits(run: Regional) -> bool:
    return History.OVER in stages(run)


def just_live(run: Regional) -> bool:
    return bool(seen(run, live=True))


@pytest.mark.parametrize(
    ("when", "parallelism"),
    [
        (in_the_history, 1),
        (in_the_history, 2),
        (one_waits, 2),
        (just_live, 1),
        (just_live, 2),
    ],
)
@pytest.mark.parametrize("in_backlog", [None, "0s"])
def test_a_crash_around_the_switch(
    drive: Any, parallelism: int, when: Callable[[Regional], bool], in_backlog: str | None
) -> None:
    async def script(run: Regional) -> None:
        await run.running()
        await until(run, when)
        run.kill(run.cluster.workers[0].worker_id)
        await run.until(run.restarts)
        await run.ended
        assert run.ended.result().status == "FINISHED"
        assert not run.world.violations
        visible = sorted(record[2] for record in run.world.visible)
        assert visible == [*PAST, *range(ROWS, 2 * ROWS)]

    run = drive(make_job(parallelism, in_backlog), script)
    assert run.restarts()
    if in_backlog == "0s" and when is not just_live:
        # No checkpoint of the history, so that the second attempt reads all of it; but none of it twice.
        first_live = min(seen(run, live=True))
        assert max(seen(run, live=False)) < first_live
        numbers = {number for _, number in run.seen[:first_live]}
        assert numbers == set(PAST)


@pytest.mark.parametrize("every", ["300ms", "10ms"])
def test_checkpoints_pause_in_the_backlog_and_one_follows_it_at_once(
    drive: Any, every: str
) -> None:
    async def script(run: Regional) -> None:
        run.loop.network.latency_s = 0.015  # longer than the shorter interval
        await until(run, in_the_history)
        assert describe(run.context)["vertices"][0]["backlog"]
        assert not run.world.completed
        await run.checkpoints(1)
        assert len(seen(run, live=False)) == len(PAST)
        assert len(seen(run, live=True)) < 10
        assert not describe(run.context)["vertices"][0]["backlog"]
        await run.checkpoints(2)
        await run.ended

    drive(make_job(2, "0s", every=every), script)


@pytest.mark.parametrize(
    ("stages", "backlog", "told"),
    [
        ([None, History.OVER], True, False),
        ([History.BEING_READ, History.OVER], True, False),
        ([History.BEING_READ, History.NONE], True, False),
        ([History.OVER, History.OVER], False, True),
        ([History.NONE, History.OVER], False, True),
        ([History.NONE, History.NONE], False, False),
    ],
)
def test_all_go_live_together_and_who_has_not_reported_may_still_read(
    stages: list[History | None], backlog: bool, told: bool
) -> None:
    with_history, without = (SimpleNamespace(source=source) for source in (HYBRID, PLAIN))
    plan: Any = SimpleNamespace(
        vertices=[
            SimpleNamespace(id=0, parallelism=2, head=without),
            SimpleNamespace(id=1, parallelism=2, head=with_history),
            SimpleNamespace(id=2, parallelism=2, head=SimpleNamespace(source=None)),
        ]
    )
    statistics: Any = {
        (1, index): SimpleNamespace(history=stage)
        for index, stage in enumerate(stages)
        if stage is not None
    }
    assert read_histories(plan, statistics) == (backlog, [1] * told)
