"""Throughput of the connectors, `python benchmarks/connectors.py [--only kafka,...] [--share S]`.

For each sink a generator makes the records that one subtask writes, and each source is read by one subtask
and dropped, with a checkpoint per second, in this process; servers run in processes of their own. Records
have about 90 bytes as JSON. The sinks and sources take turns, round by round.

The figures are records per second by the clock, and CPU seconds per million records of this process. A
source is measured to its last record, a sink to the end of the job, so with its last commit. From each run
the start-up is subtracted: the median of what the same job took with one record. The table has the medians
of the rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # as in every worker process

from connector_systems import SYSTEMS, System
from report import machine

import headgate as hg
from headgate.connectors import generator, stop_after_idle
from headgate.operators.elements import Batch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.operators.source import Source
from headgate.runtime.cluster.process import tune_process
from headgate.testing.servers.programs import NotAvailableError

IDLE = "3s"
"""Without a record for that long, a source without an end ends. It is no part of what is measured."""


class LastRecord(Sink):
    """Counts records and forgets them; notes the time and the CPU seconds of the process at the last."""

    guarantees = frozenset(Guarantee)
    guarantee = Guarantee.NONE

    def __init__(self, path: str) -> None:
        self._path = path

    def writer(self) -> SinkWriter:
        return _LastRecordWriter(self._path)


class _LastRecordWriter(SinkWriter):
    def __init__(self, path: str) -> None:
        self._path = path
        self._found = (0, 0.0, 0.0)

    def write(self, batch: Batch) -> None:
        self._found = (self._found[0] + len(batch), time.monotonic(), time.process_time())

    def finish(self) -> None:
        Path(self._path).write_text(json.dumps(self._found))


@dataclass
class Figures:
    """The seconds and CPU seconds of the rounds of a connector: of whole runs, and of the start-up."""

    rows: int
    whole: list[tuple[float, float]] = field(default_factory=list)
    start: list[tuple[float, float]] = field(default_factory=list)

    def line(self, name: str) -> str:
        """Return a line of the table."""
        connector, comma, level = name.partition(",")
        seconds, cpu_seconds = self._per_record(0), self._per_record(1)
        rates = [1 / each / 1e3 for each in seconds if each > 0]
        cpu = [each * 1e6 for each in cpu_seconds if each > 0]
        return (
            f"| `{connector}`{comma}{level} | {_spread(rates, len(seconds))} | "
            f"{_spread(cpu, len(cpu_seconds))} |"
        )

    def _per_record(self, kind: int) -> list[float]:
        start = median(each[kind] for each in self.start)
        return [(each[kind] - start) / self.rows for each in self.whole]


def _spread(values: list[float], rounds: int) -> str:
    if len(values) < rounds:
        return "less than the start-up"
    return f"{_number(median(values))} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    """Return a number with about three digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def run(source: Source[Any], sink: Sink | None, rows: int) -> tuple[float, float]:
    """Run a job; return its seconds and CPU seconds, without a sink up to the last record of the source."""
    with tempfile.TemporaryDirectory(prefix="hg-bench-") as directory:
        note = Path(directory) / "last"
        job = hg.Job(f"bench-{Path(directory).name}", parallelism=1)
        job.checkpoint(every="1s", storage=f"{directory}/state")
        read = source if source.bounded or sink else stop_after_idle(source, IDLE)
        job.read(read, name="in").write(sink or LastRecord(str(note)), name="out")
        gc.collect()
        began, cpu = time.monotonic(), time.process_time()
        job.run()
        ended, cpu_ended = time.monotonic(), time.process_time()
        if sink is None:
            count, ended, cpu_ended = json.loads(note.read_text())
            assert count >= rows, f"{count:,} of {rows:,} records came out of {source.describe()}"
        return ended - began, cpu_ended - cpu


def measure_round(system: System, rows: int, figures: dict[str, Figures]) -> None:
    """Write and read all sinks and sources once with one record, and once with all of them."""

    def note(name: str, count: int, found: tuple[float, float]) -> None:
        of = figures.setdefault(name, Figures(rows))
        (of.start if count == 1 else of.whole).append(found)

    for count in (1, rows):
        places = []
        for name, sink in system.sinks.items():
            places.append(system.place(count))
            made = generator(system.fields, rows=count, splits=1)
            note(name, count, run(made, sink(places[-1]), count))
        written = places[0] if places else system.place(count)
        for name, source in system.sources.items():
            note(name, count, run(source(written), None, count))


def measure(only: list[str], share: float, rounds: int, directory: Path) -> None:
    """Measure systems one after the other, and print the lines of the table."""
    print(f"\n{machine()}, load {os.getloadavg()[0]:.1f} at the start\n")
    print("| connector | 1,000 records/s | CPU s per million records |\n|---|---|---|", flush=True)
    missing: dict[str, str] = {}
    for name in only:
        start, whole = SYSTEMS[name]
        rows = max(int(whole * share), 2)
        figures: dict[str, Figures] = {}
        try:
            with start(directory / name, rows) as system:
                for _ in range(rounds):
                    measure_round(system, rows, figures)
        except NotAvailableError as error:
            missing[name] = str(error)
        for connector, each in figures.items():
            print(each.line(connector), flush=True)
    for name, reason in missing.items():
        print(f"\nNot measured: {name}, which cannot be started here: {reason}")
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="Throughput of the connectors.")
    parser.add_argument("--only", default=",".join(SYSTEMS), help="some of the systems")
    parser.add_argument("--share", type=float, default=1.0, help="of the records of each run")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    only = given.only.split(",")
    if unknown := set(only) - set(SYSTEMS):
        parser.error(
            f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}"
        )
    tune_process()
    with tempfile.TemporaryDirectory(prefix="hg-bench-connectors-") as directory:
        measure(only, given.share, given.rounds, Path(directory))


if __name__ == "__main__":
    main()
