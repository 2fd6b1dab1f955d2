"""Stateful operators alone, in process: what their snapshots cost.

Whatever a snapshot promises is made right behind the batches that followed its cut, as the I/O threads
of a worker would: so copies made because a cut is outstanding are part of the batches' times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import headgate as hg
from headgate.connectors.generator import event_time, generator, random_int
from headgate.connectors.rows import RowSource
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.base import Operator
from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.windows.kinds import WINDOW_FIELDS, tumbling
from headgate.operators.windows.tumbling import TumblingAggregate
from headgate.state.snapshot import StateSnapshot, TableCut
from headgate.testing.connectors import make_context

BATCH_ROWS = 65_536
SMALL_BATCH_ROWS = 1_024
WINDOW = "1h"
KINDS = ("running", "tumbling")
_DAY_MS = 86_400_000


def source(keys: int, rows: int) -> RowSource:
    """Records with a uniform key, a price, and a millisecond of event time between them."""
    fields = {"key": random_int(0, keys), "price": random_int(1, 10_000), "ts": event_time()}
    return generator(fields, rows=rows, batch_rows=BATCH_ROWS)


def aggregates() -> dict[str, hg.operators.aggregates.Aggregate]:
    """Return the aggregates that all cases compute."""
    return {"n": hg.count(), "total": hg.sum("price"), "highest": hg.max("price")}


class Nowhere:
    """An output that forgets."""

    def emit(self, batch: Batch) -> None: ...
    def emit_side(self, tag: str, batch: Batch) -> None: ...
    def emit_watermark(self, timestamp: int) -> None: ...
    def emit_idle(self, idle: bool) -> None: ...


def opened(kind: str) -> Operator:
    """A running or tumbling aggregate with nothing behind it."""
    schema = source(1, 1).schema
    operator: Operator
    if kind == "running":
        operator = RunningAggregate(AggregatePlan(("key",), aggregates(), schema), kind)
    else:
        plan = AggregatePlan(("key",), aggregates(), schema, WINDOW_FIELDS)
        operator = TumblingAggregate(tumbling(WINDOW), plan, kind)
    operator.output = Nowhere()
    operator.open(make_context(operator_name=kind))
    return operator


@dataclass(slots=True)
class Times:
    """Rows and seconds of each batch."""

    rows: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def feed(operator: Operator, batch: ColumnBatch, times: Times) -> None:
    """Process one batch, and let event time follow it."""
    began = time.perf_counter()
    operator.process(batch, 0)
    if batch.timestamps is not None:
        operator.on_watermark(int(batch.timestamps[-1]) - 1)
    times.seconds.append(time.perf_counter() - began)
    times.rows.append(len(batch))


def batch_of(keys: np.ndarray) -> ColumnBatch:
    """One record of each key, all in the same window."""
    stamps = np.full(len(keys), _DAY_MS, np.int64)
    columns = [
        pa.array(keys),
        pa.array(keys % 9_999),
        pa.array(stamps).cast(pa.timestamp("ms", tz="UTC")),
    ]
    return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=source(1, 1).schema), stamps)


def filled(kind: str, keys: int) -> Operator:
    """An operator that has seen every key once."""
    operator, ignored = opened(kind), Times()
    for first in range(0, keys, BATCH_ROWS):
        feed(operator, batch_of(np.arange(first, min(first + BATCH_ROWS, keys))), ignored)
    return operator


class Snapshots:
    """Takes snapshots of an operator as its subtask would: a cut, later its content."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._id = 0
        self._epochs: dict[str, int] = {}
        """Per table, the cut that the next delta is made against."""
        self.seconds: list[float] = []
        """Of the synchronous parts."""

    def cut(self) -> StateSnapshot:
        """The synchronous part."""
        self._id += 1
        began = time.perf_counter()
        self._operator.prepare_snapshot(self._id)
        snapshot = self._operator.snapshot(self._id)
        self.seconds.append(time.perf_counter() - began)
        assert snapshot is not None
        return snapshot

    def make(self, snapshot: StateSnapshot) -> None:
        """The asynchronous part: make what was cut, as files."""
        for name, cut in snapshot.tables.items():
            _write_parquet(cut.make(self._epochs.get(name) if cut.epoch else None))
            self._confirm(name, cut)
        for files in snapshot.files.values():
            files.collect()
            files.release()

    def _confirm(self, name: str, cut: TableCut) -> None:
        self._epochs[name] = cut.epoch
        if cut.confirm is not None:
            cut.confirm(cut.epoch)


def _write_parquet(table: pa.Table) -> None:
    pq.write_table(table, pa.BufferOutputStream(), compression="zstd")


def small_batches(keys: int, count: int) -> Iterator[ColumnBatch]:
    """Batches of keys that are there already."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield batch_of(rng.integers(0, keys, SMALL_BATCH_ROWS))


def snapshot_pauses(kind: str, keys: int, snapshots: int, between: int) -> tuple[Snapshots, Times]:
    """Snapshots under a stream of small batches, `between` of them from one cut to the next."""
    operator = filled(kind, keys)
    taken, times = Snapshots(operator), Times()
    batches = small_batches(keys, snapshots * between)
    for _ in range(snapshots):
        cut = taken.cut()
        for _ in range(between):
            feed(operator, next(batches), times)
        taken.make(cut)
    return taken, times
