"""Count and global windows over runs give what those in memory give, also after snapshots and rescales."""

from __future__ import annotations

import collections
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import StateError
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.windows import counts as count_table
from headgate.operators.windows.counts import CountAggregate
from headgate.operators.windows.kinds import CountWindow, Early, GlobalWindow
from headgate.operators.windows.panes.global_windows import GlobalAggregate
from headgate.tests.support import spilled_windows
from headgate.tests.support.spilled_windows import (
    AGGREGATES,
    KEYS,
    ROCKSDB,
    ROOMY,
    SCHEMA,
    UnorderedOutput,
    batch,
    check_against_memory,
    check_files_fit,
    check_restored_in_a_thread,
)

MIDDLE = {**ROCKSDB, "taskmanager.memory.managed.size": "150kb"}
"""Cells begin in memory, and move to disk after some batches."""
WINDOWS = {
    "tumbling": CountWindow(6, 6),
    "sliding": CountWindow(12, 4),
    "paired": CountWindow(9, 6),
    "gaps": CountWindow(2, 6),
    "single": CountWindow(5, 1),
}


def plan(keys: tuple[str, ...]) -> AggregatePlan:
    return AggregatePlan(keys, AGGREGATES, SCHEMA)


class Counts(spilled_windows.Side):
    """The subtasks of count windows."""

    states = ("counts",)
    output = UnorderedOutput
    window = WINDOWS["sliding"]

    def new_operator(self) -> CountAggregate:
        return CountAggregate(self.window, plan(self.keys))

    @classmethod
    def told_apart(cls, table: pa.Table) -> pa.Table:
        """Leave out cells that have finished: those in memory stay until they are the majority.

        Where all cells of a key finish together, its rows are numbered from 0 after that.
        """
        size, every = cls.window.size, cls.window.every
        keys = [name for name in table.schema.names[1:3] if name in ("name", "number")]
        assert table.schema.names[1 + len(keys)] == "__first_row"
        found, kept = table.to_pylist(), []
        rows = collections.Counter[Any]()
        for row in found:
            key = tuple(row[name] for name in keys)
            rows[key] = max(rows[key], row["__first_row"] + row["__rows"])
        for row in found:
            count = rows[tuple(row[name] for name in keys)]
            last = row["__first_row"] + row["__rows"] == count and count % every
            pane = np.gcd(size, every)
            if last or row["__first_row"] + pane > (count // every + 1) * every - size:
                if size <= every:
                    row["__first_row"] %= every
                kept.append(row)
        return pa.Table.from_pylist(kept, schema=table.schema)


class Globals(spilled_windows.Side):
    """The subtasks of a global window."""

    states = ("whole",)
    output = UnorderedOutput
    results_min = 90
    early = Early()

    def new_operator(self) -> GlobalAggregate:
        return GlobalAggregate(GlobalWindow(self.early), plan(self.keys))

    @classmethod
    def told_apart(cls, table: pa.Table) -> pa.Table:
        return table


CASES = [
    ("tumbling", ("name",), ROCKSDB),
    ("sliding", ("number",), ROCKSDB),
    ("paired", ("name", "number"), ROCKSDB),
    ("gaps", ("number",), ROCKSDB),
    ("single", ("name",), ROCKSDB),
    ("tumbling", ("number",), MIDDLE),
    ("sliding", ("name", "number"), MIDDLE),
    ("paired", ("name",), ROOMY),
]
if os.environ.get("HEADGATE_THOROUGH"):
    CASES = list(itertools.product(WINDOWS, KEYS, (ROCKSDB, MIDDLE, ROOMY)))


@pytest.mark.parametrize(("window", "keys", "options"), CASES)
def test_results_and_snapshots_are_those_of_memory(
    tmp_path: Path,
    window: str,
    keys: tuple[str, ...],
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counts, "window", WINDOWS[window])
    monkeypatch.setattr(count_table, "DEAD_MIN", 50)
    spilled = check_against_memory(Counts, tmp_path, keys, len(window), options)
    assert (spilled > 2) == (options is not ROOMY)


@pytest.mark.parametrize(
    ("keys", "early"),
    [
        (("name",), Early()),
        (("number",), Early(rows=37)),
        (("name", "number"), Early(rows=700)),
        (("name",), Early(every_ms=70)),
    ],
)
def test_global_windows_are_those_of_memory(
    tmp_path: Path, keys: tuple[str, ...], early: Early, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Globals, "early", early)
    assert check_against_memory(Globals, tmp_path, keys, len(keys), ROCKSDB) > 2


def test_global_windows_move_to_disk_without_checkpoints(tmp_path: Path) -> None:
    sides = [Globals(tmp_path, ("name", "number"), 1, **options) for options in (ROCKSDB, {})]
    rng = np.random.default_rng(7)
    for _ in range(20):
        rows = batch(rng, 50)
        for side in sides:
            side.process(*rows)
    assert spilled_windows.run_files(tmp_path, Globals)
    for side in sides:
        side.operators[0].finish()
    assert len(results := sides[0].take()) > 100
    assert results == sides[1].take()
    for side in sides:
        side.close()


@pytest.mark.parametrize(("size", "dead_min"), [(4, 50), (4, 16_384), (1, 1), (1, 16_384)])
def test_finished_cells_do_not_stay_on_disk(
    tmp_path: Path, size: int, dead_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key's rows are a whole number of windows, so nothing is left in the end."""
    monkeypatch.setattr(Counts, "window", CountWindow(size, size))
    monkeypatch.setattr(count_table, "DEAD_MIN", dead_min)
    side, numbers = Counts(tmp_path, ("number",), 1, **ROCKSDB), np.arange(3_000)
    side.operators[0]._disk.active = True
    for part, low in itertools.product(range(4), range(0, len(numbers), 500)):
        chosen = numbers[low : low + 500]
        columns = [pa.nulls(len(chosen), pa.string()), pa.array(chosen), pa.array(chosen + part)]
        columns += [pa.nulls(len(chosen), SCHEMA.field(at).type) for at in (3, 4)]
        data = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        side.process(data, np.zeros(len(chosen), np.int64))
    assert len(side.take()) == 4 * len(numbers) // size
    assert bool(spilled_windows.run_files(tmp_path, Counts)) == (size > 1)
    (state,) = side.snapshots(tmp_path, canonical=True)
    assert "counts" not in state.tables
    side.close()


def test_files_are_read_in_a_thread(tmp_path: Path) -> None:
    check_restored_in_a_thread(
        Counts, tmp_path, lambda one: one._disk.active and one._disk._table.spilled
    )
    check_restored_in_a_thread(Globals, tmp_path, lambda one: one._spilling.table.spilled)


def test_files_need_their_backend(tmp_path: Path) -> None:
    check_files_fit(Counts, tmp_path)
    check_files_fit(Globals, tmp_path)


def test_files_need_panes_of_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side, rng = Counts(tmp_path, ("name",), 1, **ROCKSDB), np.random.default_rng(5)
    for _ in range(5):
        side.process(*batch(rng, 50))
    parts = side.snapshots(tmp_path, canonical=False)
    monkeypatch.setattr(Counts, "window", CountWindow(6, 6))
    other = Counts(tmp_path, ("name",), 1, **ROCKSDB)
    with pytest.raises(StateError, match="other windows"):
        other.restore(parts)
    for one in (side, other):
        one.close()
