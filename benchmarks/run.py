"""The benchmarks: `make bench`, or `python benchmarks/run.py --help`.

Queries over bids like Nexmark's in headgate, and beside each in Flink SQL (and PyFlink) if it is installed.

How it is measured
- The bids are computed one by one from their numbers, by numpy here and by a source in Java for Flink, the
  same rows; nothing is made before and handed out again. "rows alone" is numpy making the columns of the
  query, without an engine. `--sources parquet` reads the same rows from Parquet; there "rows alone" is
  pyarrow decoding these columns in one thread.
- headgate has its default batches and no option set, and a sink that counts. At parallelism 1 it runs in
  one process that is warm, above that with its coordinator and workers as processes on a local Ray. Of
  each job the first quarter of the records is left out, as the workers are new; the clock runs from there
  until the sink has everything (metering.py).
- Flink runs in a mini cluster in one JVM per query, warmed by a job of the same query. Its time is the
  runtime of the job less that of an empty job. Sinks are `blackhole`.
- The engines take turns: each round runs every case of a query once. Ratios are of the runs of one round:
  their median, and the least and the most.
- CPU seconds are of all processes of the engine, Ray's included. Peak memory is their PSS. "others" is how
  many cores other processes had meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from engines import (
    LAMBDA_EVENTS,
    NOT_INSTALLED,
    PARQUET_ROWS,
    Case,
    Data,
    Flink,
    FlinkHome,
    Headgate,
    find_flink,
)
from measure import HostError, Run
from queries import QUERIES, bare_file, bare_loop, bare_source
from report import Results, text_table

from headgate.runtime.cluster.process import tune_process

Engine = Headgate | Flink
HERE = Path(__file__).parent
RESULTS = HERE / "results"
PEERS = ("flink-sql", "pyflink")
BARE_EVENTS = 500_000
BARE_SOURCE_EVENTS = 2_000_000
HEADGATE, IN_PROCESS = "headgate on Ray", "headgate in-process"
FLINK, PYFLINK = "Flink SQL", "PyFlink"


class Bench:
    """One run of the benchmarks."""

    def __init__(self, options: argparse.Namespace, data: Data, log: Path) -> None:
        self.options = options
        self.results = Results()
        self._data = data
        self._log = log
        self._began = time.monotonic()
        self._kept: dict[str, Engine] = {}
        self._hosts = contextlib.ExitStack()
        self._home = self._find_flink()

    def _find_flink(self) -> FlinkHome | None:
        if not self.options.peers:
            return None
        home = find_flink(RESULTS)
        if home is None:
            self._note(f"Flink SQL and PyFlink are {NOT_INSTALLED}")
        elif not home.parquet and "parquet" in self.options.sources:
            self._note(
                "Flink read no Parquet: put flink-sql-parquet-<version>.jar of Maven Central into "
                "pyflink/lib, or set HEADGATE_BENCH_FLINK_PARQUET_JAR"
            )
        return home

    def _flink_events(self) -> dict[str, int]:
        return self._events({name: query.flink_events for name, query in QUERIES.items()})

    def _events(self, usual: dict[str, int]) -> dict[str, int]:
        if self.options.events:
            return dict.fromkeys(usual, self.options.events)
        return {name: round(events * self.options.scale) for name, events in usual.items()}

    def _note(self, text: str) -> None:
        print(text, flush=True)
        self.results.notes.append(text)

    def run(self) -> None:
        """Run all rounds of each query."""
        with self._hosts:
            for query in self.options.queries:
                self._query(query)

    def _query(self, query: str) -> None:
        with contextlib.ExitStack() as stack:
            in_process = stack.enter_context(self._engine(IN_PROCESS))
            if any(parallelism > 1 for parallelism in self.options.parallelism):
                headgate = stack.enter_context(self._engine(HEADGATE))
            flink = None
            if self._home is not None and "flink-sql" in self.options.peers:
                flink = stack.enter_context(self._engine(FLINK))
            self._check(query, in_process, flink)  # warms up, too
            for _ in range(self.options.runs):
                for source in self.options.sources:
                    self.results.alone[f"{query} {source}"].append(self._alone(query, source))
                for case in self._cases(query):
                    if case.parallelism == 1:
                        self._record(IN_PROCESS, case, in_process)
                    else:
                        self._record(HEADGATE, case, headgate)
                    if flink is not None and (case.source != "parquet" or self._reads_parquet):
                        self._record(FLINK, case, flink)
        if query == "w":
            rate = median(bare_loop(BARE_EVENTS) for _ in range(3))
            self._note(
                f"W's lambdas in a bare Python loop, no engine: {rate / 1e6:.2f} million records/s"
            )
        if self._home is not None and "pyflink" in self.options.peers and query in LAMBDA_EVENTS:
            with self._engine(PYFLINK) as pyflink:
                self._record(PYFLINK, Case(query, "computed", 1, False), pyflink)

    @property
    def _reads_parquet(self) -> bool:
        return self._home is not None and self._home.parquet

    @contextlib.contextmanager
    def _engine(self, name: str) -> Iterator[Engine]:
        """A running engine: Ray for the whole benchmark, the others started for each query if time allows.

        A JVM that has run other queries is slower, and a process that has is bigger.
        """
        engine = self._kept.get(name)
        if engine is None:
            engine = self._start(name)
            if name == HEADGATE or self.options.quick:
                self._kept[name] = engine
                self._hosts.enter_context(engine.host)
            else:
                with engine.host:
                    yield engine
                return
        yield engine

    def _start(self, name: str) -> Engine:
        if name in (HEADGATE, IN_PROCESS):
            cluster = "local" if name == HEADGATE else "in-process"
            events = self._events({key: query.events for key, query in QUERIES.items()})
            return Headgate(cluster, self._data, self._log, events)
        assert self._home is not None
        lambdas = name == PYFLINK
        events = self._events(LAMBDA_EVENTS) if lambdas else self._flink_events()
        return Flink(self._home, self._data, self._log, events, lambdas)

    def _alone(self, query: str, source: str) -> float:
        """Return the CPU seconds per million of the rows of a source without an engine."""
        if source == "computed":
            return bare_source(query, BARE_SOURCE_EVENTS)
        return bare_file(query, str(self._data.file(self._data.rows)))

    def _cases(self, query: str) -> Iterator[Case]:
        options = self.options
        for source, p, checkpoint in itertools.product(
            options.sources, options.parallelism, options.checkpoint
        ):
            yield Case(query, source, p, bool(checkpoint), options.slots)

    def _check(self, query: str, in_process: Engine, flink: Engine | None) -> None:
        """Check that both compute the same from the same rows."""
        for source in self.options.sources:
            try:
                ours = in_process.check(query, source)
                if flink is None or (source == "parquet" and not self._reads_parquet):
                    continue
                theirs = flink.check(query, source)
            except HostError as error:
                self._note(f"{query} from {source} was not compared: {error!r}")
                continue
            same = ours[0] == theirs[0] and math.isclose(ours[1], theirs[1], rel_tol=1e-12)
            text = f"{query} from {source}: {'equal' if same else 'DIFFERENT'}, {ours[0]:,} results"
            self.results.checks.append(text if same else f"{text}: {ours}, Flink {theirs}")
            print(f"  {self.results.checks[-1]}", flush=True)

    def _record(self, name: str, case: Case, engine: Engine) -> None:
        try:
            run = engine.run(case)
        except HostError as error:
            self._note(f"{name}, {case}: {error}")
            if self._kept.pop(name, None) or not engine.host.alive:
                engine.host.close()  # a Ray that lost a part of it fails all that follows
            return
        self.results.runs[name, case].append(run)
        print(f"{time.monotonic() - self._began:5.0f} s  {_line(name, case, run)}", flush=True)


def _line(name: str, case: Case, run: Run) -> str:
    setting = f"{case.query} {case.source} p={case.parallelism}" + " ckpt" * case.checkpoint
    return (
        f"{setting:<24} {name:<20} {run.events / run.seconds / 1e6:8.3f} M records/s over "
        f"{run.seconds:4.1f} s, {run.cpu_seconds / run.events * 1e6:.3f} CPU s/M, "
        f"others {run.foreign_cores:.2f}"
    )


def _list_of(allowed: Sequence[str]) -> object:
    def parse(text: str) -> list[str]:
        values = [] if text == "none" else text.split(",")
        for value in values:
            if value not in allowed:
                raise argparse.ArgumentTypeError(f"`{value}` is none of {', '.join(allowed)}")
        return values

    return parse


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--queries", type=_list_of(list(QUERIES)), default=list(QUERIES), help=",".join(QUERIES))
    add("--sources", type=_list_of(("computed", "parquet")), default=["computed"])
    add("--parallelism", type=_numbers, default=[1, 2])
    add("--checkpoint", type=_numbers, default=[0], help="0: none, 1: one a second")
    add("--events", type=int, help="records per run, for every engine; default: by query")
    add("--scale", type=float, default=1.0, help="this share of the usual records")
    add("--runs", type=int, default=3, help="rounds, of which medians are taken")
    add("--peers", type=_list_of(PEERS), default=["flink-sql"], help="flink-sql,pyflink or none")
    add("--slots", type=int, default=1, help="slots of each worker process of headgate on Ray")
    add("--quick", action="store_true", help="a third of the records, p=1, one JVM for all")
    options = parser.parse_args(arguments)
    if options.quick:
        options.parallelism, options.scale = [1], options.scale / 3
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    RESULTS.mkdir(exist_ok=True)
    tune_process()  # so that rows alone cost what they do in a worker
    with tempfile.TemporaryDirectory(prefix="hg-bench-data-") as directory:
        data = Data(Path(directory), PARQUET_ROWS)
        bench = Bench(options, data, RESULTS / "log.txt")
        try:
            bench.run()
        except KeyboardInterrupt:
            print("stopped; this is what there is so far")
    results = bench.results
    print("\n" + text_table(list(results.rows())) + "\n")
    for line in (*results.checks, *results.notes):
        print(line)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    (RESULTS / f"{stamp}.json").write_text(json.dumps(results.to_json(), indent=1))


if __name__ == "__main__":
    main()
