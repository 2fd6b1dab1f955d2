"""Measures the recovery of 1 of 8 workers, with and without state that stays in memory.

`python benchmarks/kept_state.py --keys 1000000`. A job of eight workers, all in this process, counts
records per key, in the state of a process function, or with `--state` in another step: a running aggregate,
sessions, count windows, a `reduce`, or the versions of a join. Once it has all its keys a worker is killed,
several times, each time after a checkpoint. Measured is the processor time of the process from the kill to
the moment at which all subtasks run again: stopping, reading and decoding state, taking it over; and how
many bytes of state are read. The jobs with and without `headgate.recovery.keep-state` take turns. The goal
is a ratio of 0.25: one worker in eight has to read.

With `--state rocksdb` and `--state runs` the state is on disk, in RocksDB (of a process function) or in
sorted runs (of a running aggregate). There the jobs that take turns are those with and without local copies
of the files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import headgate as hg
from headgate.connectors import generator, numbers
from headgate.connectors.generator import sequence
from headgate.operators.clock import SystemClock
from headgate.operators.elements import Batch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.coordinator.clients import LocalClient
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.storage.open_store import open_store

WORKERS = 8
COLUMNS = ("counts", "join", "running", "runs", "sessions")
"""Kinds of state of steps that take columns."""
ON_DISK = ("rocksdb", "runs")
"""Kinds of state on disk."""
RATE = 100_000
"""Records per second, once all keys are there and before."""
DEADLINE_S = 1_200.0


class Count(hg.KeyedProcess[int, int, int]):
    """Counts the records of a key."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: hg.Context[int]) -> None:
        self.seen.set(self.seen.get() + 1)


class Nothing(Sink):
    """Takes what comes."""

    guarantees = frozenset(Guarantee)
    guarantee = Guarantee.NONE

    def writer(self) -> SinkWriter:
        return _NothingWriter()

    def describe(self) -> str:
        return "nothing()"


class _NothingWriter(SinkWriter):
    def write(self, batch: Batch) -> None:
        pass


def make_job(keys: int, directory: str, keeps: bool, state: str) -> hg.Job:
    """It never ends."""
    options = {"io.tmp.dirs": directory}
    kept = ["headgate.recovery.keep-state"]
    if state in ON_DISK:
        options["state.backend.type"] = "rocksdb"
        local = "execution.checkpointing.local-backup.enabled"
        kept = [local, "execution.state-recovery.from-local"]
    options |= dict.fromkeys(kept, str(keeps).lower())
    job = hg.Job(f"bench-kept-{os.getpid()}", parallelism=WORKERS, options=options)
    job.checkpoint(every="3s", timeout="10min", storage=str(Path(directory, "checkpoints")))
    job.restart(attempts=1_000, delay="0s")
    if state in COLUMNS:
        fields = {"number": sequence()}
        rows = generator(fields, rows=1 << 60, rate=RATE, batch_rows=5_000, splits=WORKERS)
        keyed = job.read(rows, name="numbers").select(
            f"number % {keys} AS key", "number", name="keys"
        )
        _of_columns(keyed, state).write(Nothing(), name="out")
        return job
    endless = numbers(1 << 60, rate=RATE, batch_rows=5_000, splits=WORKERS)
    counted = job.read(endless, name="numbers").key_with(lambda n: n % keys)
    if state == "reduce":
        counted.reduce(_total, name="count").write(Nothing(), name="out")
    else:
        counted.process(Count(), name="count").write(Nothing(), name="out")
    return job


def _total(value: int, record: int) -> int:
    return value + record


def _of_columns(rows: Any, state: str) -> Any:
    """The step that is measured. A number is also a time, in ms; no session ends."""
    totals = {"n": hg.count(), "total": hg.sum("number")}
    if state == "counts":
        return rows.key_by("key").window(hg.count_window(10)).agg(**totals, name="count")
    if state in ("running", "runs"):
        return rows.key_by("key").agg(**totals, name="count")
    timed = rows.event_time("number", max_out_of_order="1h", name="time")
    if state == "sessions":
        return timed.key_by("key").window(hg.session("300d")).agg(**totals, name="count")
    few = timed.filter("number % 1000 = 0", name="few").key_by("key")
    versions = timed.select("key", "number AS version", name="versions").key_by("key")
    return few.join_as_of(versions, how="left", name="count")


