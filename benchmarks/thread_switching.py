"""Costs and benefits of a shorter switch interval of worker processes in a job of Python functions.

`python benchmarks/thread_switching.py [--rounds 12] [--events 8000000] [--every 2s]`: a running count per
key, in turns with Python's own interval and with that of worker processes, each run in a process of its
own. It compares processor time, which other processes on the machine disturb less than time by the clock.

`python benchmarks/thread_switching.py --delays [--rounds 30]`: how long a heartbeat, and the write of a
snapshot's file, take in threads beside a function that computes. Here time by the clock is what matters.
Both intervals take turns every second in one process, so that other processes disturb both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Self

import headgate as hg
from headgate.connectors import blackhole, numbers
from headgate.runtime.cluster.launch import launch
from headgate.runtime.cluster.process import SWITCH_INTERVAL_S, tune_process
from headgate.runtime.job import runnable

PYTHON_S = 0.005
KEYS = 200_000
TURN_S = 1.0
PAUSE_S = 0.02
PIECES = 16
PIECE = bytes(65_536)


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


class Beside:
    """Two threads beside one that computes: they note how long what they do takes, in ms."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "file")
        self._over = threading.Event()
        self.found: dict[str, list[float]] = {"heartbeat": [], "file": []}
        self._threads = [
            threading.Thread(target=self._repeat, args=each)
            for each in (("heartbeat", self._beat), ("file", self._write))
        ]
        self._ours, self._theirs = socket.socketpair()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._ours.close()
        self._theirs.close()

    def _repeat(self, what: str, do: Callable[[], None]) -> None:
        while not self._over.is_set():
            due = time.perf_counter() + PAUSE_S
            time.sleep(PAUSE_S)
            do()
            self.found[what].append(1000 * (time.perf_counter() - due))

    def _beat(self) -> None:
        self._ours.send(b"beat")
        self._theirs.recv(4)

    def _write(self) -> None:
        with open(self._path, "wb", buffering=0) as file:
            for _ in range(PIECES):
                file.write(PIECE)
        os.replace(self._path, f"{self._path}.done")


def compute(until: float) -> int:
    """A function that computes in Python, and never gives the lock away by itself."""
    counts: dict[int, int] = {}
    number = 0
    while time.perf_counter() < until:
        for _ in range(1000):
            number += 1
            key = number * 7919 % KEYS
            counts[key] = counts.get(key, 0) + 1
    return number


def delays(switch_s: float, directory: str) -> dict[str, float]:
    """Medians of one turn, in ms."""
    sys.setswitchinterval(switch_s)
    with Beside(directory) as beside:
        compute(time.perf_counter() + TURN_S)
    return {what: median(each) for what, each in beside.found.items()}


def compare_delays(rounds: int) -> None:
    """Print what both intervals make of the same two things."""
    tune_process()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # the disk is not what is compared
    turns: dict[float, list[dict[str, float]]] = {PYTHON_S: [], SWITCH_INTERVAL_S: []}
    with tempfile.TemporaryDirectory(prefix="hg-bench-", dir=memory) as directory:
        for _ in range(rounds):
            for switch_s, found in turns.items():
                found.append(delays(switch_s, directory))
    for what in ("heartbeat", "file"):
        old, new = ([turn[what] for turn in found] for found in turns.values())
        ratios = sorted(a / b for a, b in zip(old, new, strict=True))
        print(
            f"{what}: {median(old):.2f} ms at {1000 * PYTHON_S:g} ms, {median(new):.2f} ms at "
            f"{1000 * SWITCH_INTERVAL_S:g} ms; ratio of pairs, median: {median(ratios):.1f} "
            f"({ratios[0]:.1f} to {ratios[-1]:.1f}); load {os.getloadavg()[0]:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--events", type=int, default=8_000_000)
    parser.add_argument("--every", default="", help="checkpoint interval; none without it")
    parser.add_argument("--delays", action="store_true", help="of threads beside a function")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(run(given.one, given.events, given.every)))
        return
    if given.delays:
        compare_delays(given.rounds)
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
