"""Jobs of which workers die: the others keep their state in memory, and the output is the batch answer."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import headgate as hg
from headgate.connectors import collect, generator, sequence
from headgate.runtime.storage.memory import MemoryStore

from .held import Paced

ROWS = 5_000
KEYS = 40


def key_of(n: int) -> int:
    """Return the key of a row. Some keys have rows that are near each other, and new ones come."""
    return n * n % KEYS + n // 1500


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
            self.scene.has_state = True
            self.scene.writing.set()
            self.scene.writing.clear()
        await super().write_file(name, data)


def _place(name: str) -> tuple[str, int] | None:
    """Return the step and the subtask of a file with state that is kept; None: it is another file."""
    found = re.search(r"/(\w+)-(\d+)-(windows|panes|sessions|left|right)-", name)
    return (found[1], int(found[2])) if found else None


class Scene:
    """A job with several steps that keep state, on as many workers as a step has subtasks.

    A row is a number, `n`, which also is its time in ms, and a key, `k`.

    Args:
        lab: runs it.
        parallelism: of the job.
        steps: make streams, by the names of the steps, of the stream of rows. A step must have this name.
        plain: makes a tuple of an output row.
        answer: returns all tuples of a step.
    """

    def __init__(
        self,
        lab: Any,
        parallelism: int,
        steps: dict[str, Callable[[Any], Any]],
        plain: Callable[[Any], tuple[int, ...]],
        answer: Callable[[str], list[tuple[int, ...]]],
    ) -> None:
        self.lab, self.parallelism = lab, parallelism
        self._plain, self._answer = plain, answer
        self.reads: set[tuple[str, int]] = set()
        self.writing = asyncio.Event()
        self.has_state = False
        """True if a checkpoint has written some of the state; the first one may come before all rows."""
        self.outputs = {name: collect(guarantee="exactly_once") for name in steps}
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
        timed = (
            # Many checkpoints before the rows are over: at least 40.
            self.job.read(Paced(rows, 2), name="rows")
            .select("n", f"n * n % {KEYS} + n // 1500 AS k", name="keys")
            .event_time("n", max_out_of_order="300ms", name="time")
        )
        for name, make in steps.items():
            make(timed).write(self.outputs[name], name=f"out of {name}")

    def open(self, uri: str, job_name: str, options: Any) -> MemoryStore:
        return Watched(f"{uri.removeprefix('memory://')}/{job_name}", self)

    async def checkpoint(self, job: Any) -> None:
        """Wait for the next checkpoint that has some of the state."""
        has_state = False
        while not has_state:
            has_state = self.has_state
            await job.checkpoint()

    async def recovered(self, job: Any) -> None:
        """Check that the workers that live have kept all of their state."""
        told = json.loads((await job.until("recovered")).body)
        assert told["lastRestartKeptStateSize"] > 0, json.dumps(told)
        assert len({subtask for _, subtask in self.reads}) <= 1, self.reads
        self.reads.clear()

    def run(self, script: Callable[[Scene, Any], Awaitable[None]], kills: int) -> None:
        ran = self.lab.run(self.job, lambda job: script(self, job), opener=self.open)
        assert ran.outcome.status == "FINISHED"
        assert len(ran.failures) == kills, ran.failures
        for name, output in self.outputs.items():
            assert sorted(map(self._plain, output.rows)) == self._answer(name), name


async def right_after_a_checkpoint(scene: Scene, job: Any) -> None:
    for seed in range(4):
        await job.checkpoint()
        await scene.checkpoint(job)
        scene.reads.clear()
        job.kill(random.Random(seed))
        await scene.recovered(job)


async def during_a_checkpoint(scene: Scene, job: Any) -> None:
    for seed in range(4):
        await job.checkpoint()
        await scene.checkpoint(job)
        scene.reads.clear()
        await scene.writing.wait()
        job.kill(random.Random(seed))
        await scene.recovered(job)


async def twice_in_a_row(scene: Scene, job: Any) -> None:
    """State that was taken over goes back to the same checkpoint again, or is lost during a restore."""
    for seed in range(2):
        rng = random.Random(seed)
        await job.checkpoint()
        await scene.checkpoint(job)
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
        await scene.checkpoint(job)
        await asyncio.sleep(rng.uniform(0, 0.07))  # a random moment, not a wait for something
        scene.reads.clear()
        job.kill(rng)
        await scene.recovered(job)


SCRIPTS = [
    (right_after_a_checkpoint, 4),
    (at_any_moment, 6),
    (during_a_checkpoint, 4),
    (twice_in_a_row, 8),
]
"""The scripts, and how many workers each of them kills."""
