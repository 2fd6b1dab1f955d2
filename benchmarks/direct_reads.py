"""Reads of state by key: `python benchmarks/direct_reads.py [--keys N] [--seconds S] [--only-cost]`.

A job in a process of its own keeps running aggregates. This process reads them: at the worker, through the
REST API, and, for comparison, values of the same size in a Redis on this machine. For each it prints the
processor time per key of the server, without that of the idle server, and of the client, and how long
reads took. Then it prints what reads cost a busy job, with some keys per second and without in turns: the
processor time per million records and the records per second, each as the ratio of turns that follow each
other (median, least and most), and how long reads took. The job takes a given number of records per second
first, and then as many as it can.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import headgate as hg
from headgate.connectors import blackhole, generator
from headgate.testing.servers import redis as redis_server

JOB = "direct-reads"
QUIET_RATE = 100
AT_ONCE = 100
MOST_AT_ONCE = 250
CLIENTS = 64
COSTS = (
    ("nothing", 5_000),
    ("clients", 5_000),
    ("callers", 20_000),
    ("many", 20_000),
    ("most", 20_000),
)
"""Kinds of `cost`, and keys per second."""
COMPUTE_S = 50e-6
VALUE = {"n": 1234, "top": 987654, "total": 123456789}
Get = Callable[[int], Awaitable[Any]]


def make_job(keys: int, rate: int, storage: str) -> hg.Job:
    """Return a job with running aggregates of this many keys.

    It takes `rate` records per second; 0: as many as it can.
    """
    job = hg.Job(JOB, options={"headgate.queries.waiting-max": "10000"})
    job.checkpoint(every="5s", storage=storage)
    rows = job.read(generator({"n": "sequence"}, rate=rate or None), name="in")
    by_key = rows.select(f"(n * 7919) % {keys} AS k", "n").key_by("k")
    aggregates: dict[str, Any] = {"n": hg.count(), "top": hg.max("n"), "total": hg.sum("n")}
    state = hg.Queryable("sums", committed=True)
    by_key.agg(**aggregates, queryable=state, name="sums").write(blackhole(), name="out")
    return job


def serve(keys: int, rate: int, storage: str) -> None:
    """Run the job until stdin ends."""
    with make_job(keys, rate, storage).start() as running:
        running.checkpoint()  # it runs, and has values as of a checkpoint
        print("ready", flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def job_process(keys: int, rate: int, storage: str) -> Iterator[int]:
    """Run the job in a process of its own, for the block; yields its pid."""
    command = [sys.executable, __file__, "--serve", storage, "--keys", str(keys)]
    command += ["--rate", str(rate)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


async def measured(
    gets: list[Get], keys: int, seconds: float, pid: int, at_once: int = 1
) -> dict[str, float]:
    """Read random keys for a while, with each of `gets` one after the other.

    A get of `at_once` keys reads those that follow its random one.
    """
    rng, took = random.Random(1), list[float]()
    idle = cpu_s(pid)
    await asyncio.sleep(seconds / 2)
    idle = 2 * (cpu_s(pid) - idle)
    until = time.perf_counter() + seconds

    async def read(get: Get) -> None:
        while (began := time.perf_counter()) < until:
            await get(rng.randrange(keys))
            took.append(time.perf_counter() - began)

    server, client = cpu_s(pid), time.process_time()
    await asyncio.gather(*map(read, gets))
    server, client = cpu_s(pid) - server, time.process_time() - client
    took.sort()
    read = len(took) * at_once
    return {
        "CPU us per key of the server": round(1e6 * (server - idle) / read, 2),
        "CPU us per key of the client": round(1e6 * client / read, 2),
        "keys/s": round(read / seconds),
        "p50 ms": round(1000 * took[len(took) // 2], 2),
        "p99 ms": round(1000 * took[len(took) * 99 // 100], 2),
    }


@contextlib.asynccontextmanager
async def clients(count: int, **more: Any) -> AsyncIterator[list[hg.query.AsyncQueryClient]]:
    """Connect some clients for the block."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(hg.query.connect_async(JOB, **more))
            for _ in range(count)
        ]


