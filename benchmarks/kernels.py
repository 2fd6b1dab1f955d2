"""Rows per second of the stateful kernels on one core: `python benchmarks/kernels.py [name part]`.

Medians of a few short rounds, in process, without exchange. Compare ratios within one run.
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

import headgate as hg
from headgate.api.job_definition import WrittenJob
from headgate.api.stream import output_of
from headgate.connectors import generator, sequence
from headgate.operators.aggregation.aggregates import AggregatePlan, parse_aggregate
from headgate.operators.aggregation.reduce import ReduceOperator
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.base import OperatorContext
from headgate.operators.clock import SystemClock
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.windows.kinds import WINDOW_FIELDS, tumbling
from headgate.operators.windows.tumbling import TumblingAggregate
from headgate.state.hashing import hash_columns, hash_keys
from headgate.state.keygroups import KeyGroupRange
from headgate.state.slots.table import SlotTable

ROWS = 65_536
BATCHES = 30
ROUNDS = 3


class Nowhere:
    """An output, and metrics, that take everything and keep nothing."""

    def emit(self, batch: object) -> None: ...
    def emit_side(self, tag: str, batch: object) -> None: ...
    def emit_watermark(self, timestamp: int) -> None: ...
    def emit_idle(self, idle: bool) -> None: ...
    def counter(self, name: str) -> Nowhere:
        return self

    def inc(self, amount: int = 1) -> None: ...


def opened(operator: object) -> object:
    context = OperatorContext.__new__(OperatorContext)
    context.job_name, context.max_parallelism = "bench", 128
    context.key_groups, context.metrics = KeyGroupRange(0, 127), Nowhere()
    context.options, context.sides_read = {}, frozenset()
    context.operator_name, context.clock = "step", SystemClock()
    operator.output = Nowhere()
    operator.open(context)
    return operator


def bids(keys: int, rows: int = ROWS, kind: str = "int", disorder: int = 0) -> list[ColumnBatch]:
    """Batches of 10,000 records per event-time second."""
    rng = np.random.default_rng(1)
    batches = []
    for number in range(BATCHES):
        key = pa.array(rng.integers(0, keys, rows))
        if kind == "string":
            key = pa.array([f"user{k}" for k in key.to_pylist()])
        times = (np.arange(number * rows, (number + 1) * rows) // 10).astype(np.int64)
        if disorder:
            times = times - rng.integers(0, disorder, rows)
        price = pa.array(rng.integers(1, 10_000, rows))
        batches.append(
            ColumnBatch(pa.RecordBatch.from_arrays([key, price], names=["key", "price"]), times)
        )
    return batches


def window(keys: int, aggregates: str, size: str = "10s", by: tuple[str, ...] = ("key",), **data):
    batches = bids(keys, **data)
    plan = AggregatePlan(
        by,
        {f"a{i}": parse_aggregate(text) for i, text in enumerate(aggregates.split())},
        batches[0].data.schema,
        WINDOW_FIELDS,
    )

    def run() -> int:
        operator = opened(TumblingAggregate(tumbling(size), plan))
        for batch in batches:
            operator.process(batch, 0)
            operator.on_watermark(int(batch.timestamps[-1]) - 1)
        return sum(map(len, batches))

    return run


def running(keys: int, aggregates: str, rows: int = ROWS):
    batches = bids(keys, rows)
    plan = AggregatePlan(
        ("key",),
        {f"a{i}": parse_aggregate(text) for i, text in enumerate(aggregates.split())},
        batches[0].data.schema,
    )

    def run() -> int:
        operator = opened(RunningAggregate(plan))
        for batch in batches:
            operator.process(batch, 0)
        return sum(map(len, batches))

    return run


def reduce():
    batches = [
        ObjectBatch([(i % 1000, i, 1.0) for i in range(n * 1000, n * 1000 + 1000)])
        for n in range(200)
    ]

    def run() -> int:
        operator = opened(
            ReduceOperator(lambda a, b: (a[0], a[1] + b[1], b[2]), key=lambda r: r[0])
        )
        for batch in batches:
            operator.process(batch, 0)
        return sum(map(len, batches))

    return run


class Counting(hg.KeyedProcess[int, object, tuple[int, int]]):
    """A read and a write of a value for each record."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: object, ctx: hg.Context[int]) -> tuple[tuple[int, int]]:
        n = self.seen.get() + 1
        self.seen.set(n)
        return ((ctx.key, n),)


