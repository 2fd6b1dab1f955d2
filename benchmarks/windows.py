"""Sliding windows beside tumbling ones, on one core: `python benchmarks/windows.py [rounds]`.

The same records, in one process, without exchange: rows per second of CPU time, medians of the rounds,
which take turns. `out` is how many rows a sliding window emits per row that comes in: that is what it
costs more.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import pyarrow as pa
from kernels import opened

from headgate.api.steps.aggregates import window_aggregate
from headgate.operators.aggregation.aggregates import AggregatePlan, parse_aggregate
from headgate.operators.base import Operator
from headgate.operators.elements import ColumnBatch
from headgate.operators.windows.kinds import WINDOW_FIELDS, TimeWindow, sliding, tumbling

ROWS = 32_768
POOL = 32
SECONDS = 130
KEYS = (1_000, 100_000)
RATES = (10_000, 100_000, 1_000_000)
"""Records per second of event time."""
AGGREGATES = ("count() sum(price)", "count() max(price)")
SCHEMA = pa.schema([("key", pa.int64()), ("price", pa.int64())])


def bids(keys: int, rate: int) -> Iterator[ColumnBatch]:
    """Two windows of records, and a bit, in order of time."""
    rng = np.random.default_rng(1)
    pool = [
        pa.RecordBatch.from_arrays(
            [pa.array(rng.integers(0, keys, ROWS)), pa.array(rng.integers(1, 10_000, ROWS))],
            schema=SCHEMA,
        )
        for _ in range(POOL)
    ]
    for number in range(rate * SECONDS // ROWS):
        times = np.arange(number * ROWS, (number + 1) * ROWS) * 1000 // rate
        yield ColumnBatch(pool[number % POOL], times)


class Counting:
    """An output that counts rows."""

    def __init__(self) -> None:
        self.rows = 0

    def emit(self, batch: ColumnBatch) -> None:
        self.rows += len(batch)

    def emit_watermark(self, timestamp: int) -> None: ...


def operator_of(window: TimeWindow, aggregates: str) -> Callable[[], Operator]:
    named = {f"a{i}": parse_aggregate(text) for i, text in enumerate(aggregates.split())}
    return window_aggregate(window, AggregatePlan(("key",), named, SCHEMA, WINDOW_FIELDS), "step")


def run(factory: Callable[[], Operator], keys: int, rate: int) -> tuple[float, int, int]:
    """CPU seconds, rows in, rows out."""
    operator, output, spent, rows = opened(factory()), Counting(), 0.0, 0
    operator.output = output
    for batch in bids(keys, rate):
        began = time.process_time()
        operator.process(batch, 0)
        operator.on_watermark(int(batch.timestamps[-1]) - 1)
        spent += time.process_time() - began
        rows += len(batch)
    return spent, rows, output.rows


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)
    libc.mallopt(-1, (1 << 31) - 1)
    gc.freeze()
    gc.disable()
    pa.set_cpu_count(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print("keys     records/s  aggregates           tumbling 60s  sliding 60s/1s  ratio   out")
    windows = {"tumbling": tumbling("60s"), "sliding": sliding("60s", "1s")}
    for keys in KEYS:
        for rate in RATES:
            for aggregates in AGGREGATES:
                spent: dict[str, list[float]] = {name: [] for name in windows}
                for _ in range(rounds):
                    for name, window in windows.items():
                        seconds, rows, out = run(operator_of(window, aggregates), keys, rate)
                        spent[name].append(seconds)
                slow, fast = median(spent["sliding"]), median(spent["tumbling"])
                print(
                    f"{keys:<8,} {rate:<10,} {aggregates:<20} {rows / fast / 1e6:10.1f} M"
                    f" {rows / slow / 1e6:13.1f} M {slow / fast:6.2f} {out / rows:5.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
