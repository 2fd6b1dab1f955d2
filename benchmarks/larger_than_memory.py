"""State larger than memory: read-modify-write of rows of 104 bytes, with all flushes and merges.

    python benchmarks/larger_than_memory.py [--keys 8000000] [--seconds 10] [--budget-mib 208]
    python benchmarks/larger_than_memory.py --step sessions --backend hashmap [--keys 8000000]
    python benchmarks/larger_than_memory.py --step sessions [--keys 8000000] [--budget-mib 128]

Shows keys per second of random batches, the memory of the process over time, and what the parts alone
take: the runs without a delta over them (lookups), and a delta that never spills (all in memory).

With `--step` it is an operator, with either backend. `sessions` are session windows: a session per key,
which is extended once, and then all of them fire. The joins get a row of each key on the right, and then
one on the left. They meet at once in `interval-join`, and at the end in `window-join` and `as-of-join`.
`timers` are those of a process function: one per key, which is moved once, and then all of them fire, each
at a time of its own.
Shown are rows per second of processor time, threads included, and memory.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import headgate as hg
from headgate.api.stream import output_of
from headgate.connectors import from_list
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.base import Operator
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch
from headgate.operators.joins.as_of import AsOfJoin
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep
from headgate.operators.joins.windowed import WindowJoin
from headgate.operators.origin import Origin
from headgate.operators.windows.kinds import WINDOW_FIELDS, tumbling
from headgate.operators.windows.sessions.operator import SessionAggregate
from headgate.operators.windows.sessions.window import FixedGap
from headgate.state.hashing import hash_columns
from headgate.state.keygroups import KeyGroupRange
from headgate.state.runs.run_file import FilePool
from headgate.state.runs.spilling_table import SpillingTable, TableShape
from headgate.state.settings import MIB, RunSettings
from headgate.state.slots.table import SlotTable
from headgate.tests.support.operators import operator_context

FIELDS = 12
SCHEMA = pa.schema([("key", pa.int64()), *((f"v{number}", pa.int64()) for number in range(FIELDS))])
ROW_BYTES = 8 * (1 + FIELDS)
DELTA_ROW_BYTES = ROW_BYTES + 8 + 4 * 6
"""A row in the delta also has its hash, and 4 to 8 cells of the index."""


class ArrayDelta:
    """The plainest vectorised delta: a slot table and one array per field, for this number of rows."""

    def __init__(self, rows: int) -> None:
        self._table = SlotTable()
        self._columns = np.zeros((1 + FIELDS, rows), np.int64)

    @property
    def size(self) -> int:
        return self._table.size

    @property
    def nbytes(self) -> int:
        return self.size * DELTA_ROW_BYTES

    @property
    def held_bytes(self) -> int:
        return self.nbytes

    def slots(self, keys: npt.NDArray[np.int64], hashes: Any) -> tuple[Any, Any]:
        """The slot of each key, and the rows of new ones, which get the last slots."""
        slots, fresh = self._table.lookup(hashes)
        self._columns[0, self.size - len(fresh) : self.size] = keys[fresh]
        return slots.astype(np.intp), fresh

    def add(self, slots: Any) -> None:
        for field in self._columns[1:]:
            np.add.at(field, slots, 1)

    def lanes(self) -> tuple[Any, Any]:
        return self._table.lanes()

    def find(self, hashes: Any, checks: Any) -> Any:
        return self._table.find(hashes)

    def table(self, slots: Any) -> pa.Table:
        columns = [pa.array(column.take(slots)) for column in self._columns]
        return pa.Table.from_arrays(columns, schema=SCHEMA)

    def load(self, slots: Any, table: pa.Table) -> None:
        for field, name in enumerate(SCHEMA.names[1:], 1):
            self._columns[field, slots] = table.column(name).to_numpy()

    def clear(self) -> None:
        self._columns[:, : self.size] = 0
        self._table.clear()


@dataclass
class Memory:
    """The resident memory of this process, in MiB."""

    anonymous: int
    mapped: int

    @classmethod
    def now(cls) -> Memory:
        status = Path("/proc/self/status").read_text()
        found = dict(line.split(":", 1) for line in status.splitlines())
        return cls(*(int(found[key].split()[0]) // 1024 for key in ("RssAnon", "RssFile")))

    def __str__(self) -> str:
        return f"rss {self.anonymous + self.mapped:5d} MiB (of it mapped files {self.mapped})"


def inline(call: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(call())
    return future


def new_table(
    directory: Path, rows: int, settings: RunSettings, submit: Any
) -> SpillingTable[ArrayDelta]:
    names = map(str, itertools.count())
    shape = TableShape(
        schema=SCHEMA,
        keys=("key",),
        wide=False,
        identity="",
        identify=lambda table: (hash_columns([table.column("key").combine_chunks()]), None),
        key_groups=KeyGroupRange(0, 127),
        max_parallelism=128,
    )
    rows = min(rows, settings.memory_bytes // 2 // DELTA_ROW_BYTES) + 65_536
    pool = FilePool(directory, settings.pool_bytes, settings.pool_file_bytes_min)
    return SpillingTable(
        shape,
        lambda: ArrayDelta(rows),
        directory,
        lambda: next(names),
        settings,
        submit,
        pool=pool,
    )


def update(table: SpillingTable[ArrayDelta], keys: npt.NDArray[np.int64]) -> None:
    hashes = hash_columns([pa.array(keys)])
    slots, fresh = table.delta.slots(keys, hashes)
    new = np.arange(table.delta.size - len(fresh), table.delta.size)
    found = table.lookup(hashes[fresh], None)
    if found is not None:
        table.delta.load(new[found.positions], found.table)
    table.delta.add(slots)
    table.settle()


def batches(keys: int, rows: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.integers(0, keys, (64, rows))


def measure(table: SpillingTable[ArrayDelta], keys: int, rows: int, seconds: float) -> float:
    """Keys per second."""
    done = 0
    source = batches(keys, rows, rows)
    start = time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        update(table, next(source))
        done += rows
    return done / passed


def run(name: str, args: argparse.Namespace, settings: RunSettings, submit: Any) -> None:
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        table = new_table(Path(directory), args.keys, settings, submit)
        start = time.perf_counter()
        for low in range(0, args.keys, 65_536):
            update(table, np.arange(low, min(args.keys, low + 65_536)))
        table.snapshot().release()
        loaded = args.keys / (time.perf_counter() - start)
        print(f"{name}: load {loaded / 1e6:.2f} M keys/s, {Memory.now()}")
        for rows in (8_192, 65_536):
            for _ in range(3):
                rate = measure(table, args.keys, rows, args.seconds / 6)
                print(
                    f"  random batches of {rows:5d}: {rate / 1e6:5.2f} M keys/s, {Memory.now()}, "
                    f"runs {len(table._runs.version.runs)}"
                )
        rng = np.random.default_rng(3)
        asked = [np.unique(rng.integers(0, args.keys, 8_192)) for _ in range(64)]
        hashes = [hash_columns([pa.array(keys)]) for keys in asked]
        start = time.perf_counter()
        found = sum(len(table._runs.lookup(some, None).positions) for some in hashes)
        print(f"  lookups alone: {found / 1e6 / (time.perf_counter() - start):.2f} M keys/s")
        table.close()


class Rows:
    """An output that counts rows, and looks at the memory meanwhile."""

    def __init__(self) -> None:
        self.count = self.highest = 0

    def emit(self, batch: ColumnBatch) -> None:
        self.count += len(batch)
        self.highest = max(self.highest, Memory.now().anonymous)

    def emit_watermark(self, timestamp: int) -> None:
        pass


PAIRS = pa.schema([("key", pa.int64()), ("n", pa.int64())])


def sessions() -> Operator:
    aggregates = {"n": hg.count(), "total": hg.sum("n")}
    plan = AggregatePlan(("key",), aggregates, PAIRS, WINDOW_FIELDS)
    return SessionAggregate(FixedGap(1_000_000), 0, plan, "sessions")


class Remind(hg.KeyedProcess[int, Any, int]):
    """Sets a timer of its own time for each key."""

    def on_record(self, record: Any, ctx: hg.Context[int]) -> None:
        assert ctx.timestamp is not None
        ctx.event_time.at(ctx.timestamp * 10_000_000 + record.n)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[int]:
        yield ctx.key


def timers() -> Operator:
    rows = hg.Job("timers").read(from_list([], schema={"key": "long", "n": "long"}), name="in")
    stream = rows.event_time("n").key_by("key").process(Remind(), name="timers")
    return output_of(stream).node.factory()  # type: ignore[no-any-return]


def join_step() -> JoinStep:
    keys, names = (("key",), ("key",)), ("a", "b")
    columns = join_columns((PAIRS, PAIRS), keys, (False, False), "_2", names, Origin("here"))
    return JoinStep("join", columns, (False, False))


STEPS = {
    "sessions": sessions,
    "timers": timers,
    "interval-join": lambda: IntervalJoin(join_step(), Interval(-1_000_000, 1_000_000)),
    "as-of-join": lambda: AsOfJoin(join_step()),
    "window-join": lambda: WindowJoin(join_step(), tumbling("1h")),
}


def run_step(args: argparse.Namespace) -> None:
    budget = args.budget_mib or 128
    options = {
        "state.backend.type": args.backend,
        "headgate.task.slice": "1d",
        "taskmanager.memory.managed.size": f"{budget}mb",
    }
    print(f"{args.keys / 1e6:g} M keys, {args.step}, {args.backend}, managed memory {budget} MiB")
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        operator, output = STEPS[args.step](), Rows()
        operator.output = output  # type: ignore[assignment]
        path = Path(directory)
        operator.open(operator_context(options=options, local_directory=lambda: path))
        shuffled = np.random.default_rng(1).permutation(args.keys)
        print(f"  begin: {Memory.now()}")
        for number, part in enumerate(np.array_split(shuffled, 4) * 2):
            start = time.process_time()
            for low in range(0, len(part), 32_768):
                keys = part[low : low + 32_768]
                data = pa.RecordBatch.from_arrays([pa.array(keys), pa.array(keys)], schema=PAIRS)
                side = int(args.step.endswith("join") and number < 4)
                operator.process(ColumnBatch(data, np.full(len(keys), number, np.int64)), side)
            rate = len(part) / (time.process_time() - start)
            print(
                f"  {'new' if number < 4 else 'old'} keys: {rate / 1e6:.3f} M rows/s, {Memory.now()}"
            )
        start = time.process_time()
        operator.on_watermark(WATERMARK_MAX)
        assert output.count == args.keys
        rate = args.keys / (time.process_time() - start)
        print(f"  the end: {rate / 1e6:.3f} M rows/s, {Memory.now()}")
        print(f"  without mapped files at most {output.highest} MiB while results were sent")
        operator.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--budget-mib", type=int, default=0, help="0: a quarter of the state")
    parser.add_argument("--mapped-mib", type=int, default=0, help="0: as much as the budget")
    parser.add_argument("--directory", default=None)
    parser.add_argument("--step", choices=STEPS, default=None)
    parser.add_argument("--backend", choices=("hashmap", "rocksdb"), default="rocksdb")
    args = parser.parse_args()
    libc = ctypes.CDLL(None)  # as workers do (runtime/cluster/process.py)
    libc.mallopt(-3, 1 << 30)
    libc.mallopt(-1, 512 << 20)
    if args.step:
        run_step(args)
        return
    state = args.keys * ROW_BYTES
    budget = args.budget_mib * MIB or state // 4
    print(f"{args.keys / 1e6:g} M keys, state {state >> 20} MiB, budget {budget >> 20} MiB")
    flat = RunSettings(memory_bytes=budget, mapped_bytes=args.mapped_mib * MIB or budget)
    free = RunSettings(memory_bytes=budget, mapped_bytes=1 << 40)
    with ThreadPoolExecutor(2) as pool:
        run("in threads, mapped pages bounded", args, flat, pool.submit)
        run("in threads", args, free, pool.submit)
    run("inline, one core", args, free, inline)
    in_memory = RunSettings(memory_bytes=1 << 40)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        table = new_table(Path(directory), args.keys, in_memory, inline)
        for low in range(0, args.keys, 65_536):
            update(table, np.arange(low, min(args.keys, low + 65_536)))
        rate = measure(table, args.keys, 8_192, args.seconds / 6)
        print(f"all in memory: {rate / 1e6:.2f} M keys/s")


if __name__ == "__main__":
    main()
