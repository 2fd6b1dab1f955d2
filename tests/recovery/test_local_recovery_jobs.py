"""Jobs whose workers are killed, and get their state from the machine's own disk."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.runtime.protocol import names
from headgate.runtime.storage.memory import MemoryStore

KEYS = 16


class Count(hg.KeyedProcess[int, int, tuple[int, int]]):
    """Counts the records of a key."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: Any) -> list[tuple[int, int]]:
        self.seen.set(self.seen.get() + 1)
        return [(record % KEYS, self.seen.get())]


def _key(record: int) -> int:
    return record % KEYS


class Noted(MemoryStore):
    """Notes which state files are read."""

    def __init__(self, root: str, reads: list[str]) -> None:
        super().__init__(root)
        self.reads = reads

    async def read_file(self, name: str) -> bytes:
        if name.startswith("chk/"):
            self.reads.append(name)
        return await super().read_file(name)

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        if name.startswith("chk/"):
            self.reads.append(name)
        return await super().read_range(name, start, length)


class Scene:
    """A job of two workers, one of which is killed."""

    def __init__(self, lab: Any, backend: str, *, local: bool = True, merging: bool = True) -> None:
        self.lab = lab
        self.reads: list[str] = []
        self.told: dict[str, Any] = {}
        self.out = collect(guarantee="exactly_once")
        self.job = hg.Job(
            "job",
            parallelism=2,
            max_parallelism=KEYS,
            options={
                "state.backend.type": backend,
                "io.tmp.dirs": str(lab.path),
                "execution.checkpointing.data-inline-threshold": "0b",
                "execution.checkpointing.file-merging.enabled": str(merging).lower(),
                "execution.checkpointing.local-backup.enabled": str(local).lower(),
                "execution.state-recovery.from-local": str(local).lower(),
            },
        )
        self.job.checkpoint(every="50ms", storage=lab.storage)
        self.job.restart(attempts=3, delay="10ms")
        endless = numbers(10_000_000, rate=2_000, batch_rows=20)
        self.job.read(endless, name="numbers").key_with(_key).process(Count(), name="count").write(
            self.out, name="out"
        )

    def open(self, uri: str, job_name: str, options: Any) -> MemoryStore:
        return Noted(f"{uri.removeprefix('memory://')}/{job_name}", self.reads)

    def copies(self) -> list[Path]:
        """All there are."""
        files = self.lab.path.glob("headgate-copies-*/*/*/*")
        return [path for path in files if path.is_file() and path.name != "lock"]

    def run(self, spoil: Any = None) -> list[str]:
        """The state files that were read from the storage behind a kill."""
        read: list[str] = []

        async def script(job: Any) -> None:
            await job.checkpoint()
            await job.checkpoint()
            victim = sorted(job.live(), key=lambda worker: worker.worker_id)[0]
            victim.kill()
            if spoil is not None:
                for path in self.copies():
                    spoil(path, victim.worker_id)
            await job.until("restored")
            await job.until("status", status="RUNNING")
            read.extend(self.reads)
            self.told = json.loads((await job.until("recovered")).body)
            await job.request("stop")

        ran = self.lab.run(self.job, script, opener=self.open)
        assert ran.outcome.status == "SUSPENDED"
        assert len(ran.failures) == 1, ran.failures
        counts = Counter(key for key, _ in self.out.rows)
        assert sorted(self.out.rows) == [(k, n + 1) for k in range(KEYS) for n in range(counts[k])]
        return read


def spoiled(path: Path) -> None:
    """Its length stays, its content does not."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes(byte ^ 1 for byte in data))


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_nothing_is_read_from_the_storage(lab: Any, backend: str) -> None:
    scene = Scene(lab, backend)
    assert scene.run() == []
    assert not scene.copies(), "the job is over"
    assert scene.told["lastRestartLocalStateSize"] > 0
    assert scene.told["lastRestartRemoteStateSize"] == 0
    phases = ("CancelDuration", "Delay", "DeployDuration")
    assert scene.told["lastRestartDuration"] >= sum(scene.told[f"lastRestart{p}"] for p in phases)


def test_without_copies_all_is_read_from_the_storage(lab: Any) -> None:
    scene = Scene(lab, "hashmap", local=False, merging=False)
    assert {_subtask(name) for name in scene.run()} == {0, 1}
    assert scene.told["lastRestartLocalStateSize"] == 0
    assert scene.told["lastRestartRemoteStateSize"] > 0


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_what_is_damaged_is_read_from_the_storage(lab: Any, backend: str) -> None:
    scene = Scene(lab, backend, merging=False)
    hurt: set[str] = set()

    def spoil(path: Path, victim: str) -> None:
        if re.match(r"count-0-", path.name):  # of one subtask, wherever it is
            spoiled(path)
            hurt.add(path.name)

    read = scene.run(spoil)
    assert hurt
    assert read
    assert {_subtask(name) for name in read} == {0}


def test_what_is_missing_is_read_from_the_storage(lab: Any) -> None:
    scene = Scene(lab, "hashmap", merging=False)
    read = scene.run(lambda path, victim: path.unlink())
    assert {_subtask(name) for name in read} == {0, 1}


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_survivors_read_nothing_when_the_disk_of_the_dead_is_gone(lab: Any, backend: str) -> None:
    scene = Scene(lab, backend, merging=False)
    gone: set[str] = set()

    def spoil(path: Path, victim: str) -> None:
        if path.parent.name.startswith(f"{names.local_dir(victim)}-"):
            path.unlink()
            gone.add(path.name)

    read = scene.run(spoil)
    lost = {int(found[1]) for name in gone if (found := re.match(r"count-(\d+)-", name))}
    assert len(lost) == 1
    assert {_subtask(name) for name in read} == lost
    assert scene.told["lastRestartLocalStateSize"] > 0


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_pieces_of_a_damaged_segment_are_read_from_the_storage(lab: Any, backend: str) -> None:
    scene = Scene(lab, backend)
    read = scene.run(lambda path, victim: spoiled(path))
    assert {names.segment_bytes(name) is not None for name in read} == {True}


def _subtask(name: str) -> int:
    found = re.search(r"/count-(\d+)-", name)
    assert found is not None, name
    return int(found[1])