def getter(client: hg.query.AsyncQueryClient, level: Any = "live") -> Get:
    async def get(key: int) -> Any:
        return await client.get("sums", key, level=level)

    return get


def many_getter(
    client: hg.query.AsyncQueryClient, keys: int, level: Any = "live", at_once: int = AT_ONCE
) -> Get:
    """Return a get of `at_once` keys."""

    async def get(key: int) -> Any:
        wanted = [(key + 37 * number) % keys for number in range(at_once)]
        return await client.get_many("sums", wanted, level=level)

    return get


async def rates(pid: int, keys: int, seconds: float) -> dict[str, dict[str, float]]:
    """Measure reads of the job and of Redis."""
    found: dict[str, dict[str, float]] = {}
    async with clients(CLIENTS) as many, clients(1, direct=False) as through_rest:
        cases = {
            "worker, 1 caller": [getter(many[0])],
            "worker, 1 client with 64 callers": [getter(many[0])] * 64,
            "worker, 1 client with 256 callers": [getter(many[0])] * 256,
            f"worker, {CLIENTS} clients": [getter(each) for each in many],
            f"worker, {CLIENTS} clients, committed": [getter(each, "committed") for each in many],
            "REST API, 1 caller": [getter(through_rest[0])],
            "REST API, 64 callers": [getter(through_rest[0])] * 64,
        }
        for name, gets in cases.items():
            await measured(gets, keys, 0.3, pid)
            found[name] = await measured(gets, keys, seconds, pid)
        for level in ("live", "committed"):
            gets = [many_getter(many[0], keys, level)]
            name = f"worker, {AT_ONCE} keys per request, {level}"
            found[name] = await measured(gets, keys, seconds, pid, AT_ONCE)
    with (
        tempfile.TemporaryDirectory() as directory,
        redis_server.running(Path(directory), "--appendfsync", "no") as server,
    ):
        found.update(await redis_rates(server, keys, seconds))
    return found


async def redis_rates(server: Any, keys: int, seconds: float) -> dict[str, dict[str, float]]:
    """Measure reads of values of the same size in Redis."""
    import redis.asyncio

    filler = server.client()
    data = json.dumps(VALUE)
    filler.mset({f"k{key}": data for key in range(keys)})
    pid = int(filler.info("server")["process_id"])
    filler.close()
    found = {}
    for count in (1, 64):
        own = [redis.asyncio.Redis(port=server.port, protocol=2) for _ in range(count)]

        def getter_of(client: Any) -> Get:
            async def get(key: int) -> Any:
                return json.loads(await client.get(f"k{key}"))

            return get

        gets = [getter_of(each) for each in own]
        await measured(gets, keys, 0.3, pid)
        found[f"Redis, {count} clients"] = await measured(gets, keys, seconds, pid)
        for each in own:
            await each.aclose()
    return found


class Turn(NamedTuple):
    """The processor time of the job, its records and the keys that were read, all per second."""

    cpu: float
    records: float
    keys: float

    @property
    def cpu_per_record(self) -> float:
        """The processor time per record, reads included."""
        return self.cpu / max(self.records, 1)


