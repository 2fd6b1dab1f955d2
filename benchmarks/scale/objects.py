"""The objects and bytes of checkpoints of a real job, with small state merged into segments, and without.

    python benchmarks/scale/objects.py [--slots 8] [--checkpoints 40]

One worker has all slots. Three aggregates keep counts by key in memory, of which a part changes between
checkpoints; checkpoints are taken one after the other, and nothing is kept in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import headgate as hg
from headgate.connectors import blackhole
from headgate.connectors.generator import generator, random_int, sequence
from headgate.operators.clock import SystemClock
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.coordinator.clients import LocalClient
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.protocol.joblog import LogView
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.local import LocalStore
from headgate.runtime.storage.open_store import open_store

KEYS = 20_000
TABLES = 3
MERGING = "execution.checkpointing.file-merging.enabled"
DELAY = "headgate.checkpoint.gather-delay"
INLINE = "execution.checkpointing.data-inline-threshold"


def objects_job(slots: int, storage: str, merging: bool, delay: str) -> hg.Job:
    """Return the job."""
    options = {MERGING: str(merging).lower(), INLINE: "0 b", DELAY: delay}
    job = hg.Job("objects", parallelism=slots, max_parallelism=128, options=options)
    job.checkpoint(every="1h", storage=storage)
    fields = {"n": sequence(), "k": random_int(0, KEYS - 1)}
    read = job.read(generator(fields, rate=5_000), name="read")
    for number in range(TABLES):
        by_key = read.key_by("k").agg(value=hg.sum("n"), name=f"sums-{number}")
        by_key.write(blackhole(), name=f"out-{number}")
    return job


class Objects:
    """The state files of a job's directory: those there are, and all that there ever were."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.written: dict[str, int] = {}

    def look(self) -> int:
        """Note new files; return the bytes of all that there are."""
        there = 0
        for path in self._directory.glob("objects/chk/*/*"):
            if path.suffix not in (".parquet", ".segment"):
                continue  # it is being written
            with contextlib.suppress(FileNotFoundError):  # it has just been deleted
                size = path.stat().st_size
                self.written[str(path)] = size
                there += size
        return there


async def measure(
    slots: int, checkpoints: int, merging: bool, delay: str = "200 ms"
) -> dict[str, float]:
    """Run the job for some checkpoints; return what they cost.

    Args:
        slots: of the only worker.
        checkpoints: the number of them.
        merging: small state shares objects.
        delay: the longest time for which subtasks wait for each other.
    """
    with tempfile.TemporaryDirectory(prefix="hg-bench-objects-") as directory:
        spec = replace(
            runnable(objects_job(slots, directory, merging, delay)).spec(), slots_per_worker=slots
        )
        cluster = InProcessCluster(clock=SystemClock(), open_store=open_store)
        coordinator = JobCoordinator(
            spec, cluster=cluster, clock=SystemClock(), open_store=open_store
        )
        runs = asyncio.Event()

        def note(event: PublishedEvent) -> None:
            if event.kind == "status" and json.loads(event.body)["status"] == "RUNNING":
                runs.set()

        coordinator.on_event = note
        task = asyncio.get_running_loop().create_task(coordinator.run())
        client = LocalClient(coordinator.clients, asyncio.get_running_loop())
        objects, stored, needed = Objects(Path(directory)), 0, 0
        try:
            await runs.wait()
            began = time.monotonic()
            for _ in range(checkpoints):
                await asyncio.sleep(0.1)
                await client.request("checkpoint")
                await asyncio.sleep(0.1)  # what is not needed any more is deleted
                stored = objects.look()
            took_s = time.monotonic() - began - 0.2 * checkpoints
            view: LogView = await JobLog(
                LocalStore(Path(directory) / "objects"), "bench", SystemClock()
            ).load()
            assert view.newest is not None
            handles = view.newest.manifest.handles()
            needed = sum(handle.size_bytes for handle in handles if handle.file is not None)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await coordinator.close()
            await cluster.close()
    return {
        "objects per checkpoint": len(objects.written) / checkpoints,
        "MB written per checkpoint": sum(objects.written.values()) / checkpoints / 1e6,
        "stored / needed": stored / needed,
        "ms per checkpoint": 1000 * took_s / checkpoints,
    }


def main() -> None:
    """Measure both ways, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--checkpoints", type=int, default=40)
    given = parser.parse_args()
    for merging in (False, True):
        figures = asyncio.run(measure(given.slots, given.checkpoints, merging))
        shown = " ".join(f"{name}={value:.3g}" for name, value in figures.items())
        print(f"merging={merging} slots={given.slots} {shown}", flush=True)


if __name__ == "__main__":
    main()
