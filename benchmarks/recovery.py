"""From `kill -9` of a worker to output again: `make bench-recovery`, or `python benchmarks/recovery.py`.

A job of two workers on a local Ray counts records per key, at a fixed rate. Once it has its keys, a worker
is killed, several times, each time after a checkpoint. Measured is the time from the kill to the first
record that the sink gets in the next attempt. The restart strategy waits for nothing, so that its pause
neither counts nor hides anything. Columns: as it is by default, with copies of state on the workers' disks,
with a spare worker, with both. Goals: 3 s at the median, 1 s with a spare.

The checkpoints are in a directory of the same machine: what a restore from a distant storage takes longer
is not in the numbers, and copies can gain nothing but the way through the file system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import headgate as hg
from headgate.connectors import numbers
from headgate.operators.base import OperatorContext
from headgate.operators.elements import Batch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.runtime.cluster.launch import launch
from headgate.runtime.control.job_client import Connect, JobClient, PublishedEvent
from headgate.runtime.job import runnable

LOCAL = {
    "execution.checkpointing.local-backup.enabled": "true",
    "execution.state-recovery.from-local": "true",
}
SPARE = {"slotmanager.redundant-taskmanager-num": "1"}
COLUMNS: dict[str, dict[str, str]] = {
    "default": {},
    "local copies": LOCAL,
    "spare worker": SPARE,
    "both": LOCAL | SPARE,
}
BACKENDS = ("hashmap", "rocksdb")
RATE = 50_000
"""Records per second."""
PHASES = {
    "silent": "lastRestartSilence",
    "stop": "lastRestartCancelDuration",
    "workers": "lastRestartWorkersDuration",
    "read": "lastRestartDownloadStateDuration",
    "open": "lastRestartInitializeStateDuration",
    "deploy, all": "lastRestartDeployDuration",
}
DEADLINE_S = 600.0


class Count(hg.KeyedProcess[int, int, tuple[int, int]]):
    """Counts the records of a key."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: hg.Context[int]) -> list[tuple[int, int]]:
        self.seen.set(self.seen.get() + 1)
        return [(record, self.seen.get())]


class FirstSeen(Sink):
    """Notes when each attempt's first record comes."""

    guarantees = frozenset(Guarantee)
    guarantee = Guarantee.NONE

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def writer(self) -> SinkWriter:
        return _FirstSeenWriter(self._directory)

    def describe(self) -> str:
        return "first_seen()"


class _FirstSeenWriter(SinkWriter):
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._noted = False

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._path = Path(self._directory, f"{context.attempt}-{context.subtask_index}")

    def write(self, batch: Batch) -> None:
        if not self._noted:
            self._noted = True
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(str(time.monotonic()))
            temporary.rename(self._path)


@dataclass
class Victim:
    """A running job, and what is known of it."""

    keys: int
    kills: int
    directory: str
    workers: int
    connect: Connect | None = None
    took_s: list[float] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    _news: asyncio.Queue[tuple[str, dict[str, Any]]] = field(default_factory=asyncio.Queue)

    def on_event(self, event: PublishedEvent) -> None:
        self._news.put_nowait((event.kind, json.loads(event.body)))

    def on_listening(self, connect: Connect) -> None:
        self.connect = connect

    async def until(self, kind: str, **wanted: Any) -> dict[str, Any]:
        while True:
            found, body = await self._news.get()
            if found == kind and wanted.items() <= body.items():
                return body

    async def hunt(self) -> None:
        """Kill a worker again and again, and see how long it takes."""
        await self.until("status", status="RUNNING")
        assert self.connect is not None
        client = await self.connect()
        while True:
            status = await client.request("status")
            if sum(vertex["records_written"] for vertex in status["vertices"]) >= self.keys:
                break
            await asyncio.sleep(0.2)
        for turn in range(self.kills):
            self._forget()
            await self.until("checkpoint", status="COMPLETED")
            workers = await self._everyone(client)
            killed_at = time.monotonic()
            # The oldest have subtasks: a spare is younger than all of them.
            os.kill(workers[turn % 2]["pid"], signal.SIGKILL)
            body = await self.until("recovered")
            self.phases.append(body)
            self.took_s.append(await self._first_record(body["attempt"]) - killed_at)
        await client.request("cancel")
        await client.close()

    async def _everyone(self, client: JobClient) -> list[dict[str, Any]]:
        """The workers, once all are there; a spare has a moment to get ready."""
        while True:
            workers: list[dict[str, Any]] = (await client.request("status"))["workers"]
            if len(workers) >= self.workers:
                await asyncio.sleep(2.0)
                return workers
            await asyncio.sleep(0.1)

    def _forget(self) -> None:
        while not self._news.empty():
            self._news.get_nowait()

    async def _first_record(self, attempt: int) -> float:
        """When the attempt's first record came to the sink."""
        while True:
            found = [path for path in Path(self.directory).glob(f"{attempt}-*") if not path.suffix]
            if found:
                return min(float(path.read_text()) for path in found)
            await asyncio.sleep(0.01)


