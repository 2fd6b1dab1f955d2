"""The latency of single records at defaults: `python benchmarks/record_latency.py [--rounds 3]`.

A source makes each record when it is due, at a fixed rate, and stamps it with that time, so that a stall
counts for every record that had to wait for it. The job is `source -> key_with -> reduce -> sink`: one
shuffle, and a result for each record. The sink takes the time since the record was due. The first seconds
of each run are cut off. No option is set unless `--option KEY=VALUE` sets it.

A job of parallelism 1 runs in this process. With a higher one (`--parallelism 1,2`) it runs in worker
processes of this machine that are joined by sockets, as on a cluster. `--windows` measures a count in
tumbling windows of a second instead: the time from the end of a window to its results.

With `--flink` each round also runs the same job as a Flink DataStream (`peers/java/Latency.java`), in a JVM
of its own with a mini cluster, at Flink's defaults with object reuse. Latency is time by the clock, which
other work on the machine makes longer, so the load is printed. The processor time per million records is
that of all processes of the job, start included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import psutil
import pyarrow as pa
from engines import NOT_INSTALLED, FlinkHome, find_flink
from process_cluster import running

import headgate as hg
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.operators.source import Source, SourceReader
from headgate.runtime.cluster.process import tune_process

KEYS = 10_000
BATCH_ROWS = 8_192
BATCH_US = 1_000
"""The source makes a batch at most this often, as one does that gets records over a network."""
WARM_S = 2.0
"""Records that were due in this time after the first one are not counted."""
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
US = 1_000_000
WINDOW_US = US
OPENS = [f"--add-opens=java.base/java.{part}=ALL-UNNAMED" for part in ("util", "lang", "time")]
"""The arguments of Java that let Flink look into its classes."""
Record = tuple[int, int, int]


class Split(msgspec.Struct):
    """The records of one subtask: `rows` of them at `rate` per second; `position` is the next one."""

    number: int
    rows: int
    rate: float
    position: int = 0


class PacedSource(Source[Record]):
    """Makes records (key, 1, time when it was due in µs), or the columns `key`, `at` and `due`."""

    bounded = True

    def __init__(self, rate: float, seconds: float, columns: bool) -> None:
        self._rate = rate
        self._seconds = seconds
        self._columns = columns
        if columns:
            self.schema = pa.schema(
                [("key", pa.int64()), ("at", pa.timestamp("us")), ("due", pa.int64())]
            )

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split per subtask, since the rate is that of the whole source."""
        rate = self._rate / parallelism
        made = [Split(number, int(rate * self._seconds), rate) for number in range(parallelism)]
        return [msgspec.msgpack.encode(split) for split in made]

    def reader(self) -> SourceReader:
        return PacedReader(self._columns)


class PacedReader(SourceReader):
    """Returns the records that have become due since the last poll."""

    def __init__(self, columns: bool) -> None:
        self._columns = columns
        self._split: Split | None = None
        self._began_us = 0
        self._next_us = 0
        """When the next batch may be made, in µs since the beginning."""

    def add_splits(self, splits: Sequence[bytes]) -> None:
        for split in splits:
            self._split = msgspec.msgpack.decode(split, type=Split)
        self._began_us = time.time_ns() // 1000

    def poll(self) -> Batch | None:
        split = self._split
        if split is None or self.finished:
            return None
        elapsed_us = time.time_ns() // 1000 - self._began_us
        if elapsed_us < self._next_us:
            return None
        self._next_us = elapsed_us + BATCH_US
        due = min(int(elapsed_us * split.rate / US) + 1, split.rows)
        count = min(due - split.position, BATCH_ROWS)
        if count <= 0:
            return None
        rows = np.arange(split.position, split.position + count)
        split.position += count
        times = self._began_us + (rows * (US / split.rate)).astype(np.int64)
        keys = (rows * 2_654_435_761 + split.number) % KEYS
        if self._columns:
            at = pa.array(times, pa.timestamp("us"))
            return ColumnBatch(pa.record_batch({"key": keys, "at": at, "due": times}))
        return ObjectBatch(
            [(key, 1, at) for key, at in zip(keys.tolist(), times.tolist(), strict=True)]
        )

    async def wait(self) -> None:
        split = self._split
        if split is not None:
            due_us = self._began_us + max(self._next_us, split.position * US / split.rate)
            await asyncio.sleep(max(0.0, (due_us - time.time_ns() / 1000) / US))

    @property
    def finished(self) -> bool:
        return self._split is None or self._split.position >= self._split.rows

    def snapshot(self) -> list[bytes]:
        return [] if self._split is None else [msgspec.msgpack.encode(self._split)]


