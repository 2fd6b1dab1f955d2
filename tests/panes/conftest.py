"""A harness that runs one operator: what went out, in order; timers that the test fires."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.base import Operator
from headgate.operators.elements import Batch, ColumnBatch
from headgate.state.snapshot import RestoredState
from headgate.tests.support.operators import MillisecondsRecorder as Recorder
from headgate.tests.support.operators import checked_tables, operator_context, rows_of


class Timers:
    """Processing time stands still until the test moves it."""

    def __init__(self) -> None:
        self.now, self.waiting = 0, []

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        entry = (self.now + delay_ms, callback)
        self.waiting.append(entry)
        return lambda: self.waiting.remove(entry) if entry in self.waiting else None

    def move(self, milliseconds: int) -> None:
        self.now += milliseconds
        due = [entry for entry in self.waiting if entry[0] <= self.now]
        self.waiting = [entry for entry in self.waiting if entry not in due]
        for _, callback in due:
            callback()


@dataclass
class Harness:
    """One subtask of an operator."""

    operator: Operator
    output: Recorder
    timers: Timers
    snapshots: int = 0

    def process(self, batch: Batch) -> None:
        self.operator.process(batch, 0)

    def watermark(self, timestamp: int) -> None:
        self.operator.on_watermark(timestamp)

    def cut(self) -> Any:
        """An open snapshot."""
        self.snapshots += 1
        snapshot = self.operator.snapshot(self.snapshots)
        assert snapshot is not None
        return snapshot

    def tables(self) -> dict[str, pa.Table]:
        """The snapshot, its tables made at once; checks their promised form."""
        return checked_tables(self.cut().tables)


@pytest.fixture(scope="session")
def start() -> Callable[..., Harness]:
    """Starts subtask `index` of `parallelism`, restored from `tables` cut to its key groups."""

    def start_(
        operator: Operator,
        tables: dict[str, pa.Table] | None = None,
        index: int = 0,
        parallelism: int = 1,
    ) -> Harness:
        operator = pickle.loads(pickle.dumps(operator))
        recorder, timers = Recorder(), Timers()
        operator.output = recorder
        context = operator_context(index, parallelism, metrics=recorder, timers=timers)
        operator.open(context)
        if tables is not None:
            operator.restore(RestoredState(tables=rows_of(context.key_groups, tables)))
        return Harness(operator, recorder, timers)

    return start_


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., ColumnBatch]:
    """A batch of rows (columns of the schema..., timestamp)."""

    def make(rows: list[tuple[Any, ...]], schema: pa.Schema) -> ColumnBatch:
        columns = [
            pa.array([row[index] for row in rows], type_)
            for index, type_ in enumerate(schema.types)
        ]
        data = pa.RecordBatch.from_arrays(columns, schema=schema)
        return ColumnBatch(data, np.array([row[-1] for row in rows], np.int64))

    return make


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["kept", "compacted"])
def compacting(request):
    """Run every test with cells that stay, and with cells that move whenever a pane is gone."""
    from headgate.operators.windows.panes import table

    before = table.DEAD_MIN
    if request.param:
        table.DEAD_MIN = 0
    yield
    table.DEAD_MIN = before
