"""Joins alone, in process, beside a plain loop with a dict: `python benchmarks/joins.py [--full]`.

- `interval`: two streams of equal rates; each left row meets the right ones of its key that are up to 10 s
  older. 100,000 keys: some rows meet one. 100 keys: each row meets hundreds.
- `window`: the same streams in tumbling windows of 10 s, inner.
- `as of`: each row with the newest version of its key; one row in ten is a version.
The loop does the same, record by record, on lists in dicts, with tuples as records and results.
Rows are those of both inputs; the watermark follows each batch at a distance of a second of event time.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from headgate.operators.base import Operator
from headgate.operators.elements import WATERMARK_MAX, Batch, ColumnBatch
from headgate.operators.joins.as_of import AsOfJoin
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep
from headgate.operators.joins.windowed import WindowJoin
from headgate.operators.origin import Origin
from headgate.operators.windows.kinds import tumbling
from headgate.testing.connectors import make_context

BATCH_ROWS = 8_192
ROWS_PER_MS = 10
REACH_MS = 10_000
DELAY_MS = 1_000
SCHEMAS = tuple(
    pa.schema([("key", pa.int64()), (value, pa.float64()), (text, pa.string())])
    for value, text in (("price", "item"), ("amount", "place"))
)
Records = Iterator[tuple[int, ColumnBatch]]


class Counting:
    """An output that only counts."""

    def __init__(self) -> None:
        self.rows = 0

    def emit(self, batch: Batch) -> None:
        self.rows += len(batch)

    def emit_side(self, tag: str, batch: Batch) -> None: ...
    def emit_watermark(self, timestamp: int) -> None: ...
    def emit_idle(self, idle: bool) -> None: ...


def records(keys: int, rows: int, every: int) -> Records:
    """Batches of both sides in turn, with a fixed share of the second one; slightly out of order."""
    rng = np.random.default_rng(1)
    texts = pa.array([f"item-{number}" for number in range(1_000)])
    for number, first in enumerate(range(0, rows, BATCH_ROWS)):
        side = int(number % every == every - 1)
        times = np.arange(first, first + BATCH_ROWS) // ROWS_PER_MS
        times -= rng.integers(0, DELAY_MS // 2, BATCH_ROWS)
        columns = [
            pa.array(rng.integers(0, keys, BATCH_ROWS)),
            pa.array(rng.random(BATCH_ROWS)),
            texts.take(pa.array(rng.integers(0, len(texts), BATCH_ROWS))),
        ]
        yield side, ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=SCHEMAS[side]), times)


def step() -> JoinStep:
    keys = (("key",), ("key",))
    columns = join_columns(SCHEMAS, keys, (False, False), None, ("l", "r"), Origin(""))
    return JoinStep("join", columns, (False, False))


def vectorised(operator: Operator, batches: list[tuple[int, ColumnBatch]]) -> tuple[float, int]:
    """Seconds of CPU and result rows."""
    output = Counting()
    operator.output = output
    operator.open(make_context(operator_name="join"))
    began = time.process_time()
    for side, batch in batches:
        assert batch.timestamps is not None
        operator.process(batch, side)
        operator.on_watermark(int(batch.timestamps[-1]) - DELAY_MS)
    operator.on_watermark(WATERMARK_MAX)
    return time.process_time() - began, output.rows


# --- the loops ----------------------------------------------------------------------------------


def tuples(batch: ColumnBatch) -> Iterator[tuple[int, tuple[object, ...]]]:
    assert batch.timestamps is not None
    columns = (column.to_numpy(zero_copy_only=False).tolist() for column in batch.data.columns)
    return zip(batch.timestamps.tolist(), zip(*columns, strict=True), strict=True)


def interval_loop(batches: list[tuple[int, ColumnBatch]]) -> int:
    waiting: tuple[defaultdict[object, deque[tuple[int, tuple[object, ...]]]], ...]
    waiting = (defaultdict(deque), defaultdict(deque))
    made, watermark = 0, 0
    for side, batch in batches:
        before, behind = (-REACH_MS, 0) if side == 0 else (0, REACH_MS)
        for at, row in tuples(batch):
            if at < watermark:
                continue
            others = waiting[1 - side][row[0]]
            while others and others[0][0] < watermark - REACH_MS:
                others.popleft()
            results = [
                (row, other, max(at, then))
                for then, other in others
                if at + before <= then <= at + behind
            ]
            made += len(results)
            waiting[side][row[0]].append((at, row))
        assert batch.timestamps is not None
        watermark = int(batch.timestamps[-1]) - DELAY_MS
    return made


def window_loop(batches: list[tuple[int, ColumnBatch]]) -> int:
    windows: defaultdict[int, tuple[defaultdict[object, list[object]], ...]]
    windows = defaultdict(lambda: (defaultdict(list), defaultdict(list)))
    made = 0

    def fire(watermark: int) -> int:
        rows = 0
        for start in [start for start in windows if start + REACH_MS - 1 <= watermark]:
            left, right = windows.pop(start)
            for key, own in left.items():
                results = [(a, b) for a in own for b in right.get(key, ())]
                rows += len(results)
        return rows

    for side, batch in batches:
        for at, row in tuples(batch):
            windows[at - at % REACH_MS][side][row[0]].append(row)
        assert batch.timestamps is not None
        made += fire(int(batch.timestamps[-1]) - DELAY_MS)
    return made + fire(WATERMARK_MAX)


def as_of_loop(batches: list[tuple[int, ColumnBatch]]) -> int:
    versions: defaultdict[object, list[tuple[int, tuple[object, ...]]]] = defaultdict(list)
    waiting: list[tuple[int, tuple[object, ...]]] = []
    made = 0

    def join(watermark: int) -> int:
        nonlocal waiting
        results = []
        due = sorted((each for each in waiting if each[0] <= watermark), key=lambda each: each[0])
        waiting = [each for each in waiting if each[0] > watermark]
        for at, row in due:
            known = versions[row[0]]
            place = bisect_right(known, at, key=lambda version: version[0])
            if place:
                results.append((row, known[place - 1][1]))
                del known[: place - 1]
        return len(results)

    for side, batch in batches:
        for at, row in tuples(batch):
            if side == 0:
                waiting.append((at, row))
            else:
                known = versions[row[0]]
                known.insert(bisect_right(known, at, key=lambda version: version[0]), (at, row))
        assert batch.timestamps is not None
        made += join(int(batch.timestamps[-1]) - DELAY_MS)
    return made + join(WATERMARK_MAX)


CASES: dict[str, tuple[Callable[[], Operator], Callable[..., int], int]] = {
    "interval": (lambda: IntervalJoin(step(), Interval(-REACH_MS, 0)), interval_loop, 2),
    "window": (lambda: WindowJoin(step(), tumbling("10s")), window_loop, 2),
    "as of": (lambda: AsOfJoin(step()), as_of_loop, 10),
}


def run(full: bool) -> dict[str, float]:
    """Print a row per case; returns how many times as fast as the loop each is."""
    ratios = {}
    titles = ("join", "keys", "rows", "results", "M rows/s", "loop M rows/s", "ratio")
    print("  ".join(f"{title:>14}" for title in titles), flush=True)
    for name, (make, loop, every) in CASES.items():
        for keys, rows in ((100_000, 2_000_000 if full else 400_000), (100, 100_000)):
            batches = list(records(keys, rows, every))
            count = len(batches) * BATCH_ROWS
            seconds, made = min(vectorised(make(), batches) for _ in range(3 if full else 1))
            began = time.process_time()
            by_loop = loop(batches)
            loop_seconds = time.process_time() - began
            assert made == by_loop, (made, by_loop)
            ratios[f"{name} {keys}"] = loop_seconds / seconds
            rates = (f"{count / each / 1e6:.2f}" for each in (seconds, loop_seconds))
            cells = (name, f"{keys:,}", f"{count:,}", f"{made:,}", *rates)
            cells = (*cells, f"{loop_seconds / seconds:.1f}")
            print("  ".join(f"{cell:>14}" for cell in cells), flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="two million rows; a few minutes")
    options = parser.parse_args()
    # Freed memory stays with the process, or page faults would be most of what is measured.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)
    libc.mallopt(-1, (1 << 31) - 1)
    pa.set_cpu_count(1)
    run(options.full)


if __name__ == "__main__":
    main()
