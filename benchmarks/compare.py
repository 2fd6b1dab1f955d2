"""Compares two checkouts: `python benchmarks/compare.py OTHER [--only PART] [--rounds 7]`.

Every case runs in both, in turns, each in a process of its own with the environment of its checkout
(`OTHER/.venv`). A case is one of the other benchmarks' (kernels, windows, joins, snapshots, keyed
aggregation in a job) or a query of Nexmark in one process. What counts is the processor time of the
process, so that other processes weigh less. The ratio is the time of this checkout over that of the
other one: its median over the rounds, with the quartiles, and that of the shortest times.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # as in every worker process
HERE = Path(__file__).resolve()
Case = Callable[[], Callable[[], float]]
"""Prepares a case; what it returns runs it once and gives the seconds of processor time."""
LEAST_SECONDS = 0.3
"""A case that takes less is run several times per round."""
EVENTS, EVENTS_OF_SLOW = 3_000_000, 500_000
SLOW = ("q4", "q9", "q15", "q16", "q17", "q18")
"""The queries of Nexmark of which fewer events are enough: a job's start must not be what counts."""
SNAPSHOTS = 20
BATCHES_BETWEEN = 10


# -- in the process of a checkout -----------------------------------------------------------------


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs `run` and gives the processor time of the process."""

    def measure() -> float:
        began = time.process_time()
        run()
        return time.process_time() - began

    return measure


def kernel_cases() -> Iterator[tuple[str, Case]]:
    import kernels

    for name, make in kernels.cases():
        yield name, lambda make=make: timed(make())


def window_cases() -> Iterator[tuple[str, Case]]:
    import windows

    kinds = {
        "tumbling": windows.tumbling("60s"),
        "sliding": windows.sliding("60s", "1s"),
    }
    for keys, rate in ((1_000, 10_000), (1_000, 100_000), (100_000, 10_000), (100_000, 100_000)):
        for aggregates, (name, kind) in product(windows.AGGREGATES, kinds.items()):
            factory = windows.operator_of(kind, aggregates)
            title = f"{name}, {aggregates}, {keys:,} keys, {rate:,} rows per second of event time"
            yield title, lambda f=factory, k=keys, r=rate: lambda: windows.run(f, k, r)[0]


def join_cases() -> Iterator[tuple[str, Case]]:
    import joins

    for name, (make, _, every) in joins.CASES.items():
        for keys, rows in ((100_000, 1_000_000), (100, 100_000)):

            def prepare(make: Any = make, keys: int = keys, rows: int = rows, every: int = every):
                batches = list(joins.records(keys, rows, every))
                return lambda: joins.vectorised(make(), batches)[0]

            yield f"{name}, {keys:,} keys", prepare


def snapshot_cases() -> Iterator[tuple[str, Case]]:
    import state_operators

    for kind in state_operators.KINDS:

        def pauses(kind: str = kind):
            return timed(
                lambda: state_operators.snapshot_pauses(kind, 500_000, SNAPSHOTS, BATCHES_BETWEEN)
            )

        yield f"{kind}, 500,000 keys", pauses


def job_cases() -> Iterator[tuple[str, Case]]:
    import state_jobs
    from premade import Premade

    for kind, keys in product(("running", "tumbling"), (1_000, 1_000_000)):
        plan = Premade(keys, False, 128 * 8_192, 4, 8_192)

        def prepare(kind: str = kind, plan: Premade = plan):
            return lambda: plan.rows / state_jobs.run_premade(kind, plan).cpu_rate

        yield f"{kind}, {keys:,} keys", prepare


def record_cases() -> Iterator[tuple[str, Case]]:
    import per_record

    for name in per_record.CASES:
        yield name, lambda name=name: lambda: per_record.run(name)


def nexmark_cases() -> Iterator[tuple[str, Case]]:
    import nexmark_suite
    from metering import TallySink

    import headgate as hg

    def run(name: str) -> None:
        with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
            job = hg.Job(f"compare-{name}", parallelism=1)
            events = EVENTS_OF_SLOW if name in SLOW else EVENTS
            streams = nexmark_suite.Streams(job, events, batch_rows=8_192)
            result = nexmark_suite.QUERIES[name].build(streams)
            result.write(TallySink(directory, False), name="out")
            job.run()

    for name in nexmark_suite.QUERIES:
        yield name, lambda name=name: timed(lambda: run(name))


GROUPS = {
    "kernel": kernel_cases,
    "window": window_cases,
    "join": join_cases,
    "snapshot": snapshot_cases,
    "job": job_cases,
    "record": record_cases,
    "nexmark": nexmark_cases,
}


def every_case() -> Iterator[tuple[str, Case]]:
    """Yield the cases that the checkout has: an old one may be without a benchmark."""
    for group, cases in GROUPS.items():
        with suppress(ModuleNotFoundError):
            for name, case in cases():
                yield f"{group}: {name}", case


def serve(checkout: Path) -> None:
    """Run the cases of one checkout: names on stdin, seconds on stdout, one a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    sys.path[0] = str(checkout / "benchmarks")
    import pyarrow as pa

    import headgate

    assert Path(headgate.__file__).resolve().parent == checkout, headgate.__file__
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)
    libc.mallopt(-1, (1 << 31) - 1)
    pa.set_cpu_count(1)
    found = dict(every_case())
    print(json.dumps(list(found)), file=answers, flush=True)
    gc.freeze()
    case, run, times = "", timed(gc.collect), 1
    for line in sys.stdin:
        if line != case:
            case, run = line, found[line.rstrip("\n")]()
            run()  # warm-up
            times = max(1, round(LEAST_SECONDS / max(run(), 1e-6)))
        gc.collect()
        print(sum(run() for _ in range(times)) / times, file=answers, flush=True)


# -- in the process that compares -----------------------------------------------------------------


class Checkout:
    """The process of a checkout."""

    def __init__(self, path: Path) -> None:
        command = [str(path / ".venv/bin/python"), str(HERE), str(path), "--serve"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.cases: list[str] = self._answer()

    def seconds(self, case: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended: {self._process.args}")
        return json.loads(line)


def compare(case: str, here: Checkout, other: Checkout, rounds: int) -> float:
    """Print the line of a case; return its ratio."""
    times: dict[Checkout, list[float]] = {here: [], other: []}
    for number in range(rounds):
        for checkout in (here, other) if number % 2 else (other, here):
            times[checkout].append(checkout.seconds(case))
    ratios = [a / b for a, b in zip(times[here], times[other], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    best = min(times[here]) / min(times[other])
    cells = f"{median(times[other]):8.3f} {median(times[here]):8.3f}"
    print(f"{case:<76} {cells} {middle:6.2f} ({low:.2f} to {high:.2f}) {best:6.2f}", flush=True)
    return middle


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout, with its .venv")
    parser.add_argument("--only", default="", help="cases whose names have this part")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.other.resolve())
        return
    print(f"{'case':<76}    other     here  ratio (quartiles)    best")
    with ExitStack() as stack:
        here, other = Checkout(HERE.parent.parent), Checkout(options.other.resolve())
        stack.callback(here.close)
        stack.callback(other.close)
        cases = [case for case in here.cases if case in other.cases and options.only in case]
        ratios = [compare(case, here, other, options.rounds) for case in cases]
        left = [case for case in here.cases if case not in other.cases and options.only in case]
    print(f"{'geometric mean':<76} {'':17} {geometric_mean(ratios):6.2f}")
    if left:
        print(f"The other checkout does not have: {'; '.join(left)}")


if __name__ == "__main__":
    main()
