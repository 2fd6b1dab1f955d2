"""Jobs whose functions are called per record, in this process, over records that are in memory already.

`python benchmarks/per_record.py [--rounds N] [--keys N]` prints the processor seconds per million records
of each case, and how far apart the rounds were. `compare.py --only record` sets them against another
checkout.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from metering import MeteredSource, TallySink, read_marks
from premade import Premade, PremadeSource, made

import headgate as hg

KEYS = 100_000
BATCH_ROWS = 8_192
_ROWS = {"hashmap": 256 * BATCH_ROWS, "rocksdb": 64 * BATCH_ROWS}


class Counting(hg.KeyedProcess[int, Any, tuple[int, int]]):
    """A read and a write of a value for each record."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterable[tuple[int, int]]:
        n = self.seen.get() + 1
        self.seen.set(n)
        return ((ctx.key, n),)


class Yielding(hg.KeyedProcess[int, Any, tuple[int, int]]):
    """The same, of which the result is yielded."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterator[tuple[int, int]]:
        n = self.seen.get() + 1
        self.seen.set(n)
        yield ctx.key, n


class Totals(hg.KeyedProcess[int, Any, tuple[int, float]]):
    """A read and a write of a container for each record, which lies encoded in memory."""

    totals = hg.ValueState[dict[str, int]]()

    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterable[tuple[int, float]]:
        totals = self.totals.get() or {"count": 0, "sum": 0}
        totals["count"] += 1
        totals["sum"] += record.price
        self.totals.set(totals)
        return ((ctx.key, totals["sum"] / totals["count"]),)


def _process(function: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda rows: rows.key_by("key").process(function(), name="process")


def _in_event_time(rows: Any) -> Any:
    return _process(Counting)(rows.event_time("ts", max_out_of_order="1s"))


def _reduce(rows: Any) -> Any:
    return rows.key_by("key").reduce(lambda a, b: a if a.price > b.price else b, name="reduce")


def _w(rows: Any) -> Any:
    pairs = rows.map(lambda row: (row.key, 1)).key_with(lambda pair: pair[0])
    return pairs.reduce(lambda a, b: (a[0], a[1] + b[1]), name="count")


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "process, an int per key": (_process(Counting), "hashmap"),
    "process, an int per key, event time": (_in_event_time, "hashmap"),
    "process, an int per key, yielded": (_process(Yielding), "hashmap"),
    "process, a dict per key": (_process(Totals), "hashmap"),
    "process, an int per key, rocksdb": (_process(Counting), "rocksdb"),
    "reduce of columns": (_reduce, "hashmap"),
    "map, key_with, reduce of lambdas": (_w, "hashmap"),
}


def run(name: str, keys: int = KEYS) -> float:
    """Run one case; return the processor seconds per million records behind its warm-up."""
    build, backend = CASES[name]
    rows = _ROWS[backend]
    plan = Premade(keys, False, rows, 1, BATCH_ROWS)
    made(plan)
    gc.collect()  # state that an earlier job left would slow this one down
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        options = {"state.backend.type": backend}
        job = hg.Job(f"per-record-{Path(directory).name}", parallelism=1, options=options)
        stream = job.read(MeteredSource(PremadeSource(plan), directory), name="rows")
        build(stream).write(TallySink(directory, False), name="out")
        job.run()
        steady = read_marks(directory)
    return 1e6 * steady.cpu_s / steady.events


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--only", default="", help="cases whose names have this part")
    options = parser.parse_args()
    print("processor seconds per million records: the least, the median, the most")
    seconds: dict[str, list[float]] = {name: [] for name in CASES if options.only in name}
    for _ in range(options.rounds):
        for name, taken in seconds.items():
            taken.append(run(name, options.keys))
    for name, taken in seconds.items():
        print(f"{name:<40} {min(taken):6.3f} {median(taken):6.3f} {max(taken):6.3f}", flush=True)


if __name__ == "__main__":
    main()
