"""The same seed gives the same run: in this process, and in others with other hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headgate.tests.support.commands import ended_with

SCRIPT = """
import asyncio, hashlib, sys
import headgate as hg
from headgate.connectors import collect, from_list
from headgate.testing import harness

log = []

async def look(n):
    for step in range(n % 3):
        await asyncio.sleep(0)
    return n

class Sum(hg.KeyedProcess):
    total = hg.ValueState[int](default=0)
    def on_record(self, record, ctx):
        self.total.set(self.total.get() + record)
        yield (ctx.key, record, self.total.get())

def run(seed):
    job = hg.Job("job")
    job.checkpoint(every="1h", storage="never-made")
    numbers = job.read(from_list([]), name="in").map(look).rebalance()
    numbers.key_with(lambda n: n % 5).process(Sum(), name="sum").write(
        collect(guarantee="exactly_once"), name="out"
    )
    with harness(job, seed=seed, parallelism=3) as h:
        for start in range(0, 60, 20):
            h.push("in", list(range(start, start + 20)))
            h.checkpoint()
            h.push("in", [start + 100, start + 101])
            h.crash()
        h.rescale(2)
        h.end()
        return h.drain("out")

runs = [run(seed) for seed in range(3)]
print(hashlib.sha256(repr(runs).encode()).hexdigest())
print(len({repr(found) for found in runs}))
print(len({repr(sorted(found)) for found in runs}))
"""


@pytest.fixture(scope="module")
def outputs() -> list[list[str]]:
    found = []
    for hash_seed in ("0", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment
        )
        ended_with(ran, 0)
        found.append(ran.stdout.split())
    return found


def test_a_seed_fixes_the_order_of_everything(outputs: list[list[str]]) -> None:
    assert outputs[0] == outputs[1]


def test_seeds_differ_in_order_only(outputs: list[list[str]]) -> None:
    (_, orders, contents), _ = outputs
    assert int(orders) > 1
    assert contents == "1"
