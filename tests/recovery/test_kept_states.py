"""Jobs of which a worker dies: the others take their state over from memory, and read nothing again."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.runtime.storage.memory import MemoryStore

KEYS = 16


class Count(hg.KeyedProcess[int, int, tuple[int, int]]):
    """Counts the records of a key; a timer that moves on with each record never fires."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: Any) -> list[tuple[int, int]]:
        self.seen.set(self.seen.get() + 1)
        ctx.processing_time.after("1h")
        return [(record % KEYS, self.seen.get())]

    def on_timer(self, timer: Any, ctx: Any) -> None:
        raise AssertionError


def _key(record: int) -> int:
    return record % KEYS


class Noted(MemoryStore):
    """Notes of which subtasks state is read."""

    def __init__(self, root: str, reads: list[int]) -> None:
        super().__init__(root)
        self.reads = reads

    async def read_file(self, name: str) -> bytes:
        if (found := re.search(r"/count-(\d+)-", name)) is not None:
            self.reads.append(int(found[1]))
        return await super().read_file(name)


class Scene:
    """A job of four workers, of which some are killed, one after the other."""

    def __init__(self, lab: Any, **options: str) -> None:
        self.lab = lab
        self.reads: list[int] = []
        self.told: list[dict[str, Any]] = []
        self.out = collect(guarantee="exactly_once")
        self.job = hg.Job(
            "job",
            parallelism=4,
            max_parallelism=KEYS,
            options={
                "io.tmp.dirs": str(lab.path),
                "headgate.recovery.keep-state": "true",
                "execution.checkpointing.data-inline-threshold": "0b",
                "execution.checkpointing.file-merging.enabled": "false",
                **options,
            },
        )
        self.job.checkpoint(every="50ms", storage=lab.storage)
        self.job.restart(attempts=9, delay="10ms")
        endless = numbers(10_000_000, rate=2_000, batch_rows=20)
        counted = self.job.read(endless, name="numbers").key_with(_key)
        counted.process(Count(), name="count").write(self.out, name="out")

    def open(self, uri: str, job_name: str, options: Any) -> MemoryStore:
        return Noted(f"{uri.removeprefix('memory://')}/{job_name}", self.reads)

    def run(self, kills: int = 1) -> list[set[int]]:
        """Return the subtasks whose state was read behind each kill."""
        read: list[set[int]] = []

        async def script(job: Any) -> None:
            for _ in range(kills):
                await job.checkpoint()
                await job.checkpoint()
                self.reads.clear()
                sorted(job.live(), key=lambda worker: worker.worker_id)[0].kill()
                await job.until("restored")
                self.told.append(json.loads((await job.until("recovered")).body))
                read.append(set(self.reads))
            await job.request("stop")

        ran = self.lab.run(self.job, script, opener=self.open)
        assert ran.outcome.status == "SUSPENDED"
        assert len(ran.failures) == kills, ran.failures
        counts = Counter(key for key, _ in self.out.rows)
        assert sorted(self.out.rows) == [(k, n + 1) for k in range(KEYS) for n in range(counts[k])]
        return read


def test_only_the_state_of_the_lost_worker_is_read(lab: Any) -> None:
    scene = Scene(lab)
    assert [len(read) for read in scene.run(kills=3)] == [1, 1, 1]
    for told in scene.told:
        assert told["lastRestartKeptStateSize"] > 2 * told["lastRestartRemoteStateSize"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"headgate.recovery.keep-state": "false"},
        {"headgate.recovery.keep-state.timeout": "1ms", "restart-strategy.fixed-delay.delay": "1s"},
        {"state.backend.type": "rocksdb"},
    ],
)
def test_what_is_not_kept_is_read(lab: Any, options: dict[str, str]) -> None:
    scene = Scene(lab, **options)
    scene.run()
    assert scene.told[0]["lastRestartKeptStateSize"] == 0
