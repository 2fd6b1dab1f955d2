"""Jobs with windows of which workers die: what the others keep in memory leads to the batch answer."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, generator, sequence
from headgate.operators.windows import tumbling
from headgate.operators.windows.panes import table as pane_table
from headgate.operators.windows.sessions import table as session_table
from headgate.runtime.storage.memory import MemoryStore
from headgate.tests.support.held import Paced

ROWS = 5_000
KEYS = 40
WINDOWS = {
    "tumbling": hg.tumbling("500ms"),
    "sliding": hg.sliding("600ms", "200ms"),
    "cumulative": hg.cumulative("800ms", "200ms"),
    "session": hg.session("9ms"),
}
SPANS_MS = {
    "tumbling": (500, [500]),
    "sliding": (200, [600]),
    "cumulative": (800, [200, 400, 600, 800]),
}
"""The distance between the starts of windows, and their lengths."""
GAP_MS = 9
"""Some keys have rows that are nearer to each other, and sessions that last long, others have not."""


class Watched(MemoryStore):
    """Notes of which subtasks state is read, and calls for each file of state that is written."""

    def __init__(self, root: str, scene: Scene) -> None:
        super().__init__(root)
        self.scene = scene

    async def read_file(self, name: str) -> bytes:
        if found := _place(name):
            self.scene.reads.add(found)
        return await super().read_file(name)

    async def write_file(self, name: str, data: Any) -> None:
        if _place(name):
            self.scene.writing.set()
            self.scene.writing.clear()
        await super().write_file(name, data)


def _place(name: str) -> tuple[str, int] | None:
    """Return the step and the subtask of a file with windows; None: it is another file."""
    found = re.search(r"/(\w+)-(\d+)-(windows|panes|sessions)-", name)
    return (found[1], int(found[2])) if found else None


class Scene:
    """A job with windows of each kind, on as many workers as it has subtasks of a step."""

    def __init__(self, lab: Any, parallelism: int) -> None:
        self.lab, self.parallelism = lab, parallelism
        self.reads: set[tuple[str, int]] = set()
        self.writing = asyncio.Event()
        self.outputs = {name: collect(guarantee="exactly_once") for name in WINDOWS}
        self.job = hg.Job(
            "job",
            parallelism=parallelism,
            max_parallelism=12,
            options={
                "io.tmp.dirs": str(lab.path),
                "headgate.recovery.keep-state": "true",
                "execution.checkpointing.data-inline-threshold": "0b",
                "execution.checkpointing.file-merging.enabled": "false",
            },
        )
        self.job.checkpoint(every="50ms", storage=lab.storage)
        self.job.restart(attempts=99, delay="10ms")
        rows = generator({"n": sequence()}, rows=ROWS, batch_rows=60 // parallelism)
        keyed = (
            # Many checkpoints before the rows are over: at least 40.
            self.job.read(Paced(rows, 2), name="rows")
            .select("n", f"n * n % {KEYS} + n // 1500 AS k", name="keys")
            .event_time("n", max_out_of_order="300ms", name="time")
            .key_by("k")
        )
        for name, window in WINDOWS.items():
            keyed.window(window).agg(
                c=hg.count(),
                s=hg.sum("n"),
                d=hg.count_distinct("n"),
                low=hg.min("n"),
                name=name,
            ).write(self.outputs[name], name=f"out of {name}")

    def open(self, uri: str, job_name: str, options: Any) -> MemoryStore:
        return Watched(f"{uri.removeprefix('memory://')}/{job_name}", self)

    async def recovered(self, job: Any) -> None:
        """Check that the workers that live have kept all of their state."""
        told = json.loads((await job.until("recovered")).body)
        assert told["lastRestartKeptStateSize"] > 0, told
        assert len({subtask for _, subtask in self.reads}) <= 1, self.reads
        self.reads.clear()

    def run(self, script: Callable[[Scene, Any], Awaitable[None]], kills: int) -> None:
        ran = self.lab.run(self.job, lambda job: script(self, job), opener=self.open)
        assert ran.outcome.status == "FINISHED"
        assert len(ran.failures) == kills, ran.failures
        for name, output in self.outputs.items():
            assert sorted(map(_plain, output.rows)) == batch_answer(name), name


def _plain(row: Any) -> tuple[int, ...]:
    bounds = (round(1000 * row[f"window_{bound}"].timestamp()) for bound in ("start", "end"))
    return (row["k"], *bounds, *(row[name] for name in ("c", "s", "d", "low")))


def batch_answer(name: str) -> list[tuple[int, ...]]:
    """Return what the windows of all rows are, computed one by one."""
    found = defaultdict(list)
    if name == "session":
        for key, ns in sessions():
            found[key, ns[0], ns[-1] + GAP_MS] = ns
        return _results(found)
    every, lengths = SPANS_MS[name]
    for n in range(ROWS):
        for length in lengths:
            for start in range(n // every * every, n - length, -every):
                found[n * n % KEYS + n // 1500, start, start + length].append(n)
    return _results(found)


def sessions() -> Iterator[tuple[int, list[int]]]:
    """Yield the key and the rows of each session."""
    last: dict[int, list[int]] = {}
    for n in range(ROWS):
        key = n * n % KEYS + n // 1500
        if key in last and n - last[key][-1] > GAP_MS:
            yield key, last.pop(key)
        last.setdefault(key, []).append(n)
    yield from last.items()


def _results(found: Mapping[tuple[int, int, int], list[int]]) -> list[tuple[int, ...]]:
    return sorted((*window, len(ns), sum(ns), len(ns), min(ns)) for window, ns in found.items())


async def right_after_a_checkpoint(scene: Scene, job: Any) -> None:
    for seed in range(4):
        await job.checkpoint()
        await job.checkpoint()
        scene.reads.clear()
        job.kill(random.Random(seed))
        await scene.recovered(job)


async def during_a_checkpoint(scene: Scene, job: Any) -> None:
    for seed in range(4):
        await job.checkpoint()
        await job.checkpoint()
        scene.reads.clear()
        await scene.writing.wait()
        job.kill(random.Random(seed))
        await scene.recovered(job)


async def twice_in_a_row(scene: Scene, job: Any) -> None:
    """State that was taken over goes back to the same checkpoint again, or is lost during a restore."""
    for seed in range(2):
        rng = random.Random(seed)
        await job.checkpoint()
        await job.checkpoint()
        scene.reads.clear()
        job.kill(rng)
        await scene.recovered(job)
        job.kill(rng)
        await scene.recovered(job)
        await job.checkpoint()
        job.kill(rng)
        await job.until("restored")
        job.kill(rng)
        await job.until("recovered")


async def at_any_moment(scene: Scene, job: Any) -> None:
    rng = random.Random(scene.parallelism)
    for _ in range(6):
        await job.checkpoint()
        await asyncio.sleep(rng.uniform(0, 0.07))  # a random moment, not a wait for something
        scene.reads.clear()
        job.kill(rng)
        await scene.recovered(job)


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panes and sessions are moved, and windows get groups of their own, with few keys."""
    monkeypatch.setattr(pane_table, "DEAD_MIN", 16)
    monkeypatch.setattr(tumbling, "SMALL_ROWS", 8)
    monkeypatch.setattr(session_table, "_DEAD_MIN", 16)


@pytest.mark.parametrize("parallelism", [2, 3, 4])
@pytest.mark.parametrize(
    ("script", "kills"),
    [
        (right_after_a_checkpoint, 4),
        (at_any_moment, 6),
        (during_a_checkpoint, 4),
        (twice_in_a_row, 8),
    ],
)
def test_windows_are_taken_over(lab: Any, script: Any, kills: int, parallelism: int) -> None:
    Scene(lab, parallelism).run(script, kills)
