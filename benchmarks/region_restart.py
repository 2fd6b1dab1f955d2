"""The cost of a restart of one region out of four, beside that of the whole job: `make bench-regions`.

One job with four pipelines of the same size, each a region with state per key, in one process. A function
of the first pipeline raises, several times, each time after a checkpoint; the restart strategy waits for
nothing. Measured with `jobmanager.execution.failover-strategy` `region` and `full`, by turns:

* time: from the exception to the first record at the sink of everything that restarted. With `full` that is
  the last of four pipelines;
* bytes: state that the restart reads, as the job's status says it (`restore_bytes`).

Shown are the medians, and what `region` needs in percent of `full`. Goal: 40 % at most of both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import defaultdict
from statistics import median
from typing import Any

import headgate as hg
from headgate.connectors import numbers
from headgate.operators.clock import SystemClock
from headgate.operators.elements import Batch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.storage.open_store import open_store

PIPELINES = 4
RATE = 1_000
"""Records per second of each pipeline, once it has all its keys."""
VALUE_BYTES = 1_000
GOAL_PERCENT = 40
DEADLINE_S = 300.0


NOISE = random.Random(1).randbytes(2 * VALUE_BYTES)


class Outside:
    """The events of the job, and what is seen of them, in the same process."""

    def __init__(self) -> None:
        self.fails = False
        self.failed_s = 0.0
        self.first_s: dict[tuple[int, int], float] = {}
        """By pipeline and attempt: when its sink got its first record."""


OUTSIDE = Outside()


class Remember(hg.KeyedProcess[int, int, int]):
    """Some bytes per key."""

    value = hg.ValueState[bytes](default=b"")

    def on_record(self, record: int, ctx: hg.Context[int]) -> list[int]:
        at = record % VALUE_BYTES
        self.value.set(NOISE[at : at + VALUE_BYTES])
        return [record]


class Watched(Sink):
    """Notes the first record of each attempt."""

    guarantees = frozenset({Guarantee.AT_LEAST_ONCE})

    def __init__(self, pipeline: int) -> None:
        self.pipeline = pipeline

    def writer(self) -> SinkWriter:
        return _Writer(self.pipeline)


class _Writer(SinkWriter):
    def __init__(self, pipeline: int) -> None:
        self._pipeline = pipeline

    def write(self, batch: Batch) -> None:
        key = self._pipeline, self.context.attempt
        OUTSIDE.first_s.setdefault(key, time.perf_counter())


def perhaps_fail(record: int) -> int:
    """The function that raises."""
    if OUTSIDE.fails:
        OUTSIDE.fails, OUTSIDE.failed_s = False, time.perf_counter()
        raise RuntimeError("as was wished")
    return record


def make_job(strategy: str, keys: int, storage: str) -> hg.Job:
    """The four pipelines."""
    options = {"jobmanager.execution.failover-strategy": strategy}
    job = hg.Job("regions", parallelism=1, max_parallelism=32, options=options)
    job.checkpoint(every="1h", storage=storage)
    job.restart(attempts=1_000, delay="0ms")
    for pipeline in range(PIPELINES):
        # Every key comes once at full speed, then the rate holds.
        source = numbers(keys, batch_rows=1_000)
        stream = job.read(source, name=f"keys {pipeline}")
        later = job.read(
            numbers(1_000_000_000, rate=RATE, batch_rows=100), name=f"numbers {pipeline}"
        )
        if pipeline == 0:
            later = later.map(perhaps_fail, name="fail")
        both = stream.union(later.map(lambda n: n % 1_000, name=f"few {pipeline}"))
        kept = both.key_with(lambda n: n).process(Remember(), name=f"remember {pipeline}")
        kept.write(Watched(pipeline), name=f"out {pipeline}")
    return job


async def measure(strategy: str, keys: int, failures: int) -> tuple[list[float], list[int]]:
    """Seconds and bytes of each restart."""
    OUTSIDE.first_s.clear()
    took_s, read_bytes = [], []
    happened: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def on_event(event: PublishedEvent) -> None:
        happened[event.text.split(" ")[-1] if event.kind == "status" else event.kind].set()

    with tempfile.TemporaryDirectory(prefix="hg-regions-") as storage:
        clock = SystemClock()
        cluster = InProcessCluster(clock=clock, open_store=open_store)
        spec = runnable(make_job(strategy, keys, storage)).spec()
        coordinator = JobCoordinator(spec, cluster=cluster, clock=clock, open_store=open_store)
        coordinator.on_event = on_event
        running = asyncio.ensure_future(coordinator.run())
        try:
            await happened["RUNNING"].wait()
            await _filled(coordinator, keys)
            for _ in range(failures):
                await _checkpoint(coordinator)
                happened["RUNNING"].clear()
                OUTSIDE.fails = True
                await happened["RUNNING"].wait()
                took_s.append(await _restarted(coordinator))
                read_bytes.append(coordinator._describe()["restore_bytes"])
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await coordinator.close()
            await cluster.close()
    return took_s, read_bytes


async def _filled(coordinator: JobCoordinator, keys: int) -> None:
    """Until all keys are there."""
    while True:
        await asyncio.sleep(0.5)
        read: list[dict[str, Any]] = coordinator._describe()["vertices"]
        full = [v for v in read if v["name"].startswith("keys") and v["records_in"] >= keys]
        if len(full) == PIPELINES:
            return


async def _checkpoint(coordinator: JobCoordinator) -> None:
    from headgate.runtime.coordinator.clients import LocalClient

    client = LocalClient(coordinator.clients, asyncio.get_running_loop())
    await client.request("checkpoint")


async def _restarted(coordinator: JobCoordinator) -> float:
    """Seconds until everything that restarted has sent something."""
    attempt = coordinator._describe()["attempt"]
    whole = coordinator._describe()["exceptions"][-1]
    pipelines = PIPELINES if len(whole["tasks"]) == whole["tasks_total"] else 1
    while True:
        first = [at for (_, own), at in OUTSIDE.first_s.items() if own == attempt]
        if len(first) == pipelines:
            return max(first) - OUTSIDE.failed_s
        await asyncio.sleep(0.005)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=40_000, help="of each pipeline")
    parser.add_argument("--failures", type=int, default=4, help="in each of the rounds")
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start", flush=True)
    seconds: dict[str, list[float]] = {"region": [], "full": []}
    read: dict[str, list[int]] = {"region": [], "full": []}
    for _ in range(chosen.rounds):
        for strategy in seconds:
            measuring = measure(strategy, chosen.keys, chosen.failures)
            took_s, read_bytes = asyncio.run(asyncio.wait_for(measuring, DEADLINE_S))
            seconds[strategy] += took_s
            read[strategy] += read_bytes
    for name, values in (("seconds", seconds), ("bytes", read)):
        part, whole = median(values["region"]), median(values["full"])
        percent = 100 * part / whole
        verdict = "within" if percent <= GOAL_PERCENT else "above"
        print(
            f"{name:8} region {part:12,.2f}  full {whole:12,.2f}  {percent:5.1f} %  "
            f"({verdict} the goal of {GOAL_PERCENT} %)"
        )
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    # What is in `__main__` travels by value, and would not find `OUTSIDE`.
    from headgate.benchmarks import region_restart

    region_restart.main()
