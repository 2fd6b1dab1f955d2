"""A harness that runs one operator: what went out, in order; timers that the test fires."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.base import Operator
from headgate.operators.elements import ColumnBatch
from headgate.tests.support.operators import Harness, start_operator
from headgate.tests.support.operators import MillisecondsRecorder as Recorder


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
class TimedHarness(Harness):
    """One subtask of an operator, with its timers."""

    timers: Timers = field(default_factory=Timers)


@pytest.fixture(scope="session")
def start() -> Callable[..., TimedHarness]:
    """Starts subtask `index` of `parallelism`, restored from `tables` cut to its key groups."""

    def start_(
        operator: Operator,
        tables: dict[str, pa.Table] | None = None,
        index: int = 0,
        parallelism: int = 1,
    ) -> TimedHarness:
        operator = pickle.loads(pickle.dumps(operator))
        recorder, timers = Recorder(), Timers()
        start_operator(operator, recorder, tables, index, parallelism, timers=timers)
        return TimedHarness(operator, recorder, timers=timers)

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


@pytest.fixture(autouse=True, scope="module", params=["kept", "compacted", "one map"])
def compacting(request):
    """Run every test with cells that stay, that move whenever a pane is gone, and with one map.

    Where cells move, each pane takes over the map of another one, too.
    """
    from headgate.operators.windows.panes import table

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "compacted":
            patch.setattr(table, "DEAD_MIN", 0)
            patch.setattr(table, "SPARSE_MAPS", 1)
            patch.setattr(table, "SPARSE_SHARE", 0)
            patch.setattr(table, "SPARE_BYTES_MAX", 0)
        if request.param == "one map":
            patch.setattr(table, "MAP_BYTES_MAX", 0)
        yield request.param == "compacted"