PLACES = ("Remote", "Local", "Kept")


class Recovery(NamedTuple):
    """What the job took from the failure until all subtasks ran again."""

    cpu_s: float
    read: int
    """Bytes of state that were read from the storage."""
    local: int
    """Bytes that were read from copies on the machine."""
    kept: int
    """Bytes that were not read, as the state was in memory."""

    def __str__(self) -> str:
        sizes = f"{self.read:,} bytes read, {self.local:,} from copies, {self.kept:,} kept"
        return f"{self.cpu_s:.2f} CPU s, {sizes}"


class Run:
    """One job, and the events that it announces."""

    def __init__(self, keys: int, directory: str, keeps: bool, state: str) -> None:
        self._keys = keys
        self._events: asyncio.Queue[PublishedEvent] = asyncio.Queue()
        spec = runnable(make_job(keys, directory, keeps, state)).spec()
        self._cluster = InProcessCluster(clock=SystemClock(), open_store=open_store)
        self._coordinator = JobCoordinator(
            spec, cluster=self._cluster, clock=SystemClock(), open_store=open_store
        )
        self._coordinator.on_event = self._events.put_nowait

    async def _until(self, kind: str, **wanted: Any) -> dict[str, Any]:
        while True:
            event = await self._events.get()
            body: dict[str, Any] = json.loads(event.body)
            if event.kind == kind and wanted.items() <= body.items():
                return body

    async def measure(self, kills: int) -> list[Recovery]:
        """Kill one worker after the other."""
        running = asyncio.create_task(self._coordinator.run())
        client = LocalClient(self._coordinator.clients, asyncio.get_running_loop())
        await self._until("status", status="RUNNING")
        while True:
            vertices = (await client.request("status"))["vertices"]
            if vertices[-1]["records_in"] >= self._keys:
                break
            await asyncio.sleep(0.2)
        took: list[Recovery] = []
        for _ in range(kills):
            while not self._events.empty():
                self._events.get_nowait()
            await self._until("checkpoint", status="COMPLETED")
            await self._until("checkpoint", status="COMPLETED")
            victim = next(worker for worker in self._cluster.workers if worker.alive)
            began = time.process_time()
            victim.kill()
            body = await self._until("recovered")
            cpu_s = time.process_time() - began
            took.append(
                Recovery(cpu_s, *(body[f"lastRestart{place}StateSize"] for place in PLACES))
            )
            print(f"  {took[-1]}", flush=True)
        await client.request("cancel")
        await running
        await self._cluster.close()
        return took


async def measure(keys: int, kills: int, keeps: bool, state: str) -> list[Recovery]:
    """Run one job."""
    with tempfile.TemporaryDirectory(prefix="hg-bench-kept-") as directory:
        async with asyncio.timeout(DEADLINE_S):
            return await Run(keys, directory, keeps, state).measure(kills)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=3, help="per job")
    parser.add_argument("--rounds", type=int, default=2)
    states = ("process", "reduce", "rocksdb", *COLUMNS)
    parser.add_argument("--state", choices=states, default="process")
    chosen = parser.parse_args()
    took: dict[bool, list[Recovery]] = {False: [], True: []}
    for _ in range(chosen.rounds):
        for keeps in (False, True):
            print("kept in memory" if keeps else "all is read", flush=True)
            took[keeps] += asyncio.run(measure(chosen.keys, chosen.kills, keeps, chosen.state))
    read, kept = (median(one.cpu_s for one in took[keeps]) for keeps in (False, True))
    print(f"{chosen.keys:,} keys: {read:.2f} and {kept:.2f} CPU s, a ratio of {kept / read:.2f}")
    read, kept = (median(one.read for one in took[keeps]) for keeps in (False, True))
    print(f"{read:,.0f} and {kept:,.0f} bytes read, a ratio of {kept / max(1, read):.2f}")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:,} MiB of memory at the most")


if __name__ == "__main__":
    main()
