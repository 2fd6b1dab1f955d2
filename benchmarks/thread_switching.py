"""What a shorter switch interval of worker processes costs a job of Python functions.

`python benchmarks/thread_switching.py [--rounds 12] [--events 8000000] [--every 2s]`: a running count per
key, in turns with Python's own interval and with that of worker processes, each run in a process of its
own. It compares processor time, which other processes on the machine disturb less than time by the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from statistics import median

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.runtime.cluster.launch import launch
from headgate.runtime.job import runnable
from headgate.runtime.worker.process import SWITCH_INTERVAL_S, tune_process

PYTHON_S = 0.005
KEYS = 200_000


def run(switch_s: float, events: int, every: str) -> dict[str, float]:
    """Microseconds of processor time per record, and the checkpoints that completed meanwhile."""
    tune_process()
    sys.setswitchinterval(switch_s)
    completed = 0

    def heard(event: object) -> None:
        nonlocal completed
        completed += "completed in" in str(getattr(event, "text", ""))

    with tempfile.TemporaryDirectory(prefix="hg-bench-") as directory:
        job = hg.Job("switching")
        job.options["execution.checkpointing.incremental"] = "false"
        if every:
            job.checkpoint(every=every, storage=directory)
        pairs = job.read(numbers(events, batch_rows=4096, splits=1), name="numbers").map(
            lambda n: (n * 7919 % KEYS, 1)
        )
        counts = pairs.key_with(lambda pair: pair[0]).reduce(
            lambda a, b: (a[0], a[1] + b[1]), name="count"
        )
        counts.write(blackhole(), name="out")
        began = time.process_time()
        asyncio.run(launch(runnable(job).spec(), "in-process", on_event=heard))
        used_s = time.process_time() - began
    return {"us": 1e6 * used_s / events, "checkpoints": completed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--events", type=int, default=8_000_000)
    parser.add_argument("--every", default="", help="checkpoint interval; none without it")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(run(given.one, given.events, given.every)))
        return
    found: dict[float, list[dict[str, float]]] = {PYTHON_S: [], SWITCH_INTERVAL_S: []}
    for _ in range(given.rounds):
        for switch_s, runs in found.items():
            own = ["--one", str(switch_s), "--events", str(given.events), "--every", given.every]
            done = subprocess.run([sys.executable, __file__, *own], capture_output=True, check=True)
            runs.append(json.loads(done.stdout))
    for switch_s, runs in found.items():
        us = median(each["us"] for each in runs)
        print(f"{1000 * switch_s:g} ms: {us:.3f} us per record, {runs}")
    pairs = zip(found[PYTHON_S], found[SWITCH_INTERVAL_S], strict=True)
    print(f"ratio of pairs, median: {median(new['us'] / old['us'] for old, new in pairs):.2f}")


if __name__ == "__main__":
    main()
