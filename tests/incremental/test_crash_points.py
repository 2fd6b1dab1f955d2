"""Somebody dies at each step of an incremental checkpoint: state, output and storage stay exact.

A run loses a worker or its coordinator, goes on, and is stopped; a second run finishes the job. Nothing
that is needed is ever deleted, and nothing that is not needed is left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from headgate.runtime.protocol.joblog import CheckpointEntry

BEFORE_STRIKES = 3
"""Completed checkpoints: there are chains, and what lies before them is being trimmed."""


def writes(kind: str, moment: str) -> Callable[[Any, Any], bool]:
    """A state file of a kind; "merge": a delta that takes the place of others."""

    def when(disk: Any, call: Any) -> bool:
        if (call.verb, call.moment) != ("write_file", moment):
            return False
        if disk.counts["completed"] < BEFORE_STRIKES:
            return False
        return disk.is_merge(call.name) if kind == "merge" else call.kind == kind

    return when


def logs(moment: str) -> Callable[[Any, Any], bool]:
    """The entry that completes a checkpoint."""

    def when(disk: Any, call: Any) -> bool:
        completes = isinstance(call.entry, CheckpointEntry)
        return completes and call.moment == moment and disk.counts["completed"] >= BEFORE_STRIKES

    return when


def trims(verb: str, moment: str) -> Callable[[Any, Any], bool]:
    """The trimmer publishes a head ("put"), deletes files, or deletes entries ("delete")."""

    def when(disk: Any, call: Any) -> bool:
        trimming = disk.counts["completed"] >= BEFORE_STRIKES and call.process.role == "coordinator"
        return trimming and (call.verb, call.moment) == (verb, moment)

    return when


POINTS: dict[str, Callable[[Any, Any], bool]] = {
    "before a base is written": writes("table", "before"),
    "after a base was written": writes("table", "after"),
    "before a delta is written": writes("delta", "before"),
    "after a delta was written": writes("delta", "after"),
    "before a merge is written": writes("merge", "before"),
    "after a merge was written": writes("merge", "after"),
    "before the manifest": logs("before"),
    "after the manifest": logs("after"),
    "before the head of the log moves": trims("put", "before"),
    "after the head of the log moved": trims("put", "after"),
    "before files are deleted": trims("delete_files", "before"),
    "while files are deleted": trims("delete_files", "after"),
    "before an entry is deleted": trims("delete", "before"),
    "after an entry was deleted": trims("delete", "after"),
}
POINTS_OF_FILES: dict[str, Callable[[Any, Any], bool]] = {
    "before a file is uploaded": writes("file", "before"),
    "after a file was uploaded": writes("file", "after"),
    "before a meta is written": writes("meta", "before"),
    "after the manifest": POINTS["after the manifest"],
    "while files are deleted": POINTS["while files are deleted"],
}
POINTS_OF_SEGMENTS: dict[str, Callable[[Any, Any], bool]] = {
    "before a segment is written": writes("segment", "before"),
    "after a segment was written": writes("segment", "after"),
    **{name: point for name, point in POINTS.items() if "written" not in name},
}


def strikes_and_stop(strikes: list[Any]) -> Any:
    async def script(job: Any) -> None:
        for strike in strikes:
            await job.execute(strike)
            job.forget()
        if len(strikes) == 1:
            await job.until("restored")
        for _ in range(2):
            await job.checkpoint()
        assert (await job.request("stop"))["status"] == "SUSPENDED"

    return script


def endure(lab: Any, goods: Any, *strikes: Any, parallelism: int = 2) -> None:
    lab.disk.strikes = list(strikes)
    ran = lab.run(goods.job(parallelism=parallelism), strikes_and_stop(list(strikes)))
    assert ran.outcome.status == "SUSPENDED", ran.failures
    assert not lab.disk.strikes
    assert not lab.disk.violations
    assert len(lab.disk.retained()) == 1
    assert not lab.disk.unreachable()
    again = lab.run(goods.job(hurried=True, parallelism=parallelism))
    assert again.outcome.status == "FINISHED", again.failures
    goods.check()
    assert not lab.disk.violations
    assert not lab.disk.retained()
    assert not lab.disk.unreachable()


@pytest.mark.parametrize("victim", ["worker", "coordinator"])
@pytest.mark.parametrize("point", POINTS)
def test_a_death(lab: Any, shop: Any, strike: Any, point: str, victim: str) -> None:
    endure(lab, shop(), strike(POINTS[point], victim))


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("before a file is uploaded", "worker"),
        ("after a file was uploaded", "worker"),
        ("after a file was uploaded", "coordinator"),
        ("before a meta is written", "worker"),
        ("after the manifest", "coordinator"),
        ("while files are deleted", "worker"),
    ],
)
def test_a_death_on_rocksdb(lab: Any, shop: Any, strike: Any, point: str, victim: str) -> None:
    endure(lab, shop(backend="rocksdb"), strike(POINTS_OF_FILES[point], victim), parallelism=1)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("before a segment is written", "worker"),
        ("after a segment was written", "worker"),
        ("after a segment was written", "coordinator"),
        ("after the manifest", "coordinator"),
        ("while files are deleted", "coordinator"),
        ("while files are deleted", "worker"),
    ],
)
def test_a_death_with_segments(
    lab: Any, shop: Any, strike: Any, point: str, victim: str, backend: str
) -> None:
    goods = shop(backend=backend, merging=True)
    endure(lab, goods, strike(POINTS_OF_SEGMENTS[point], victim))
    assert lab.disk.counts["segment"]


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_deaths_at_random(lab: Any, shop: Any, strike: Any, seed: int, merging: bool) -> None:
    """Three deaths, one after the other, at any step; the next may come while the last is dealt with."""
    rng = random.Random(seed)
    backend = rng.choice(["hashmap", "rocksdb"])
    points = POINTS if backend == "hashmap" else POINTS | POINTS_OF_FILES
    points = POINTS_OF_SEGMENTS if merging else points
    likely = [name for name in points if "base" not in name and "merge" not in name]
    strikes = [
        strike(
            points[rng.choice(likely)],
            rng.choice(["worker", "coordinator", "everybody"]),
            nth=rng.randint(1, 4),
        )
        for _ in range(3)
    ]
    endure(lab, shop(backend=backend, merging=merging), *strikes)
