"""The environment of an operator that runs alone: its context, clock, metrics, output and rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headgate.operators.base import Operator, OperatorContext
from headgate.operators.clock import SystemClock
from headgate.operators.elements import Batch, ColumnBatch
from headgate.state.keygroups import KeyGroupRange, key_group_range
from headgate.state.snapshot import RestoredState


class ManualClock:
    """A clock that the test moves, with its timers."""

    def __init__(self) -> None:
        self.ms = 1_000_000
        self.waiting: dict[int, tuple[int, Callable[[], None]]] = {}
        self._number = 0

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1_000

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        self._number += 1
        number = self._number
        self.waiting[number] = (self.ms + delay_ms, callback)
        return lambda: self.waiting.pop(number, None) and None

    def advance(self, ms: int) -> None:
        """Let time pass, and run the timers that become due, in their order."""
        target = self.ms + ms
        while due := [(at, number) for number, (at, _) in self.waiting.items() if at <= target]:
            at, number = min(due)
            self.ms = max(self.ms, at)
            self.waiting.pop(number)[1]()
        self.ms = max(self.ms, target)


class Counters:
    """Metrics that keep their counters in `counts`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def counter(self, name: str) -> Any:
        counts = self.counts

        class Counter:
            def inc(self, amount: int = 1) -> None:
                counts[name] = counts.get(name, 0) + amount

        return Counter()

    def gauge(self, name: str, read: Callable[[], float], labels: dict[str, str]) -> None:
        """Take a gauge, which is never read."""


def operator_context(
    index: int = 0, parallelism: int = 1, max_parallelism: int = 8, **given: Any
) -> OperatorContext:
    """Return the context of one subtask of the step `step`.

    Args:
        index: The number of the subtask.
        parallelism: Of the step.
        max_parallelism: Of the step.
        given: Other fields of the context. There are no timers and no threads by default.
    """
    fields = {
        "job_name": "job",
        "operator_name": "step",
        "attempt": 1,
        "key_groups": key_group_range(index, parallelism, max_parallelism),
        "clock": SystemClock(),
        "timers": None,
        "metrics": Counters(),
        "logger": logging.getLogger("test"),
        "run_in_thread": None,
    }
    return OperatorContext(
        subtask_index=index,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
        **(fields | given),
    )


def rows_of(key_groups: KeyGroupRange, tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """Return the rows of these key groups; the first column of each table is the key group."""
    found = {}
    for name, table in tables.items():
        groups = table.column(0)
        mine = pc.and_(
            pc.greater_equal(groups, key_groups.first), pc.less_equal(groups, key_groups.last)
        )
        found[name] = table.filter(mine)
    return found


@dataclass
class Recorder(Counters):
    """An output that is also the metrics: it keeps `events` in order, and counters."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def emit(self, batch: Batch) -> None:
        self.events.append(("rows", batch))

    def emit_side(self, tag: str, batch: Batch) -> None:
        self.events.append((tag, batch))

    def emit_watermark(self, timestamp: int) -> None:
        self.events.append(("watermark", timestamp))

    def rows(self, kind: str = "rows") -> list[tuple[Any, ...]]:
        """Return all emitted rows as tuples, each with its timestamp at the end."""
        found: list[tuple[Any, ...]] = []
        for event, batch in self.events:
            if event == kind:
                times = batch.timestamps
                stamps = [None] * len(batch) if times is None else times.tolist()
                found += [(*row, t) for row, t in zip(self.records(batch), stamps, strict=True)]
        return found

    def records(self, batch: Batch) -> list[tuple[Any, ...]]:
        """Return the rows of a batch as tuples."""
        if isinstance(batch, ColumnBatch):
            return [tuple(row.values()) for row in batch.data.to_pylist()]
        return [(record,) for record in batch.records]


class MillisecondsRecorder(Recorder):
    """A recorder whose `rows` have instants as ms since 1970 UTC."""

    def records(self, batch: Batch) -> list[tuple[Any, ...]]:
        return [tuple(map(_milliseconds, row)) for row in super().records(batch)]


def _milliseconds(value: Any) -> Any:
    return round(value.timestamp() * 1_000) if isinstance(value, datetime) else value


def checked_tables(cuts: Mapping[str, Any]) -> dict[str, pa.Table]:
    """Return the tables of a snapshot's cuts, and check that their rows are sorted by key group."""
    made = {name: cut.make(None) for name, cut in cuts.items()}
    for table in made.values():
        assert table.schema.names[0] == "key_group"
        assert table.schema.types[0] == pa.int32()
        groups = table.column(0).to_pylist()
        assert groups == sorted(groups)
    return made


@dataclass
class Harness:
    """One subtask of an operator."""

    operator: Operator
    output: Recorder
    snapshots: int = 0

    def process(self, batch: Batch) -> None:
        self.operator.process(batch, 0)

    def watermark(self, timestamp: int) -> None:
        self.operator.on_watermark(timestamp)

    def cut(self) -> Any:
        """Return an open snapshot."""
        self.snapshots += 1
        snapshot = self.operator.snapshot(self.snapshots)
        assert snapshot is not None
        return snapshot

    def tables(self) -> dict[str, pa.Table]:
        """Return the tables of a snapshot; checks their promised form."""
        return checked_tables(self.cut().tables)


def start_operator(
    operator: Operator,
    output: Recorder,
    tables: Mapping[str, pa.Table] | None = None,
    index: int = 0,
    parallelism: int = 1,
    **given: Any,
) -> None:
    """Open subtask `index` of `parallelism`, and restore its key groups of `tables`, if there are any.

    Args:
        operator: the operator of the subtask.
        output: gets the results, and the metrics.
        tables: the state of all subtasks.
        index: the number of the subtask.
        parallelism: the number of subtasks.
        given: other fields of the context.
    """
    operator.output = output
    context = operator_context(index, parallelism, metrics=output, **given)
    operator.open(context)
    if tables is not None:
        operator.restore(RestoredState(tables=rows_of(context.key_groups, tables)))


def in_place(function: Callable[[], Any]) -> Any:
    """Replace `run_in_thread` by a call without a thread, where the result is not awaited."""
    return function()
