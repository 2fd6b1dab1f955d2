"""The processor time of queries of a running aggregate: `python benchmarks/state_queries.py [--keys N]`.

Prints queries of a key, through the REST API, per second of processor time, beside a job that takes 1,000
records/s. Client, REST API, coordinator and subtask are in one process, and all their time counts. The
cases are the numbers of keys per request, and of requests that wait at a time. Reads at the worker are in
`benchmarks/direct_reads.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import headgate as hg
from headgate.connectors import blackhole, generator

CASES = ((1, 1), (1, 64), (25, 1), (25, 16), (250, 1), (250, 8))
ROUNDS = 3


def make_job(keys: int) -> hg.Job:
    """Return a job that counts the records of this many keys."""
    job = hg.Job("state-queries", options={"headgate.queries.waiting-max": "10000"})
    rows = job.read(generator({"n": "sequence"}, rate=1_000), name="in")
    by_key = rows.select(f"n % {keys} AS k", "n").key_by("k")
    sums = by_key.agg(n=hg.count(), top=hg.max("n"), queryable="sums", name="sums")
    sums.write(blackhole(), name="out")
    return job


async def measure(keys: int, asked: int) -> dict[str, float]:
    """Return the queries of a key per second of processor time of each case, the best of some rounds."""
    rng = random.Random(1)
    found: dict[str, float] = {}
    async with hg.query.connect_async("state-queries", direct=False) as state:

        async def ask(requests: int, per_request: int) -> None:
            for _ in range(requests):
                some = [rng.randrange(keys) for _ in range(per_request)]
                await state.query_many("sums", some)

        await ask(10, 10)
        for _ in range(ROUNDS):
            for per_request, at_a_time in CASES:
                requests = max(1, asked // per_request // at_a_time)
                began = time.process_time()
                async with asyncio.TaskGroup() as group:
                    for _ in range(at_a_time):
                        group.create_task(ask(requests, per_request))
                rate = requests * at_a_time * per_request / (time.process_time() - began)
                name = f"{per_request} keys, {at_a_time} at a time"
                found[name] = max(found.get(name, 0), round(rate))
    return found


def main(keys: int, asked: int) -> dict[str, float]:
    """Run all cases; returns the rates."""
    with make_job(keys).start():
        return asyncio.run(measure(keys, asked))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--asked", type=int, default=4_000, help="queries of a key per case")
    arguments = parser.parse_args()
    print(json.dumps(main(arguments.keys, arguments.asked), indent=2))
