"""Checkpoints of jobs that keep up: what they take as the state grows, and as the job does.

After figure 9 of Carbone et al., "State Management in Apache Flink" (VLDB 2017), in small: snapshots
may take longer with more state, alignment must not; it grows with parallelism and the shuffles on a path.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import charts
from checkpoint_figures import REMEMBERED, Figures, figures
from process_cluster import running

import headgate as hg
from headgate.connectors import blackhole
from headgate.connectors.generator import generator, random_int, sequence

KEYS = (50_000, 200_000, 800_000)
FILL_S, MEASURED_S = 10.0, 10.0
"""In the first part each key comes once; what comes then changes one of a hundred per second."""
PARALLELISMS, SHUFFLES = (1, 2, 4), (1, 2, 3)
_INCREMENTAL = "execution.checkpointing.incremental"


def state_job(keys: int, incremental: bool, storage: str) -> hg.Job:
    """A sum per key at parallelism 2, of `keys` keys once they are filled."""
    name = f"bench-state-size-{keys}-{incremental}-{os.getpid()}"
    job = hg.Job(name, parallelism=2, options=_options({_INCREMENTAL: str(incremental).lower()}))
    job.checkpoint(every="1s", storage=storage)
    fill = generator({"key": sequence(), "value": random_int(0, 9)}, rows=keys, rate=keys / 8)
    more = generator({"key": random_int(0, keys), "value": random_int(0, 9)}, rate=keys / 100)
    stream = job.read(fill, name="fill").union(job.read(more, name="changes"), name="all")
    stream.key_by("key").agg(value=hg.sum("value"), name="sums").write(blackhole(), name="out")
    return job


def shuffle_job(parallelism: int, shuffles: int, storage: str) -> hg.Job:
    """Return a job with this number of shuffles in a row, each by the result of the step before it."""
    name = f"bench-shuffles-{parallelism}-{shuffles}-{os.getpid()}"
    job = hg.Job(name, parallelism=parallelism, options=_options({}))
    job.checkpoint(every="1s", storage=storage)
    fields = {"key": random_int(0, 1_000), "value": random_int(0, 1_000)}
    stream: Any = job.read(generator(fields, rate=20_000), name="records")
    for number in range(shuffles):
        key, value = ("key", "value") if number % 2 == 0 else ("value", "key")
        stream = stream.key_by(key).agg(**{value: hg.max(value)}, name=f"step{number}")
    stream.write(blackhole(), name="out")
    return job


def _options(more: dict[str, str]) -> dict[str, str]:
    return {"web.checkpoints.history": str(REMEMBERED), **more}


async def _measure(make: Any, warm_s: float, *arguments: Any) -> Figures:
    with tempfile.TemporaryDirectory(prefix="hg-bench-scaling-") as directory:
        job = make(*arguments, str(Path(directory, "checkpoints")))
        async with running(job, directory) as client:
            await asyncio.sleep(warm_s)
            since_ms = 1000 * time.time()
            await asyncio.sleep(MEASURED_S)
            return await figures(client, since_ms)


async def scaling() -> dict[str, str]:
    """Run all jobs, print the tables, and return the charts by name."""
    by_size = await _by_state_size()
    by_width = await _by_parallelism()
    sizes = [f"{keys:,} keys" for keys in KEYS]
    drawn = {
        "snapshot-duration": charts.lines(
            "snapshot against size of the state", "ms", sizes,
            {name: [f.async_part for f in found] for name, found in by_size.items()},
        ),
        "snapshot-alignment": charts.lines(
            "alignment against size of the state", "ms", sizes,
            {name: [f.path_alignment for f in found] for name, found in by_size.items()},
        ),
        "alignment-shuffles": charts.lines(
            "alignment along the path", "ms", [f"parallelism {p}" for p in PARALLELISMS],
            {f"{n} shuffles" if n > 1 else "1 shuffle": [f.path_alignment for f in found]
             for n, found in by_width.items()},
        ),
    }  # fmt: skip
    return {name: charts.svg(figure) for name, figure in drawn.items()}


async def _by_state_size() -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {}
    print("\n| keys | checkpoints | snapshot, ms | end to end, ms | alignment, ms | new, kB | state, kB |"
          "\n|---|---|---|---|---|---|---|")  # fmt: skip
    for name, incremental in (("full", False), ("incremental", True)):
        found[name] = await asyncio.gather(
            *(_measure(state_job, FILL_S, keys, incremental) for keys in KEYS)
        )
        for keys, f in zip(KEYS, found[name], strict=True):
            print(f"| {keys:,} | {f.count} {name} | {f.async_part:,.0f} | {f.end_to_end:,.0f} "
                  f"| {f.path_alignment:,.0f} | {f.new_bytes / 1e3:,.0f} "
                  f"| {f.state_bytes / 1e3:,.0f} |", flush=True)  # fmt: skip
    return found


async def _by_parallelism() -> dict[int, list[Figures]]:
    found: dict[int, list[Figures]] = {}
    print("\n| shuffles | parallelism | checkpoints | alignment along the path, ms | end to end, ms |"
          "\n|---|---|---|---|---|")  # fmt: skip
    for shuffles in SHUFFLES:
        found[shuffles] = await asyncio.gather(
            *(_measure(shuffle_job, 4.0, parallelism, shuffles) for parallelism in PARALLELISMS)
        )
        for parallelism, f in zip(PARALLELISMS, found[shuffles], strict=True):
            print(f"| {shuffles} | {parallelism} | {f.count} | {f.path_alignment:,.0f} "
                  f"| {f.end_to_end:,.0f} |", flush=True)  # fmt: skip
    return found
