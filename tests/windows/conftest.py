"""A harness that runs one operator: what went out, in order, and snapshots split and merged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.base import Operator, OperatorContext
from headgate.operators.clock import SystemClock
from headgate.operators.elements import Batch, ColumnBatch
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredState


@dataclass
class Recorder:
    """An output and metrics in one: keeps `events` in order, and counters."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def emit(self, batch: Batch) -> None:
        self.events.append(("rows", batch))

    def emit_side(self, tag: str, batch: Batch) -> None:
        self.events.append((tag, batch))

    def emit_watermark(self, timestamp: int) -> None:
        self.events.append(("watermark", timestamp))

    def counter(self, name: str) -> Any:
        recorder = self

        class Counter:
            def inc(self, amount: int = 1) -> None:
                recorder.counters[name] = recorder.counters.get(name, 0) + amount

        return Counter()

    def rows(self, kind: str = "rows") -> list[tuple[Any, ...]]:
        """All rows that went out, as tuples, each with its timestamp at the end."""
        found: list[tuple[Any, ...]] = []
        for event, batch in self.events:
            if event == kind:
                times = batch.timestamps
                stamps = [None] * len(batch) if times is None else times.tolist()
                found += [(*row, t) for row, t in zip(self.records(batch), stamps, strict=True)]
        return found

    def records(self, batch: Batch) -> list[tuple[Any, ...]]:
        """The rows of a batch as tuples."""
        if isinstance(batch, ColumnBatch):
            return [tuple(row.values()) for row in batch.data.to_pylist()]
        return [(record,) for record in batch.records]


class MillisecondsRecorder(Recorder):
    """The same; `rows` has instants as ms since 1970 UTC."""

    def records(self, batch: Batch) -> list[tuple[Any, ...]]:
        return [tuple(map(_milliseconds, row)) for row in super().records(batch)]


def _milliseconds(value: Any) -> Any:
    return round(value.timestamp() * 1_000) if isinstance(value, datetime) else value


@dataclass
class Harness:
    """One subtask of an operator."""

    operator: Operator
    output: Recorder

    def process(self, batch: Batch) -> None:
        self.operator.process(batch, 0)

    def watermark(self, timestamp: int) -> None:
        self.operator.on_watermark(timestamp)

    def tables(self) -> dict[str, pa.Table]:
        """The snapshot, its tables made at once; checks their promised form."""
        snapshot = self.operator.snapshot(1)
        assert snapshot is not None
        made = {name: cut.make(None) for name, cut in snapshot.tables.items()}
        for table in made.values():
            assert table.schema.names[0] == "key_group"
            assert table.schema.types[0] == pa.int32()
            groups = table.column(0).to_pylist()
            assert groups == sorted(groups)
        return made


MAX_PARALLELISM = 8


@pytest.fixture(scope="session")
def start() -> Callable[..., Harness]:
    """Starts subtask `index` of `parallelism`, restored from `tables` cut to its key groups."""

    def start_(
        operator: Operator,
        tables: dict[str, pa.Table] | None = None,
        index: int = 0,
        parallelism: int = 1,
    ) -> Harness:
        own, recorder = key_group_range(index, parallelism, MAX_PARALLELISM), Recorder()
        operator.output = recorder
        operator.open(
            OperatorContext(
                job_name="job",
                operator_name="step",
                subtask_index=index,
                parallelism=parallelism,
                max_parallelism=MAX_PARALLELISM,
                attempt=1,
                key_groups=own,
                clock=SystemClock(),
                timers=None,
                metrics=recorder,
                logger=logging.getLogger("test"),
                run_in_thread=None,
            )
        )
        if tables is not None:
            kept = {}
            for name, table in tables.items():
                groups = table.column(0).to_numpy()
                rows = np.flatnonzero((groups >= own.first) & (groups <= own.last))
                kept[name] = table.take(pa.array(rows))
            operator.restore(RestoredState(tables=kept))
        return Harness(operator, recorder)

    return start_


@pytest.fixture(autouse=True, scope="module", params=[None, 0, 3], ids=["few", "own", "mixed"])
def small_rows(request):
    """Run every test with windows in the shared table, in tables of their own, and in both."""
    from headgate.operators import window_aggregate

    before = window_aggregate.SMALL_ROWS
    if request.param is not None:
        window_aggregate.SMALL_ROWS = request.param
    yield
    window_aggregate.SMALL_ROWS = before