class LatencySink(Sink):
    """Notes the latency of each record, and writes them to a file per subtask at the end."""

    guarantees = frozenset(Guarantee)
    guarantee = Guarantee.NONE

    def __init__(self, directory: str, warm_s: float) -> None:
        self._directory = directory
        self._warm_s = warm_s

    def writer(self) -> SinkWriter:
        return LatencyWriter(self._directory, self._warm_s)


class LatencyWriter(SinkWriter):
    """The latencies of one subtask in ms."""

    def __init__(self, directory: str, warm_s: float) -> None:
        self._directory = directory
        self._warm_us = int(warm_s * US)
        self._first_us = 0
        self._found: list[np.ndarray] = [np.empty(0)]

    def write(self, batch: Batch) -> None:
        now_us = time.time_ns() // 1000
        if isinstance(batch, ColumnBatch):
            due = np.asarray(batch.data.column("due"))
        else:
            due = np.fromiter((record[2] for record in batch.records), np.int64, len(batch))
        if not self._first_us:
            self._first_us = int(due[0])
        counted = due[due >= self._first_us + self._warm_us]
        self._found.append((now_us - counted) / 1000)

    def finish(self) -> None:
        path = Path(self._directory, f"latency-{self.context.subtask_index}")
        np.save(path.with_suffix(".part.npy"), np.concatenate(self._found))
        path.with_suffix(".part.npy").rename(path.with_suffix(".npy"))


def make_job(
    rate: float,
    seconds: float,
    parallelism: int,
    options: dict[str, str],
    directory: str,
    windows: bool = False,
) -> hg.Job:
    """The job under measurement; `directory` takes the latencies."""
    job = hg.Job("latency", parallelism=parallelism, options=options)
    read = job.read(PacedSource(rate, seconds, windows), name="due")
    if windows:
        counts = (
            read.event_time("at")
            .key_by("key")
            .window(hg.tumbling("1s"))
            .agg(n=hg.count(), due=hg.max("due"), name="count")
        )
        made = counts.select("n", f"due - due % {WINDOW_US} + {WINDOW_US} AS due", name="end")
    else:
        made = read.key_with(lambda record: record[0]).reduce(
            lambda a, b: (a[0], a[1] + b[1], b[2]), name="count"
        )
    made.write(LatencySink(directory, WARM_S), name="out")
    return job


def measure(
    rate: float, seconds: float, parallelism: int, options: dict[str, str], windows: bool
) -> tuple[np.ndarray, float]:
    """Return the latencies of one run in ms, and the CPU seconds per million records."""
    with tempfile.TemporaryDirectory(prefix="hg-latency-") as directory:
        job = make_job(rate, seconds, parallelism, options, directory, windows)
        cpu_s = run_job(job, parallelism, directory)
        return latencies(directory), cpu_s / (rate * seconds) * US


def measure_flink(
    home: FlinkHome, rate: float, seconds: float, parallelism: int, windows: bool
) -> tuple[np.ndarray, float]:
    """Return the same for one run of the job in Flink."""
    with tempfile.TemporaryDirectory(prefix="hg-latency-") as directory:
        mode = "windows" if windows else "records"
        arguments = [rate, seconds, parallelism, mode, WARM_S, directory]
        began = children_cpu_seconds()
        subprocess.run(
            [
                "java",
                *OPENS,
                "-cp",
                f"{home.jars[0]}:{home.library}",
                "Latency",
                *map(str, arguments),
            ],
            check=True,
            capture_output=True,
        )
        cpu_s = children_cpu_seconds() - began
        return latencies(directory), cpu_s / (rate * seconds) * US


