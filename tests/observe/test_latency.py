"""Latency markers: how long records are under way, measured on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.runtime.job import runnable
from headgate.testing.run import VirtualRun


def latencies(job: hg.Job, seconds: int) -> dict[tuple[str, str], tuple[float, float]]:
    """By source and sink: how many markers came in that time, and how long they took together."""
    run = VirtualRun(replace(runnable(job).spec(), slots_per_worker=job.parallelism), seed=1)
    try:
        run.start()
        run.advance(1_000 * seconds)
        found: dict[tuple[str, str], list[float]] = {}
        for family in run._cluster.metrics.collect():
            if family.name == "headgate_latency_seconds":
                for sample in family.samples:
                    part = sample.name.rpartition("_")[2]
                    if part in ("count", "sum"):
                        key = (sample.labels["source"], sample.labels["operator"])
                        sums = found.setdefault(key, [0.0, 0.0])
                        sums[part == "sum"] += sample.value
        return {key: (count, total) for key, (count, total) in found.items()}
    finally:
        run.close()


def make_job(through: Callable[[Any], Any] = lambda s: s, every: str = "1s", **job: Any) -> hg.Job:
    options = {"metrics.latency.interval": every} if every else {}
    made = hg.Job("timed", options=options, **job)
    read = made.read(numbers(rate=10, splits=6), name="ticks").rebalance()
    through(read).write(blackhole(), name="out")
    return made


def test_there_are_none_unless_asked_for() -> None:
    assert latencies(make_job(every=""), 10) == {}


def test_a_marker_a_second_comes_to_the_sink_at_once() -> None:
    assert latencies(make_job(), 10) == {("ticks", "out"): (10, 0)}


def test_markers_do_not_multiply_from_task_to_task() -> None:
    """Each subtask of the source sends one a second, and each comes to one subtask of the sink."""
    job = make_job(
        lambda s: s.filter(lambda n: True).rebalance().filter(lambda n: True), parallelism=3
    )
    ((source_and_sink, (count, total)),) = latencies(job, 10).items()
    assert source_and_sink == ("ticks", "out")
    assert count == 30
    assert total == 0


def test_a_marker_waits_in_line_with_the_records() -> None:
    """Ten records a second come, and two are done: the line grows by four seconds a second."""

    async def slow(number: int) -> int:
        await asyncio.sleep(0.5)
        return number

    found = latencies(make_job(lambda s: s.map_async(slow, max_in_flight=1, name="slow")), 40)
    count, total = found["ticks", "out"]
    assert 1 <= count < 20, "those sent last are still in line"
    assert total / count > 2
