"""Whole jobs on virtual time: the status names the subtask that is slow, and its key group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, generator, numbers, sequence
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.coordinator.views import describe_subtasks
from headgate.runtime.job import runnable
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of
from headgate.testing.run import VirtualRun

PARALLELISM = 4
HOT_KEY = "hot"
GROUP = key_group_of(hash_key(HOT_KEY), 128)
OWNER = owner_of(GROUP, PARALLELISM, 128)


def key_of(n: int) -> str:
    """Three of four records are of one key, the others of many."""
    return f"key-{n % 997}" if n % 4 == 0 else HOT_KEY


async def slow(n: int) -> int:
    await asyncio.sleep(0.05)
    return n


async def less_slow(n: int) -> int:
    await asyncio.sleep(0.005)
    return n


def keyed(key: Callable[[int], str], step: Any = slow, **options: str) -> hg.Job:
    job = hg.Job("hot", parallelism=PARALLELISM, options=options)
    read = job.read(numbers(splits=PARALLELISM, batch_rows=64), name="in")
    done = read.key_with(key).map_async(step, name="slow", max_in_flight=1, timeout="1h")
    done.write(blackhole(), name="out")
    return job


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., JobCoordinator]]:
    """Runs a job for some seconds; its coordinator."""
    monkeypatch.setattr("headgate.testing.run._PERIODIC", frozenset())  # they bring the statistics
    runs: list[VirtualRun] = []

    def run(job: hg.Job, ms: int = 20_000) -> JobCoordinator:
        one_worker = replace(runnable(job).spec(), slots_per_worker=PARALLELISM)
        runs.append(VirtualRun(one_worker, seed=1))
        runs[-1].start()
        runs[-1].advance(ms)
        return runs[-1]._coordinator

    yield run
    for each in runs:
        each.close()


@pytest.fixture
def status(coordinator: Callable[..., JobCoordinator]) -> Callable[..., dict[str, Any]]:
    """Runs a job for some seconds; its status."""
    return lambda job, ms=20_000: coordinator(job, ms)._describe()


def test_a_hot_key_is_found(status: Callable[..., dict[str, Any]]) -> None:
    described = status(keyed(key_of))
    (found,) = described["backpressure"]
    cause = found["cause"]
    assert (cause["subtask"], cause["key_group"]) == (OWNER, GROUP)
    assert cause["full"] > 900
    assert cause["busy"] < 100
    assert cause["waits_for"] == "calls"
    assert 0.7 < cause["records_share"] < 0.9
    assert 0.8 < cause["key_group_share"] < 1
    (pressed,) = found["vertices"]
    assert (pressed["vertex"], pressed["level"]) == ("in", "HIGH")
    assert found["sentence"].startswith("`in` is backpressured (HIGH, ")
    assert f"because of `slow -> out` ({OWNER + 1}/{PARALLELISM}), full " in found["sentence"]
    assert found["sentence"].endswith(f" of them in key group {GROUP}")
    levels = {each["name"]: each["backpressure_level"] for each in described["vertices"]}
    (slow,) = [each for each in described["vertices"] if each["name"] == "slow -> out"]
    assert (slow["full"] > 900, slow["busy"] < 100) == (True, True)
    assert levels == {"in": "HIGH", "slow -> out": "OK"}


def test_without_a_hot_key_no_key_group_is_named(status: Callable[..., dict[str, Any]]) -> None:
    (found,) = status(keyed(lambda n: f"key-{n}"))["backpressure"]
    assert found["cause"]["vertex"] == "slow -> out"
    assert found["cause"]["key_group"] is None
    assert "key group" not in found["sentence"]


async def slow_batch(batch: Any) -> Any:
    await asyncio.sleep(0.05 * len(batch))
    return batch


def test_an_alignment_is_nobodys_fault(status: Callable[..., dict[str, Any]]) -> None:
    """The barrier of one input is behind much work; the other input is not read meanwhile."""
    job = hg.Job("aligned")
    job.checkpoint(every="5s", storage="in-memory")
    left = job.read(generator({"n": sequence()}), name="left").rebalance()
    right = job.read(generator({"n": sequence()}, rate=20_000), name="right")
    left.map_batches(slow_batch, name="slow").union(right, name="both").write(
        blackhole(), name="out"
    )
    slow, aligned = status(job, 30_000)["backpressure"]
    assert [each["vertex"] for each in slow["vertices"]] == ["left"]
    assert slow["cause"]["vertex"] == "slow"
    assert [each["vertex"] for each in aligned["vertices"]] == ["right"]
    assert aligned["cause"] is None
    assert aligned["sentence"].endswith(
        "nobody downstream is busy: `both -> out` (1/1), busy 0 %, "
        "waits for the other barriers of a checkpoint"
    )


def test_another_key_becomes_hot(status: Callable[..., dict[str, Any]]) -> None:
    """The first seconds, with all that fits into the buffers, do not count for ever."""
    small = {"headgate.buffer.max-size": "8 kb"}
    (found,) = status(keyed(lambda n: "was" if n < 3_000 else HOT_KEY, less_slow, **small), 30_000)[
        "backpressure"
    ]
    assert found["cause"]["key_group"] == GROUP


def test_skew_without_keys(status: Callable[..., dict[str, Any]]) -> None:
    """Key groups are not sampled here: the share is of what the subtasks got."""
    job = hg.Job("uneven", parallelism=2)
    read = job.read(numbers(splits=2, batch_rows=64), name="in")
    parted = read.partition_with(lambda n, _: 0 if n % 10 == 0 else 1)
    parted.map_async(slow, name="slow", max_in_flight=1, timeout="1h").write(
        blackhole(), name="out"
    )
    # What filled the buffers of both at the start is worked off after some minutes.
    (found,) = status(job, 600_000)["backpressure"]
    assert found["cause"]["subtask"] == 1
    assert found["cause"]["records_share"] > 0.75
    assert found["sentence"].endswith(" of the records")


def test_a_job_that_keeps_up_blames_nobody(coordinator: Callable[..., JobCoordinator]) -> None:
    job = hg.Job("quick", parallelism=2)
    job.read(numbers(rate=100), name="in").key_with(key_of).reduce(max, name="most").write(
        blackhole(), name="out"
    )
    made = coordinator(job)
    assert made._describe()["backpressure"] == []
    assert made._context is not None
    told = made._context.attempt.statistics.values()
    assert sum(each.records_out for each in told) > 0
    # A hot key group is told all the same, since it may become the cause.
    assert {hot.group for each in told for hot in each.hot_groups} == {GROUP}
    assert made._context.attempt.plan.vertices[1].parallelism == 2
    (found,) = describe_subtasks(made._context.attempt, 1)["hot_key_groups"]
    assert found["key_group"] == GROUP
    assert found["subtask"] == owner_of(GROUP, 2, 128)
    assert 0.7 < found["records_share"] < 0.8 < found["subtask_share"]


def test_while_a_job_does_not_run_nobody_is_blamed(
    coordinator: Callable[..., JobCoordinator],
) -> None:
    made = coordinator(keyed(key_of))
    assert made._describe()["backpressure"] != []
    assert made._context is not None
    made._context.set_status("FAILING")
    assert made._describe()["backpressure"] == []
