"""Aggregates whose keys lie in runs on disk give what those in memory give."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.elements import ColumnBatch
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredFiles, RestoredState
from headgate.tests.support.operators import in_place, operator_context

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
KEYS, MAX_PARALLELISM = 500, 16
numbers = itertools.count()


class Last:
    """An output that keeps the last result of each key."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def emit(self, batch: ColumnBatch) -> None:
        self.rows |= {row["key"]: row for row in batch.data.to_pylist()}


def started(aggregates, directory: Path, index: int, parallelism: int, options):
    operator, output = RunningAggregate(AggregatePlan(("key",), aggregates, SCHEMA)), Last()
    own = directory / f"attempt{next(numbers)}"
    own.mkdir()
    operator.output = output
    operator.open(
        operator_context(
            index,
            parallelism,
            MAX_PARALLELISM,
            attempt=next(numbers),
            run_in_thread=in_place,
            options=options,
            local_directory=lambda: own,
        )
    )
    return operator, output


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
        assert str(on_disk.rows) == str(in_memory.rows)
    assert list(tmp_path.rglob("*.arrow"))
    cut = disk.snapshot(1).files["running"]
    collected = cut.collect()
    files = {file.id: Path(shutil.copy(file.path, tmp_path / file.id)) for file in collected.files}
    cut.release()
    disk.close()
    again, restored = started(AGGREGATES[kind], tmp_path, 0, 1, ON_DISK)
    own = key_group_range(0, 1, MAX_PARALLELISM)
    found = RestoredFiles(collected.meta, files, own.first, own.last)
    again.restore(RestoredState(files={"running": [found]}))
    in_memory.rows.clear()
    for _ in range(3):
        data = batch(rng)
        again.process(data, 0)
        memory.process(data, 0)
    assert str(restored.rows) == str(in_memory.rows)
    again.close()
    memory.close()
