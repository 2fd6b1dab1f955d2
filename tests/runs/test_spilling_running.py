"""Running aggregates over runs give what those in memory give, also after restores and rescales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import StateError
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.elements import ColumnBatch
from headgate.state.hashing import hash_columns, key_groups_of
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredState
from headgate.tests.support.spilled_running import (
    MAX_PARALLELISM,
    LastRows,
    kept_files,
    start_running,
)
from headgate.tests.support.spilled_windows import AGGREGATES, KEYS, ROCKSDB, SCHEMA


def batch(rng: np.random.Generator) -> pa.RecordBatch:
    size = 100
    x = rng.integers(-50, 50, size)
    number = rng.integers(0, 150, size)
    columns = [
        pa.array([f"name {value % 97}" if value % 13 else None for value in number * 7]),
        pa.array(number, mask=number == 5),
        pa.array(x, mask=x % 4 == 0),
        pa.array(x, mask=x % 5 == 0).cast(pa.decimal128(22, 2)),
        pa.array([None if value % 3 == 0 else f"{value}" for value in x]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def started(
    keys: tuple[str, ...], directory: Path, index: int = 0, parallelism: int = 1, **options: str
) -> tuple[RunningAggregate, LastRows]:
    plan = AggregatePlan(keys, AGGREGATES, SCHEMA)
    return start_running(plan, directory, index, parallelism, **options)


def sorted_rows(tables: Any) -> list[str]:
    rows = [row for table in tables for row in table.to_pylist()]
    return sorted(str({name: row[name] for name in sorted(row)}) for row in rows)


@pytest.mark.parametrize("keys", KEYS)
def test_results_are_those_of_memory(tmp_path: Path, keys: tuple[str, ...]) -> None:
    disk, on_disk = started(keys, tmp_path, **ROCKSDB)
    memory, in_memory = started(keys, tmp_path)
    rng = np.random.default_rng(1)
    for step in range(30):
        data = batch(rng)
        disk.process(ColumnBatch(data), 0)
        memory.process(ColumnBatch(data), 0)
        assert on_disk.last == in_memory.last
        if step % 10 == 9:
            cut = disk.snapshot(step).files["running"]
            expected = memory.snapshot(step).tables["running"].make(None)
            tables = list(cut.tables())
            assert tables[0].schema.names == expected.schema.names
            assert sorted_rows(tables) == sorted_rows([expected])
            cut.release()
    assert list(tmp_path.rglob("*.arrow"))
    disk.close()
    memory.close()
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.parametrize("keys", KEYS)
def test_files_are_restored_at_another_parallelism(tmp_path: Path, keys: tuple[str, ...]) -> None:
    rng = np.random.default_rng(2)
    disk, _ = started(keys, tmp_path, **ROCKSDB)
    memory, in_memory = started(keys, tmp_path)
    for _ in range(10):
        data = batch(rng)
        disk.process(ColumnBatch(data), 0)
        memory.process(ColumnBatch(data), 0)
    files = kept_files(disk, tmp_path)
    disk.close()
    parts = [started(keys, tmp_path, index, 3, **ROCKSDB) for index in range(3)]
    for operator, _ in parts:
        operator.restore(RestoredState(files={"running": [files]}))
    data = batch(rng)
    memory.process(ColumnBatch(data), 0)
    groups = key_groups_of(hash_columns([data.column(key) for key in keys]), MAX_PARALLELISM)
    last: dict[Any, Any] = {}
    for index, (operator, output) in enumerate(parts):
        own = key_group_range(index, 3, MAX_PARALLELISM)
        rows = np.flatnonzero((groups >= own.first) & (groups <= own.last))
        operator.process(ColumnBatch(data.take(pa.array(rows))), 0)
        last |= output.last
    assert last == {key: in_memory.last[key] for key in last}
    assert len(last) > 20
    cuts = [operator.snapshot(2).files["running"] for operator, _ in parts]
    expected = memory.snapshot(2).tables["running"].make(None)
    assert sorted_rows([t for cut in cuts for t in cut.tables()]) == sorted_rows([expected])
    for operator, _ in parts:
        operator.close()


def test_files_are_read_in_a_thread(tmp_path: Path) -> None:
    """A worker has one event loop: while it reads for long it would miss its heartbeats."""
    disk, _ = started(("name",), tmp_path, **ROCKSDB)
    disk.process(ColumnBatch(batch(np.random.default_rng(5))), 0)
    files = kept_files(disk, tmp_path)
    again, _ = started(("name",), tmp_path, **ROCKSDB)
    calls: list[Callable[[], None]] = []
    again.context = replace(again.context, run_in_thread=calls.append)
    again.restore(RestoredState(files={"running": [files]}))
    assert again._spilling is not None
    assert not again._spilling.table.spilled
    for call in calls:
        call()
    assert again._spilling.table.spilled
    disk.close()
    again.close()


def test_a_canonical_table_changes_the_backend(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    memory, _ = started(("name",), tmp_path)
    for _ in range(5):
        memory.process(ColumnBatch(batch(rng)), 0)
    table = memory.snapshot(1).tables["running"].make(None)
    states = {"running": memory.states()[0]}
    disk, on_disk = started(("name",), tmp_path, **ROCKSDB)
    again, in_memory = started(("name",), tmp_path)
    data = batch(rng)
    for operator in (disk, again):
        operator.restore(RestoredState(tables={"running": table}, states=states))
        operator.process(ColumnBatch(data), 0)
    assert on_disk.last == in_memory.last
    files = kept_files(disk, tmp_path)
    with pytest.raises(StateError, match="files of another state backend"):
        memory.restore(RestoredState(files={"running": [files]}))
    disk.close()


def test_text_counts_as_memory(tmp_path: Path) -> None:
    """A budget is also kept where a key's memory is its text: as the key, or as a min or max."""
    options = {**ROCKSDB, "taskmanager.memory.managed.size": "1mb"}
    for long in ("name", "text"):
        disk, _ = started(("name",), tmp_path, **options)
        for step in range(20):
            rows = [f"{step} {number}" for number in range(100)]
            longer = [row + "." * 2_000 for row in rows]
            columns = [
                pa.array(longer if long == "name" else rows),
                *(pa.nulls(100, type_) for type_ in SCHEMA.types[1:4]),
                pa.array(longer if long == "text" else rows),
            ]
            disk.process(ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA)), 0)
            assert disk._group.keys.size * 2_000 < 600_000
        assert disk._spilling is not None
        assert disk._spilling.table.spilled
        disk.close()


def test_memory_that_was_given_to_other_tables_is_given_back(tmp_path: Path) -> None:
    """What a delta, or writing it, once took is not kept if the share has become smaller."""
    options = {**ROCKSDB, "taskmanager.memory.managed.size": "2mb"}
    rng = np.random.default_rng(6)
    first, _ = started(("number",), tmp_path, **options)
    assert first._spilling is not None
    table = first._spilling.table

    def process(keys: int) -> None:
        number = pa.array(rng.integers(0, keys, 20_000))
        columns = [pa.nulls(20_000, pa.string()), number, number]
        columns += [pa.nulls(20_000, type_) for type_ in SCHEMA.types[3:]]
        first.process(ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA)), 0)

    def spare_bytes() -> int:
        first.snapshot(1).files["running"].release()
        table.wait_for_flush()
        return 0 if table._spare is None else table._spare.held_bytes

    process(5_000)
    assert spare_bytes() > 100_000
    assert table._runs.buffer_bytes > 100_000
    others = [started(("number",), tmp_path, **options)[0] for _ in range(30)]
    process(5_000)
    assert spare_bytes() < 100_000
    assert table._runs.buffer_bytes < 100_000
    for operator in (first, *others):
        operator.close()
