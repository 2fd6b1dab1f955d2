"""The benchmarks: `make bench`, or `python benchmarks/run.py --help`.

Nexmark-style queries in headgate, and beside each in Flink SQL and PyFlink where they are installed.

How it is measured
- headgate runs as its users run it: coordinator and workers as processes on a local Ray, records from
  the generator or from Parquet, into a sink that counts them. Of each job the first quarter of the
  records is warm-up; the clock runs from there until the sink has everything (metering.py).
- `headgate in-process` is the same job in one process, without Ray.
- Flink runs in a mini cluster in one JVM, warmed by a job of the same query. Its time is the runtime of
  the job minus that of an empty job. Its bids are the same rows, from a Java source that reads the pools
  of headgate's generator, or from the same Parquet file. Sinks are `blackhole`.
- CPU seconds are of all processes of the engine, Ray's included. Peak memory is their PSS.
- Every round measures all cases; medians are over rounds. Rounds stop when the time is up.
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
    CHECK_ROWS,
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
from queries import QUERIES, bare_loop
from report import Results, markdown, text_table

Engine = Headgate | Flink
HERE = Path(__file__).parent
RESULTS = HERE / "results"
PEERS = ("flink-sql", "pyflink")
BARE_EVENTS = 500_000
HEADGATE, IN_PROCESS, FLINK, PYFLINK = "headgate", "headgate in-process", "Flink SQL", "PyFlink"


class Bench:
    """One run of the benchmarks."""

    def __init__(self, options: argparse.Namespace, data: Data, log: Path) -> None:
        self.options = options
        self.results = Results()
        self._data = data
        self._log = log
        self._began = time.monotonic()
        self._deadline = self._began + options.minutes * 60
        self._ours: dict[tuple[str, str], tuple[int, float]] = {}
        self._kept: dict[str, Engine] = {}
        self._hosts = contextlib.ExitStack()
        self._home = self._find_flink()

    def _find_flink(self) -> FlinkHome | None:
        if not self.options.peers:
            return None
        home = find_flink(RESULTS, max(CHECK_ROWS, *self._flink_events().values()))
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
        share = 2 if self.options.quick else 1
        return {name: events // share for name, events in usual.items()}

    def _note(self, text: str) -> None:
        print(text, flush=True)
        self.results.notes.append(text)

    def run(self) -> None:
        """All rounds, as many as asked for and as fit into the time."""
        with self._hosts:
            for number in range(self.options.runs):
                if number and time.monotonic() > self._deadline:
                    self._note(f"the time was up after {number} of {self.options.runs} rounds")
                    return
                for query in self.options.queries:
                    self._round(query, first=number == 0)

    def _round(self, query: str, first: bool) -> None:
        for case in self._cases(query):
            with self._engine(HEADGATE) as headgate:
                self._record(HEADGATE, case, headgate)
        self._in_process(query, first)
        if self._home is not None:
            self._peers(self._home, query, first)

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

    def _cases(self, query: str) -> Iterator[Case]:
        options = self.options
        for source, p, checkpoint in itertools.product(
            options.sources, options.parallelism, options.checkpoint
        ):
            yield Case(query, source, p, bool(checkpoint))

    def _in_process(self, query: str, first: bool) -> None:
        if query == "w" and first:
            rate = median(bare_loop(BARE_EVENTS) for _ in range(3))
            self._note(
                f"W's lambdas in a bare Python loop, no engine: {rate / 1e6:.2f} million records/s"
            )
        with self._engine(IN_PROCESS) as engine:
            for source in self.options.sources:
                try:
                    self._ours[query, source] = engine.check(query, source)  # warms up, too
                except HostError as error:
                    self._note(f"{IN_PROCESS}, {query} from {source}: {error}")
                    continue
                self._record(IN_PROCESS, Case(query, source, 1, False), engine)

    def _peers(self, home: FlinkHome, query: str, first: bool) -> None:
        if "flink-sql" in self.options.peers:
            with self._engine(FLINK) as flink:
                for case in self._cases(query):
                    if case.source != "parquet" or home.parquet:
                        self._record(FLINK, case, flink)
                if first:
                    self._compare(home, flink, query)
        if first and "pyflink" in self.options.peers and query in LAMBDA_EVENTS:
            with self._engine(PYFLINK) as pyflink:
                self._record(PYFLINK, Case(query, "generator", 1, False), pyflink)

    def _compare(self, home: FlinkHome, flink: Engine, query: str) -> None:
        """Check that Flink computes the same from the same rows."""
        for source in self.options.sources:
            if source == "parquet" and not home.parquet:
                continue
            try:
                ours, theirs = self._ours[query, source], flink.check(query, source)
            except (HostError, KeyError) as error:
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
        f"{run.seconds:.1f} s"
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
    add("--queries", type=_list_of(list(QUERIES)), default=list(QUERIES), help="q0,q1,q2,q5,q7,w")
    add("--sources", type=_list_of(("generator", "parquet")), default=["generator", "parquet"])
    add("--parallelism", type=_numbers, default=[1, 2])
    add("--checkpoint", type=_numbers, default=[0, 1], help="0: none, 1: one a second")
    add("--events", type=int, help="records per run, for every engine; default: by query")
    add("--runs", type=int, default=3, help="rounds, of which medians are taken")
    add("--minutes", type=float, default=7.0, help="no round starts after this long")
    add("--peers", type=_list_of(PEERS), default=list(PEERS), help="flink-sql,pyflink or none")
    add(
        "--quick", action="store_true", help="generator, p=1, no checkpoints, no PyFlink, one round"
    )
    add("--write-docs", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sources, options.parallelism, options.checkpoint = ["generator"], [1], [0]
        options.runs = 1
        options.peers = [peer for peer in options.peers if peer != "pyflink"]  # slow to start
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hg-bench-data-") as directory:
        data = Data(Path(directory), PARQUET_ROWS)
        bench = Bench(options, data, RESULTS / "log.txt")
        try:
            bench.run()
        except KeyboardInterrupt:
            print("stopped; this is what there is so far")
    results = bench.results
    print("\n" + text_table(list(results.rows())) + "\n")
    for line in (*results.goals(), *results.checks, *results.notes):
        print(line)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    (RESULTS / f"{stamp}.json").write_text(json.dumps(results.to_json(), indent=1))
    if options.write_docs:
        how = (__doc__ or "").split("How it is measured\n")[1].strip().replace("- ", "* ")
        (HERE.parent / "docs" / "benchmarks.md").write_text(markdown(results, how))


if __name__ == "__main__":
    main()
