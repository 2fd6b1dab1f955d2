"""A harness that runs one operator: what went out, in order; timers that the test fires."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.base import Operator, OperatorContext
from headgate.operators.clock import SystemClock
from headgate.operators.elements import Batch, ColumnBatch
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredState

_PATH = Path(__file__).parents[1] / "windows" / "conftest.py"
_spec = importlib.util.spec_from_file_location("windows_conftest", _PATH)
assert _spec is not None
assert _spec.loader is not None
_windows = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _windows
_spec.loader.exec_module(_windows)

MAX_PARALLELISM = 8
Recorder = _windows.MillisecondsRecorder


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
        made = {name: cut.make(None) for name, cut in self.cut().tables.items()}
        for table in made.values():
            assert table.schema.names[0] == "key_group"
            assert table.schema.types[0] == pa.int32()
            groups = table.column(0).to_pylist()
            assert groups == sorted(groups)
        return made


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
        own = key_group_range(index, parallelism, MAX_PARALLELISM)
        recorder, timers = Recorder(), Timers()
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
                timers=timers,
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
    from headgate.operators.panes import table

    before = table.DEAD_MIN
    if request.param:
        table.DEAD_MIN = 0
    yield
    table.DEAD_MIN = before