def process(keys: int):
    batches = [ColumnBatch(batch.data) for batch in bids(keys, 8_192)]
    rows = WrittenJob("bench").read(generator({"key": sequence(), "price": sequence()}), name="in")
    node = output_of(rows.key_by("key").process(Counting(), name="step")).node
    operator = opened(node.factory())

    def run() -> int:
        for batch in batches:
            operator.process(batch, 0)
        return sum(map(len, batches))

    return run


def hashing(array: pa.Array):
    def run() -> int:
        for _ in range(BATCHES):
            hash_columns([array])
        return BATCHES * len(array)

    return run


def hash_python(values: list[object]):
    return lambda: len(hash_keys(values))


def slots(keys: int):
    hashes = [hash_columns([b.data.column(0)]) for b in bids(keys)]

    def run() -> int:
        table = SlotTable()
        for batch in hashes:
            table.lookup(batch)
        return BATCHES * ROWS

    return run


def cases() -> Iterator[tuple[str, Callable[[], Callable[[], int]]]]:
    ints = np.random.default_rng(2).integers(0, 10**6, ROWS)
    short = [f"user{k}" for k in ints.tolist()]
    long = [f"a-somewhat-longer-user-name-{k}" for k in ints.tolist()]
    yield "hash int64", lambda: hashing(pa.array(ints))
    yield "hash short strings", lambda: hashing(pa.array(short))
    yield "hash 34-byte strings", lambda: hashing(pa.array(long))
    yield "hash Python ints", lambda: hash_python(ints.tolist())
    yield "hash Python tuples", lambda: hash_python(list(zip(short, ints.tolist(), strict=True)))
    for keys in (1_000, 100_000, 1_000_000):
        yield f"slots, {keys:,} keys", lambda keys=keys: slots(keys)
    for keys in (1_000, 100_000):
        yield f"window count, {keys:,} keys, one window", lambda k=keys: window(k, "count()", "1h")
        yield f"window count, {keys:,} keys, 10 s", lambda k=keys: window(k, "count()")
        yield (
            f"window count sum max, {keys:,} keys, one window",
            lambda k=keys: window(k, "count() sum(price) max(price)", "1h"),
        )
        yield (
            f"window count, {keys:,} string keys, one window",
            lambda k=keys: window(k, "count()", "1h", kind="string"),
        )
    yield "window count, 1,000 keys, 10 s, disorder", lambda: window(1000, "count()", disorder=5000)
    yield "window count, 1,000 keys, 8k batches", lambda: window(1000, "count()", "1h", rows=8192)
    yield "window global max, 10 s", lambda: window(1000, "max(price)", by=())
    yield "running count, 1,000 keys", lambda: running(1_000, "count()")
    yield "running count, 100,000 keys", lambda: running(100_000, "count()")
    for keys in (100, 100_000):
        yield f"process, an int per key, {keys:,} keys", lambda keys=keys: process(keys)
    yield "reduce tuples, two lambdas, 1,000 keys", reduce


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)
    libc.mallopt(-1, (1 << 31) - 1)
    gc.freeze()
    gc.disable()
    pa.set_cpu_count(1)
    for name, make in cases():
        if not all(part in name for part in sys.argv[1:]):
            continue
        run, rates = make(), []
        run()
        for _ in range(ROUNDS):
            began = time.process_time()
            rows = run()
            rates.append(rows / (time.process_time() - began))
        print(f"{name:<50} {median(rates) / 1e6:8.1f} M rows/s")


if __name__ == "__main__":
    main()