async def cost(
    pid: int, keys: int, per_second: int, seconds: float, rounds: int, kind: str
) -> dict[str, Any]:
    """Compare the job with reads and without, in turns.

    The kinds: `clients` are 8 clients with 8 callers each, `callers` are 64 callers of one client, each of
    which reads one key at a time, and `many` and `most` are one caller that reads `AT_ONCE` or
    `MOST_AT_ONCE` keys with each request.
    With `nothing` this process computes for as long as reads would take, and reads nothing: what changes
    then is what a busy neighbour costs the job.
    """
    rng, took, read_keys = random.Random(2), list[float](), 0
    async with clients(8 if kind == "clients" else 1) as some:
        if kind == "nothing":
            gets, at_once = [compute] * 64, 1
        elif kind in ("many", "most"):
            at_once = AT_ONCE if kind == "many" else MOST_AT_ONCE
            gets = [many_getter(some[0], keys, at_once=at_once)]
        else:
            gets, at_once = [getter(some[place % len(some)]) for place in range(64)], 1

        async def timed(get: Get) -> None:
            began = time.perf_counter()
            await get(rng.randrange(keys))
            took.append(time.perf_counter() - began)

        async def read() -> None:
            nonlocal read_keys
            gap_s = len(gets) * at_once / per_second
            began = time.perf_counter()
            turn = 0
            while (now := time.perf_counter()) < began + seconds:
                if now < began + turn * gap_s:
                    await asyncio.sleep(began + turn * gap_s - now)
                turn += 1
                await asyncio.gather(*map(timed, gets))
                read_keys += len(gets) * at_once

        async def turn(reads: bool) -> Turn:
            before = read_keys
            began, used, records = time.perf_counter(), cpu_s(pid), await newest(some[0], keys)
            await (read() if reads else asyncio.sleep(seconds))
            records = await newest(some[0], keys) - records
            took_s = time.perf_counter() - began
            per_s = (read_keys - before) / took_s
            return Turn((cpu_s(pid) - used) / took_s, records / took_s, per_s)

        await turn(True)
        took.clear()
        pairs = [(await turn(False), await turn(True)) for _ in range(rounds)]
    took.sort()
    alone_cpu, alone_records, per_s = (
        statistics.median(each)
        for each in (
            [alone.cpu for alone, _ in pairs],
            [alone.records for alone, _ in pairs],
            [beside.keys for _, beside in pairs],
        )
    )
    return {
        "keys/s": round(per_s),
        "job alone, CPU s per s": round(alone_cpu, 3),
        "job alone, records/s": round(alone_records),
        "CPU per record, with / without": spread(
            beside.cpu_per_record / alone.cpu_per_record for alone, beside in pairs
        ),
        "records/s, with / without": spread(
            beside.records / max(alone.records, 1) for alone, beside in pairs
        ),
        "CPU us per key": spread(
            1e6 * (beside.cpu - alone.cpu_per_record * beside.records) / beside.keys
            for alone, beside in pairs
        ),
        "p50 ms": round(1000 * took[len(took) // 2], 2),
        "p99 ms": round(1000 * took[len(took) * 99 // 100], 2),
    }


async def compute(_: int) -> None:
    """Use the processor time that a read of one key takes here."""
    until = time.thread_time() + COMPUTE_S
    while time.thread_time() < until:
        pass


async def newest(client: hg.query.AsyncQueryClient, keys: int) -> float:
    """Return about how many records the job has taken so far: the newest one of some keys."""
    found = await many_getter(client, keys)(0)
    return float(max(value["top"] for value in found))


def spread(ratios: Iterable[float]) -> list[float]:
    """Return the median, the least and the most."""
    found = sorted(ratios)
    return [round(each, 3) for each in (statistics.median(found), found[0], found[-1])]


async def main(keys: int, rate: int, seconds: float, rounds: int, *, only_cost: bool) -> None:
    """Run all cases."""
    with tempfile.TemporaryDirectory() as storage:
        if not only_cost:
            # With few records: nearly all processor time of the job is that of reads.
            with job_process(keys, QUIET_RATE, f"{storage}/quiet") as pid:
                await asyncio.sleep(2)
                for name, figures in (await rates(pid, keys, seconds)).items():
                    print(f"{name}: {json.dumps(figures)}", flush=True)
        for name, taken in ((f"{rate:,} records/s", rate), ("at full speed", 0)):
            with job_process(keys, taken, f"{storage}/{taken}") as pid:
                await asyncio.sleep(2)
                for kind, per_second in COSTS:
                    figures = await cost(pid, keys, per_second, seconds, rounds, kind)
                    print(f"cost, {name}, {kind}: {json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument(
        "--rate", type=int, default=200_000, help="records/s of the job beside reads"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4, help="of the cost")
    parser.add_argument("--only-cost", action="store_true", help="leave out all other figures")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.keys, given.rate, given.serve)
    else:
        measuring = main(
            given.keys, given.rate, given.seconds, given.rounds, only_cost=given.only_cost
        )
        asyncio.run(measuring)
