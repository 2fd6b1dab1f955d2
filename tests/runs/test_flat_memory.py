"""State that grows from four times the managed memory to eight times: what the process holds stays flat."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.aggregation import spilling_group
from headgate.operators.aggregation.aggregates import AggregatePlan, count, sum
from headgate.operators.aggregation.reduce import ReduceOperator
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.windows.kinds import WINDOW_FIELDS, CumulativeWindow, SlidingWindow
from headgate.operators.windows.panes.operator import PaneAggregate
from headgate.state.settings import RunSettings
from headgate.tests.support.operators import operator_context

MIB = 1 << 20
MANAGED_BYTES = 16 * MIB
SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64())])
ROW_BYTES = 8 * 7
"""The bytes of a key and pane: two lanes of its identity, flags, the key, the pane, count and sum."""
KEYS, PANES = 400_000, 6
BATCH_ROWS = 10_000
PANE_MS = 100


def anonymous_bytes() -> int:
    """The memory of this process that is not that of files."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


class Output:
    rows = total = 0

    def emit(self, batch: ColumnBatch) -> None:
        self.rows += len(batch)
        self.total += int(np.sum(batch.data.column("n").to_numpy()))

    def emit_watermark(self, timestamp: int) -> None:
        pass


@pytest.mark.parametrize(
    "window",
    [SlidingWindow(PANES * PANE_MS, PANE_MS), CumulativeWindow(PANES * PANE_MS, PANE_MS)],
    ids=["sliding", "cumulative"],
)
def test_panes_of_eight_times_the_managed_memory(
    tmp_path: Path, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small files: a flush and a merge buffer one file each, by default 64 MiB."""
    small = partial(RunSettings, file_bytes=MIB, merge_bytes=MIB)
    monkeypatch.setattr(spilling_group, "RunSettings", small)
    assert PANES * KEYS * ROW_BYTES >= 8 * MANAGED_BYTES
    plan = AggregatePlan(("k",), {"n": count(), "total": sum("n")}, SCHEMA, WINDOW_FIELDS)
    operator, output = PaneAggregate(window, plan), Output()
    operator.output = output  # type: ignore[assignment]
    operator.open(
        operator_context(
            options={
                "state.backend.type": "rocksdb",
                "taskmanager.memory.managed.size": f"{MANAGED_BYTES // MIB}mb",
            },
            local_directory=lambda: tmp_path,
        )
    )
    rng, held = np.random.default_rng(1), []
    for pane in range(PANES):
        keys = rng.permutation(KEYS)
        for low in range(0, KEYS, BATCH_ROWS):
            part = keys[low : low + BATCH_ROWS]
            columns = [pa.array(part), pa.array(np.ones(len(part), np.int64))]
            data = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
            times = np.full(len(part), pane * PANE_MS + 5, np.int64)
            operator.process(ColumnBatch(data, times), 0)
            held.append(anonymous_bytes())
    operator.on_watermark(PANES * PANE_MS - 1)
    held.append(anonymous_bytes())
    assert output.rows == PANES * KEYS
    assert output.total == KEYS * PANES * (PANES + 1) // 2
    operator.close()
    half = len(held) // 2
    assert max(held[half:]) - max(held[:half]) <= MANAGED_BYTES


def test_reduced_values_of_eight_times_the_managed_memory(tmp_path: Path) -> None:
    keys, size = 200_000, 700
    assert keys * size >= 8 * MANAGED_BYTES
    operator = ReduceOperator(longer, lambda record: record[0])
    operator.output = SimpleNamespace(emit=lambda batch: None)  # type: ignore[assignment]
    operator.open(
        operator_context(
            options={
                "state.backend.type": "rocksdb",
                "taskmanager.memory.managed.size": f"{MANAGED_BYTES // MIB}mb",
            },
            local_directory=lambda: tmp_path,
        )
    )
    rng, held = np.random.default_rng(1), []
    for low in range(0, keys, BATCH_ROWS):
        records = [(key, rng.bytes(size)) for key in range(low, low + BATCH_ROWS)]
        operator.process(ObjectBatch(records), 0)
        held.append(anonymous_bytes())
    operator.close()
    half = len(held) // 2
    assert max(held[half:]) - max(held[:half]) <= MANAGED_BYTES


def longer(value: tuple[int, bytes], record: tuple[int, bytes]) -> tuple[int, bytes]:
    return max(value, record, key=lambda one: len(one[1]))
