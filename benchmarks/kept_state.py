"""Measures the recovery of 1 of 8 workers, with and without state that stays in memory.

`python benchmarks/kept_state.py --keys 1000000`. A job of eight workers, all in this process, counts
records per key, in the state of a process function, or with `--state` in another step: a running aggregate,
sessions, a `reduce`, or the versions of a join. Once
it has all its keys a worker is killed, several times, each time after a checkpoint. Measured is the
processor time of the process from the kill to the moment at which all subtasks run again: stopping, reading
and decoding state, taking it over. The jobs with and without `headgate.recovery.keep-state` take turns. The
goal is a ratio of 0.25: one worker in eight has to read.

`--price` measures a running aggregate alone, without failures: the processor time of batches of random keys
with the option on, as a ratio to that with it off, in turns. A checkpoint is complete after each
`--cut-every` batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

import headgate as hg
from headgate.connectors import generator, numbers
from headgate.connectors.generator import sequence
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.clock import SystemClock
from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.coordinator.clients import LocalClient
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.storage.open_store import open_store
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import make_context

WORKERS = 8
COLUMNS = ("join", "running", "sessions")
"""Kinds of state of steps that take columns."""
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
    job = hg.Job(
        f"bench-kept-{os.getpid()}",
        parallelism=WORKERS,
        options={
            "io.tmp.dirs": directory,
            "headgate.recovery.keep-state": str(keeps).lower(),
        },
    )
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
    if state == "running":
        return rows.key_by("key").agg(**totals, name="count")
    timed = rows.event_time("number", max_out_of_order="1h", name="time")
    if state == "sessions":
        return timed.key_by("key").window(hg.session("300d")).agg(**totals, name="count")
    few = timed.filter("number % 1000 = 0", name="few").key_by("key")
    versions = timed.select("key", "number AS version", name="versions").key_by("key")
    return few.join_as_of(versions, how="left", name="count")


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

    async def measure(self, kills: int) -> list[float]:
        """Return the CPU seconds of each recovery."""
        running = asyncio.create_task(self._coordinator.run())
        client = LocalClient(self._coordinator.clients, asyncio.get_running_loop())
        await self._until("status", status="RUNNING")
        while True:
            vertices = (await client.request("status"))["vertices"]
            if vertices[-1]["records_in"] >= self._keys:
                break
            await asyncio.sleep(0.2)
        took: list[float] = []
        for _ in range(kills):
            while not self._events.empty():
                self._events.get_nowait()
            await self._until("checkpoint", status="COMPLETED")
            await self._until("checkpoint", status="COMPLETED")
            victim = next(worker for worker in self._cluster.workers if worker.alive)
            began = time.process_time()
            victim.kill()
            body = await self._until("recovered")
            took.append(time.process_time() - began)
            print(
                f"  {took[-1]:.2f} s, {body['lastRestartKeptStateSize']:,} bytes kept", flush=True
            )
        await client.request("cancel")
        await running
        await self._cluster.close()
        return took


async def measure(keys: int, kills: int, keeps: bool, state: str) -> list[float]:
    """Run one job."""
    with tempfile.TemporaryDirectory(prefix="hg-bench-kept-") as directory:
        async with asyncio.timeout(DEADLINE_S):
            return await Run(keys, directory, keeps, state).measure(kills)


PRICE_ROWS = 32_768
PRICE_BATCHES = 60


class Forgotten:
    """An output that forgets."""

    def emit(self, batch: Batch) -> None: ...
    def emit_side(self, tag: str, batch: Batch) -> None: ...
    def emit_watermark(self, timestamp: int) -> None: ...
    def emit_idle(self, idle: bool) -> None: ...


def price_batch(keys: np.ndarray) -> ColumnBatch:
    """Records of these keys."""
    return ColumnBatch(pa.RecordBatch.from_arrays([pa.array(keys)] * 2, names=["key", "number"]))


def price(keys: int, cut_every: int, keeps: bool) -> float:
    """Return the CPU seconds per million records of a running aggregate with all its keys."""
    schema = pa.schema([("key", pa.int64()), ("number", pa.int64())])
    named = {"n": hg.count(), "total": hg.sum("number"), "highest": hg.max("number")}
    operator = RunningAggregate(AggregatePlan(("key",), named, schema))
    operator.output = Forgotten()
    operator.open(make_context(options={"headgate.recovery.keep-state": str(keeps).lower()}))
    for first in range(0, keys, PRICE_ROWS):
        operator.process(price_batch(np.arange(first, min(first + PRICE_ROWS, keys))), 0)
    rng = np.random.default_rng(1)
    batches = [price_batch(rng.integers(0, keys, PRICE_ROWS)) for _ in range(PRICE_BATCHES)]
    took, checkpoint = 0.0, 0
    for number, batch in enumerate(batches):
        began = time.process_time()
        if not number % cut_every:
            if checkpoint:
                operator.on_checkpoint_complete(CommitPermit("bench", 1, checkpoint))
            checkpoint += 1
            snapshot = operator.snapshot(checkpoint)
        operator.process(batch, 0)
        took += time.process_time() - began
        if not number % cut_every:
            for cut in snapshot.tables.values():
                cut.make(None)  # by another thread, so it does not count
    operator.close()
    return took * 1e6 / (PRICE_ROWS * PRICE_BATCHES)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=3, help="per job")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--state", choices=("process", "reduce", *COLUMNS), default="process")
    parser.add_argument("--price", action="store_true", help="of normal operation; no failures")
    parser.add_argument("--cut-every", type=int, default=20, help="batches per checkpoint")
    chosen = parser.parse_args()
    if chosen.price:
        pairs = [
            [price(chosen.keys, chosen.cut_every, keeps) for keeps in (False, True)]
            for _ in range(chosen.rounds)
        ]
        for off, on in pairs:
            print(f"  {off:.4f} and {on:.4f} CPU s per million records: {on / off:.2f}")
        print(f"{chosen.keys:,} keys: a ratio of {median(on / off for off, on in pairs):.2f}")
        return
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(chosen.rounds):
        for keeps in (False, True):
            print("kept in memory" if keeps else "all is read", flush=True)
            took[keeps] += asyncio.run(measure(chosen.keys, chosen.kills, keeps, chosen.state))
    read, kept = median(took[False]), median(took[True])
    print(f"{chosen.keys:,} keys: {read:.2f} and {kept:.2f} CPU s, a ratio of {kept / read:.2f}")


if __name__ == "__main__":
    main()
