"""A tiny operator harness: one operator, a fake output, a clock and timers moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.api.job_definition import WrittenJob, definition_of
from headgate.operators.base import AsyncOperator, Operator
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.operators.rows import to_rows
from headgate.operators.sink import Guarantee, Sink
from headgate.operators.source import Source
from headgate.tests.support.operators import Counters, ManualClock, in_place, operator_context


class Metrics(Counters):
    """Counters that are kept, and gauges that are not."""

    def gauge(self, name: str, read: Callable[[], float], labels: Any = None) -> None:
        pass

    def histogram(self, name: str, buckets: Any = None, labels: Any = None) -> Any:
        return SimpleNamespace(observe=lambda value: None)


class Recorder:
    """An Output that keeps everything, in order, as (kind, value) pairs."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.sides: dict[str, list[Batch]] = {}

    def emit(self, batch: Batch) -> None:
        self.events.append(("batch", batch))

    def emit_side(self, tag: str, batch: Batch) -> None:
        self.sides.setdefault(tag, []).append(batch)

    def emit_watermark(self, timestamp: int) -> None:
        self.events.append(("watermark", timestamp))

    def emit_idle(self, idle: bool) -> None:
        self.events.append(("idle", idle))


class OperatorHarness:
    """Runs one operator as a subtask would."""

    def __init__(self, operator: Operator, options: dict[str, str] | None = None) -> None:
        self.operator = operator
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.output = Recorder()
        operator.output = self.output
        operator.open(
            operator_context(
                max_parallelism=128,
                clock=self.clock,
                timers=self.clock,
                metrics=self.metrics,
                run_in_thread=in_place,
                options=options or {},
            )
        )

    def push(self, batch: Batch) -> OperatorHarness:
        if isinstance(self.operator, AsyncOperator):
            asyncio.run(self.operator.process_async(batch, 0))
        else:
            self.operator.process(batch, 0)
        return self

    @property
    def batches(self) -> list[Batch]:
        return [value for kind, value in self.output.events if kind == "batch"]

    @property
    def watermarks(self) -> list[int]:
        return [value for kind, value in self.output.events if kind == "watermark"]

    @property
    def signals(self) -> list[tuple[str, Any]]:
        """Everything but the batches."""
        return [event for event in self.output.events if event[0] != "batch"]

    @property
    def records(self) -> list[Any]:
        """All records that came out: objects, or dicts of columns."""
        found: list[Any] = []
        for batch in self.batches:
            found += batch.records if isinstance(batch, ObjectBatch) else batch.data.to_pylist()
        return found

    @property
    def times(self) -> list[int]:
        found: list[int] = []
        for batch in self.batches:
            assert batch.timestamps is not None
            found += batch.timestamps.tolist()
        return found


@pytest.fixture(scope="session")
def harness() -> Callable[..., OperatorHarness]:
    return OperatorHarness


SCHEMA = pa.schema(
    {
        "url": pa.string(),
        "user_id": pa.string(),
        "amount": pa.float64(),
        "n": pa.int64(),
        "ts": pa.timestamp("ms", tz="UTC"),
        "ok": pa.bool_(),
    }
)


class TableSource(Source):
    """A source that only has a schema, and remembers which columns it was asked for."""

    bounded = True

    def __init__(self, schema: pa.Schema | None = SCHEMA, row_type: type | None = None) -> None:
        self.schema = schema
        self.row_type = row_type

    def with_columns(self, columns: Any) -> Source:
        return TableSource(pa.schema([f for f in self.schema if f.name in columns]), self.row_type)

    def describe(self) -> str:
        return f"table({', '.join(self.schema.names) if self.schema else 'objects'})"


class PlainSink(Sink):
    def __init__(
        self, guarantee: Guarantee = Guarantee.AT_LEAST_ONCE, *, columns: bool = False
    ) -> None:
        self.guarantee = guarantee
        self.needs_columns = columns

    def describe(self) -> str:
        return "plain()"


class World:
    """The helpers of the tests of the graph API, in one fixture."""

    schema = SCHEMA
    source = TableSource
    sink = PlainSink

    def __init__(self) -> None:
        self.job = WrittenJob("test")
        self.definition = definition_of(self.job)
        self.graph = self.definition.graph

    def stream(self, name: str = "src", **given: Any) -> Any:
        return self.job.read(TableSource(**given), name=name)

    @staticmethod
    def batch(count: int = 6, start: int = 0, times: bool = True) -> ColumnBatch:
        rows = range(start, start + count)
        data = pa.RecordBatch.from_arrays(
            [
                pa.array([f"u{i % 3}" for i in rows]),
                pa.array([None if i % 5 == 4 else f"user-{i % 4}" for i in rows]),
                pa.array([i * 1.5 for i in rows]),
                pa.array(list(rows), pa.int64()),
                pa.array([i * 1_000 for i in rows], pa.timestamp("ms", tz="UTC")),
                pa.array([i % 2 == 0 for i in rows]),
            ],
            schema=SCHEMA,
        )
        return ColumnBatch(data, np.arange(start, start + count) * 1_000 if times else None)

    @staticmethod
    def rows(batch: ColumnBatch) -> list[Any]:
        return to_rows(batch.data)


@pytest.fixture
def world() -> World:
    return World()