def make_job(backend: str, keys: int, directory: str, options: Mapping[str, str]) -> hg.Job:
    """It never ends."""
    job = hg.Job(
        f"bench-recovery-{os.getpid()}",
        parallelism=2,
        options={"state.backend.type": backend, "io.tmp.dirs": directory, **options},
    )
    job.checkpoint(every="2s", storage=str(Path(directory, "checkpoints")))
    job.restart(attempts=1_000, delay="0s")
    endless = numbers(1 << 60, rate=RATE, batch_rows=1_000, splits=2)
    counted = job.read(endless, name="numbers").key_with(lambda n: n % keys)
    counted.process(Count(), name="count").write(FirstSeen(directory), name="out")
    return job


async def measure(backend: str, column: str, keys: int, kills: int) -> Victim:
    """Run one job, killed this number of times."""
    with tempfile.TemporaryDirectory(prefix="hg-bench-recovery-") as directory:
        spares = len(COLUMNS[column].keys() & SPARE.keys())
        victim = Victim(keys, kills, directory, 2 + spares)
        job = make_job(backend, keys, directory, COLUMNS[column])
        async with asyncio.timeout(DEADLINE_S):
            running = asyncio.create_task(
                launch(
                    runnable(job).spec(),
                    "local",
                    on_event=victim.on_event,
                    on_listening=victim.on_listening,
                )
            )
            hunting = asyncio.create_task(victim.hunt())
            await asyncio.wait({running, hunting}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not hunting.done():
                hunting.cancel()
                raise SystemExit(f"the job ended by itself: {running.result()}")
            await hunting
            await running
        return victim


def head(backend: str) -> None:
    """Print the head of the table of one backend."""
    print(f"\n{backend}: seconds from kill to output; phases are medians in ms")
    print(f"{'':14} {'median':>7} {'best':>7} {'worst':>7}  {'  '.join(PHASES)}", flush=True)


def show(column: str, victim: Victim) -> None:
    """A row of it."""
    took = victim.took_s
    found = [median(max(0, body[key] or 0) for body in victim.phases) for key in PHASES.values()]
    phases = "  ".join(f"{ms:{len(name)}.0f}" for name, ms in zip(PHASES, found, strict=True))
    print(
        f"{column:14} {median(took):7.2f} {min(took):7.2f} {max(took):7.2f}  {phases}"
        f"  load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=5, help="per job")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: both")
    parser.add_argument("--column", choices=tuple(COLUMNS), action="append", help="default: all")
    chosen = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start", flush=True)
    for backend in chosen.backend or BACKENDS:
        head(backend)
        for column in chosen.column or COLUMNS:
            show(column, asyncio.run(measure(backend, column, chosen.keys, chosen.kills)))


if __name__ == "__main__":
    main()
