"""Nexmark's queries in headgate beside Flink SQL: `python benchmarks/nexmark_run.py --help`.

How it is measured
- Both engines read the same Parquet files (written before the clock starts) and drop their results
  into a sink that keeps nothing. They take turns: each round runs every query in both.
- headgate runs on a local Ray, as `run.py` has it, or in one process: the first quarter of the records
  is warm-up, the clock runs from there until the sink has everything.
- Flink is one JVM per query, or for all, warmed by a job of the same query; its time is the runtime of
  the job minus that of a job over files of a few rows.
- Before it is measured, each query runs over few events in Flink, and its number of results and the
  sums of their columns are compared with DuckDB's. Those of headgate are compared in the tests.
- Events are the rows of the streams that a query reads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import nexmark_flink
from engines import HERE, FlinkHome, find_flink
from measure import Host, HostError, Run
from nexmark_files import write_stream
from nexmark_suite import QUERIES, SHARES

CHECK_EVENTS = 100_000
EMPTY_EVENTS = 50
READS = {"q3": ("auction", "person"), "q4": ("auction", "bid"), "q8": ("auction", "person"),
         "q9": ("auction", "bid"), "q20": ("auction", "bid")}  # fmt: skip
"""The streams of a query; else `bid`."""
MILLIONS = {"q0": 3, "q1": 3, "q2": 6, "q3": 12, "q8": 12, "q13": 3, "q14": 3, "q22": 3}
"""Events of all three kinds in the files of a query: seconds of work in either engine."""
USUAL_MILLIONS = 1
SINKS = ("headgate", "Flink SQL")


class Files:
    """The files in a directory, by number of events and parts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, query: str, events: int, parts: int = 1) -> Path:
        """Return the directory of files with the part of this number of events that `query` reads."""
        path = self._directory / f"{events}-in-{parts}"
        for kind in READS.get(query, ("bid",)):
            write_stream(path, kind, events, parts)
        return path


