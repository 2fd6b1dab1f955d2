"""Clients that follow keys: `python benchmarks/changes.py [--seconds S] [--rounds N] [--rate N]`.

A job in a process of its own keeps running aggregates, each with the time of its newest record. Some
clients follow some keys each over the REST API, in turns with nobody who does. For both levels this prints
the changes that arrive; the processor time of the job's process per change, without that of the turns in
which nobody follows (median, and the least and most of the turns); that of the clients; and how long it
took from the newest record in a value until the client had it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from direct_reads import cpu_s

import headgate as hg
from headgate.connectors import blackhole, generator

JOB = "changes"
KEYS = 1_000
CASES = ((1, 100), (10, 10), (100, 1), (100, 10))
"""The numbers of clients, and of the keys that each of them follows."""


def stamped(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the time of the machine."""
    return batch.append_column("t", pa.array([time.time()] * batch.num_rows, pa.float64()))


def make_job(rate: int, storage: str) -> hg.Job:
    """Return a job that changes each of `KEYS` keys in turn."""
    job = hg.Job(JOB, options={"headgate.queries.waiting-max": "10000"})
    job.checkpoint(every="1s", storage=storage)
    rows = job.read(generator({"n": "sequence"}, rate=rate), name="in")
    schema = {"k": "long", "t": "double"}
    by_key = rows.select(f"n % {KEYS} AS k").map_batches(stamped, into=schema).key_by("k")
    state = hg.Queryable("newest", committed=True)
    by_key.agg(n=hg.count(), t=hg.max("t"), queryable=state, name="newest").write(
        blackhole(), name="out"
    )
    return job


def serve(rate: int, storage: str) -> None:
    """Run the job until stdin ends."""
    with make_job(rate, storage).start() as running:
        running.checkpoint()
        print("ready", flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def job_process(rate: int, storage: str) -> Iterator[int]:
    """Run the job in a process of its own, for the block; yields its pid."""
    command = [sys.executable, __file__, "--serve", storage, "--rate", str(rate)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def measured(
    pid: int, level: Any, followers: int, keys: int, seconds: float, rounds: int
) -> dict[str, Any]:
    """Let clients follow keys, and nobody, in turns."""
    took, told, own_s = list[float](), 0, 0.0
    server: list[float] = []
    counts: list[int] = []
    for _ in range(rounds):
        idle = cpu_s(pid)
        await asyncio.sleep(seconds)
        idle = cpu_s(pid) - idle
        some, with_them, theirs = await followed(pid, level, followers, keys, seconds)
        took += some
        counts.append(len(some))
        server.append(with_them - idle)
        own_s += theirs
    took.sort()
    told = len(took)
    per_change = sorted(
        1e6 * used / max(count, 1) for used, count in zip(server, counts, strict=True)
    )
    return {
        "changes/s": round(told / seconds / rounds),
        "CPU s per s of the server": round(statistics.median(server) / seconds, 3),
        "CPU us per change of the server": [
            round(each, 1)
            for each in (statistics.median(per_change), per_change[0], per_change[-1])
        ],
        "CPU us per change of the clients": round(1e6 * own_s / max(told, 1), 1),
        "p50 ms": round(1000 * took[told // 2]) if took else None,
        "p99 ms": round(1000 * took[told * 99 // 100]) if took else None,
    }


async def followed(
    pid: int, level: Any, followers: int, keys: int, seconds: float
) -> tuple[list[float], float, float]:
    """Return how long each change took, and the processor time of the server and of the clients."""
    took, measuring = list[float](), asyncio.Event()

    async def follow(client: hg.query.AsyncQueryClient, first: int, begun: asyncio.Event) -> None:
        own = [(first + number) % KEYS for number in range(keys)]
        async for change in client.follow("newest", *own, level=level):
            begun.set()
            if measuring.is_set():
                now = time.time()
                took.extend(now - row.value["t"] for row in change.rows)

    async with contextlib.AsyncExitStack() as stack:
        tasks, begun = [], [asyncio.Event() for _ in range(followers)]
        for number in range(followers):
            client = await stack.enter_async_context(hg.query.connect_async(JOB))
            following = follow(client, number * keys, begun[number])
            tasks.append(asyncio.create_task(following))
        for each in begun:
            await each.wait()
        measuring.set()
        server, own = cpu_s(pid), time.process_time()
        await asyncio.sleep(seconds)
        server, own = cpu_s(pid) - server, time.process_time() - own
        measuring.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return took, server, own


async def main(rate: int, seconds: float, rounds: int) -> None:
    """Run all cases."""
    with tempfile.TemporaryDirectory() as storage, job_process(rate, storage) as pid:
        await asyncio.sleep(2)
        for level in ("live", "committed"):
            for followers, keys in CASES:
                figures = await measured(pid, level, followers, keys, seconds, rounds)
                print(f"{level}, {followers} x {keys} keys: {json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=5_000, help="records/s of the job")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.rate, given.serve)
    else:
        asyncio.run(main(given.rate, given.seconds, given.rounds))