def children_cpu_seconds() -> float:
    """CPU seconds of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_job(job: hg.Job, parallelism: int, directory: str) -> float:
    """Run a job, in this process if its parallelism is 1; return the CPU seconds that it used."""
    if parallelism > 1:
        return asyncio.run(in_processes(job, parallelism, directory))
    began = time.process_time()
    job.run()
    return time.process_time() - began


def latencies(directory: str) -> np.ndarray:
    """Return the latencies in ms that the sinks of headgate or of Flink have written to files."""
    found = [np.load(path) for path in Path(directory).glob("latency-*.npy")]
    found += [np.fromfile(path, ">f8") for path in Path(directory).glob("latency-*.bin")]
    return np.concatenate(found)


async def in_processes(job: hg.Job, parallelism: int, directory: str) -> float:
    """Run a job in worker processes until all its sinks are done; return the CPU seconds they used."""
    own = psutil.Process()
    began = cpu_seconds(own)
    now = began
    async with running(job, directory):
        while len(list(Path(directory).glob("latency-*.npy"))) < parallelism:
            now = cpu_seconds(own)
            await asyncio.sleep(0.05)
    return now - began


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process and its descendants so far."""
    used = [each.cpu_times() for each in [process, *process.children(recursive=True)]]
    return sum(each.user + each.system for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", default="10000,100000", help="records per second")
    parser.add_argument("--parallelism", default="1")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--windows", action="store_true")
    parser.add_argument("--flink", action="store_true", help="in turns with Flink")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    tune_process()
    options = dict(each.split("=", 1) for each in given.option)
    with tempfile.TemporaryDirectory(prefix="hg-latency-jar-") as directory:
        flink = chosen_flink(directory, given.flink)
        print_head(given.rounds)
        for parallelism in map(int, given.parallelism.split(",")):
            for rate in map(float, given.rates.split(",")):
                compare(flink, rate, parallelism, options, given)


def chosen_flink(directory: str, wanted: bool) -> FlinkHome | None:
    """Return where Flink is if it is wanted, or exit because it is not installed."""
    flink = find_flink(Path(directory)) if wanted else None
    if wanted and flink is None:
        raise SystemExit(f"Flink is {NOT_INSTALLED}")
    return flink


def compare(
    flink: FlinkHome | None,
    rate: float,
    parallelism: int,
    options: dict[str, str],
    given: argparse.Namespace,
) -> None:
    """Run all rounds of a rate, and print a line for each engine."""
    runs: dict[str, list[tuple[np.ndarray, float]]] = {"headgate": []}
    if flink is not None:
        runs["flink"] = []
    for _ in range(given.rounds):
        runs["headgate"].append(measure(rate, given.seconds, parallelism, options, given.windows))
        if flink is not None:
            runs["flink"].append(
                measure_flink(flink, rate, given.seconds, parallelism, given.windows)
            )
    for engine, found in runs.items():
        print_row(engine, rate, parallelism, found)


def print_head(rounds: int) -> None:
    """Print the names of the columns of `print_row`."""
    heads = "".join(f"{f'p{percentile:g}':>9}" for percentile in PERCENTILES)
    print(
        f"engine    records/s   p{heads}      max   CPU s per M   load   "
        f"(ms, medians of {rounds}, and the ranges of p50 and p99)"
    )


def print_row(
    engine: str, rate: float, parallelism: int, runs: Sequence[tuple[np.ndarray, float]]
) -> None:
    """Print the medians of runs, each given by its latencies and its CPU seconds per million."""
    rows = [[*np.percentile(each, PERCENTILES), each.max()] for each, _ in runs]
    columns = list(zip(*rows, strict=True))
    figures = "".join(f"{median(each):9.1f}" for each in columns)
    ranges = ", ".join(
        f"{min(columns[at]):.1f}..{max(columns[at]):.1f}" for at in (0, PERCENTILES.index(99.0))
    )
    print(
        f"{engine:<9} {rate:9,.0f} {parallelism:3d}{figures} "
        f"{median(cpu for _, cpu in runs):13.2f} {os.getloadavg()[0]:6.1f}   ({ranges})",
        flush=True,
    )


if __name__ == "__main__":
    main()