def events_read(query: str, events: int) -> int:
    """Return how many of `events` events of all kinds the query reads."""
    return sum(events * SHARES[kind] // 50 for kind in READS.get(query, ("bid",)))


class Engine:
    """A host that starts when it is first asked for, and again once it has ended or was killed."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = command, log
        self._host: Host | None = None

    def host(self) -> Host:
        """The running host.

        Raises:
            HostError: it does not start.
        """
        if self._host is None or not self._host.alive:
            self.close()
            self._host = Host(self._command, self._log)
        return self._host

    def close(self) -> None:
        """End the host, if there is one."""
        if self._host is not None:
            self._host.close()
            self._host = None


class Bench:
    """One run of the comparison."""

    def __init__(self, options: argparse.Namespace, files: Files, flink: FlinkHome | None) -> None:
        self._options, self._files, self._flink = options, files, flink
        self._log = Path(options.log)
        self.runs: dict[tuple[str, int, str], list[Run]] = defaultdict(list)

    def run(self) -> None:
        """All rounds of one query, then the next; one that fails is reported and left out."""
        ours = [sys.executable, str(HERE / "host.py"), self._options.cluster]
        theirs = [self._flink.python if self._flink else "", str(HERE / "peers" / "flink_sql.py")]
        with (
            closing(Engine(ours, self._log)) as headgate,
            closing(Engine(theirs, self._log)) as jvm,
        ):
            for query in self._options.queries:
                try:
                    flink = jvm.host() if self._flink else None
                    if flink is not None:
                        self._compare(query, flink)
                    self._rounds(query, headgate.host(), flink)
                except HostError as error:
                    print(f"{query}: {error}", flush=True)
                if not self._options.one_jvm:
                    jvm.close()

    def _rounds(self, query: str, headgate: Host, flink: Host | None) -> None:
        millions = self._options.millions or MILLIONS.get(query, USUAL_MILLIONS)
        events = round(millions * 1_000_000)
        for p in self._options.parallelism:
            data = self._files.of(query, events, p)
            empty = None
            if flink is not None:
                flink.ask(self._to_flink(query, data, p))
                few = self._to_flink(query, self._files.of(query, EMPTY_EVENTS), p)
                empty = min((flink.measure(few) for _ in range(2)), key=lambda run: run.seconds)
            for _ in range(self._options.rounds):
                self._record(query, p, SINKS[0], headgate.measure(_to_headgate(query, data, p)))
                if flink is not None and empty is not None:
                    whole = flink.measure(self._to_flink(query, data, p))
                    rows = events_read(query, events)
                    self._record(query, p, SINKS[1], net(whole, empty, rows))
            print(line(query, p, self.runs), flush=True)

    def _record(self, query: str, p: int, engine: str, run: Run) -> None:
        self.runs[query, p, engine].append(run)

    def _to_flink(self, query: str, data: Path, p: int) -> dict[str, Any]:
        assert self._flink is not None
        return {
            "query": query,
            "parallelism": p,
            "checkpoint": False,
            "sums": False,
            "lambdas": False,
            "events": 0,
            "jars": self._flink.jars,
            "tables": nexmark_flink.tables(query, data),
            "sql": nexmark_flink.SQL[query],
        }

    def _compare(self, query: str, flink: Host) -> None:
        """Flink's answer over few events against DuckDB's.

        Raises:
            HostError: they differ.
        """
        if query == "q12":  # windows of the clock: those open at the end never come
            return
        data = self._files.of(query, CHECK_EVENTS)
        with duckdb.connect() as database:
            for kind in READS.get(query, ("bid",)):
                database.execute(f"CREATE VIEW {kind} AS FROM '{data}/{kind}/*.parquet'")
            answer = database.sql(QUERIES[query].sql)
            sums = list(_sums(answer))
            texts = ", ".join(f"sum({text.format(name)})::DOUBLE" for name, text in sums)
            (expected,) = database.sql(f"SELECT count(*), {texts} FROM answer").fetchall()
        asked = ", ".join(f"SUM(CAST({t.format(f'`{n}`')} AS DOUBLE))" for n, t in sums)
        sql = f"SELECT COUNT(*), {asked} FROM ({nexmark_flink.SQL[query]})"
        request = self._to_flink(query, data, 1) | {"sums": True, "check_sql": sql}
        found = flink.ask(request)
        pairs = zip(expected, (found["rows_out"], *found["sums"]), strict=True)
        if not all(same_sum(a, b) for a, b in pairs):
            raise HostError(f"Flink's answer differs: {found} instead of {expected}")


def same_sum(expected: float | None, found: float | None) -> bool:
    """Return True if two engines mean the same sum; None is that of nulls alone."""
    if expected is None or found is None:
        return expected is found
    return math.isclose(expected, found, rel_tol=1e-9)


def _sums(answer: Any) -> Iterator[tuple[str, str]]:
    """Return the values that are added up: numbers, lengths of texts. Times have another type in each
    engine.
    """
    for name, kind in zip(answer.columns, answer.types, strict=True):
        if name not in ("at", "starts", "ends", "date_time"):
            yield name, "char_length({})" if str(kind) == "VARCHAR" else "{}"


def _to_headgate(query: str, data: Path, p: int) -> dict[str, Any]:
    return {
        "suite": "nexmark",
        "query": query,
        "parallelism": p,
        "data": str(data),
        "sums": False,
    }


def net(whole: Run, empty: Run, events: int) -> Run:
    """A run without its start-up."""
    return Run(
        events=events,
        seconds=max(whole.seconds - empty.seconds, 1e-3),
        cpu_seconds=max(whole.cpu_seconds - empty.cpu_seconds, 0.0),
        peak_bytes=whole.peak_bytes,
        answer=whole.answer,
    )


def line(query: str, p: int, runs: dict[tuple[str, int, str], list[Run]]) -> str:
    """A row of the table: rates, their ratio with its range, and CPU seconds."""
    ours, theirs = (runs.get((query, p, engine), []) for engine in SINKS)
    rates = [[run.events / run.seconds / 1e6 for run in found] for found in (ours, theirs)]
    cpu = [[run.cpu_seconds / run.events * 1e6 for run in found] for found in (ours, theirs)]
    cells = [query, QUERIES[query].title, str(p)]
    for engine in (0, 1):
        cells.append(f"{median(rates[engine]):.2f}" if rates[engine] else "-")
    if theirs:
        ratios = sorted(a / b for a, b in zip(*rates, strict=True))
        cells.append(f"**{median(ratios):.1f}** ({ratios[0]:.1f} to {ratios[-1]:.1f})")
        cells.append(f"{median(cpu[1]) / median(cpu[0]):.1f}")
    cells += [f"{median(each):.2f}" for each in cpu if each]
    return "| " + " | ".join(cells) + " |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--queries", type=lambda text: text.split(","), default=list(QUERIES))
    add("--parallelism", type=lambda text: [int(p) for p in text.split(",")], default=[1])
    add("--rounds", type=int, default=3)
    add("--millions", type=float, help="events of all kinds in the files; default: by query")
    add("--cluster", choices=("local", "in-process"), default="local", help="where headgate runs")
    add("--one-jvm", action="store_true", help="quicker, but other queries slow a JVM down")
    add("--data", help="a directory that keeps the files for another run")
    add("--log", default=os.devnull, help="what the engines print")
    add("--json", help="a file for all figures")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="hg-nexmark-") as directory:
        files = Files(Path(options.data or directory).resolve())
        bench = Bench(options, files, find_flink(Path(directory)))
        bench.run()
    if options.json:
        figures = [
            {"query": query, "p": p, "engine": engine, "events": run.events,
             "seconds": run.seconds, "cpu_s": run.cpu_seconds, "peak_bytes": run.peak_bytes}
            for (query, p, engine), runs in bench.runs.items() for run in runs
        ]  # fmt: skip
        Path(options.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
