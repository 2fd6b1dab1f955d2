"""Aggregates whose keys lie in runs on disk give what those in memory give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.elements import ColumnBatch
from headgate.state.snapshot import RestoredState
from headgate.tests.support.spilled_running import LastRows, kept_files, start_running

SCHEMA = pa.schema([("key", pa.int64()), ("x", pa.float64()), ("word", pa.string())])
AGGREGATES = {
    "variance": {"r": hg.variance("x")},
    "first and last": {"f": hg.first("word"), "l": hg.last("x")},
    "by": {"least": hg.min_by("word", "x"), "most": hg.max_by("x", "key")},
    "distinct": {"words": hg.count_distinct("word"), "xs": hg.count_distinct("x")},
    "approx distinct": {"r": hg.approx_count_distinct("word")},
    "quantile": {"r": hg.quantile("x", 0.3)},
    "top": {
        "words": hg.top_n("word", 3, by="x"),
        "xs": hg.top_n("x", 2, by="key", ascending=True),
    },
    "collect": {"words": hg.collect("word"), "xs": hg.collect("x")},
}
ON_DISK = {"state.backend.type": "rocksdb", "taskmanager.memory.managed.size": "24kb"}
KEYS = 500


def started(
    aggregates: dict[str, Any], directory: Path, index: int, parallelism: int, options: Any
) -> tuple[RunningAggregate, LastRows]:
    plan = AggregatePlan(("key",), aggregates, SCHEMA)
    return start_running(plan, directory, index, parallelism, **options)


def batch(rng: np.random.Generator, rows: int = 250) -> ColumnBatch:
    x = rng.normal(size=rows).round(1)
    columns = [
        pa.array(rng.integers(0, KEYS, rows)),
        pa.array(x, mask=rng.random(rows) < 0.2),
        pa.array([None if value < -1 else f"word {value}" for value in x.tolist()]),
    ]
    times = rng.integers(0, 50, rows)
    return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), times)


@pytest.mark.parametrize("kind", AGGREGATES)
def test_on_disk_as_in_memory_and_after_a_restore(tmp_path: Path, kind: str) -> None:
    disk, on_disk = started(AGGREGATES[kind], tmp_path, 0, 1, ON_DISK)
    memory, in_memory = started(AGGREGATES[kind], tmp_path, 0, 1, {})
    rng = np.random.default_rng(1)
    for _ in range(12):
        data = batch(rng)
        disk.process(data, 0)
        memory.process(data, 0)
        assert str(on_disk.last) == str(in_memory.last)
    assert list(tmp_path.rglob("*.arrow"))
    found = kept_files(disk, tmp_path)
    disk.close()
    again, restored = started(AGGREGATES[kind], tmp_path, 0, 1, ON_DISK)
    again.restore(RestoredState(files={"running": [found]}))
    in_memory.last.clear()
    for _ in range(3):
        data = batch(rng)
        again.process(data, 0)
        memory.process(data, 0)
    assert str(restored.last) == str(in_memory.last)
    again.close()
    memory.close()
