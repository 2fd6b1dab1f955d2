"""Rows of joins over runs give what those in memory give, also after snapshots, restores and rescales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.operators.elements import ColumnBatch
from headgate.operators.joins.columns import ROW_COLUMN, join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep, outer_sides
from headgate.operators.origin import Origin
from headgate.tests.support import spilled_windows
from headgate.tests.support.spilled_windows import (
    KEYS,
    ROCKSDB,
    ROOMY,
    SCHEMA,
    check_against_memory,
    check_files_fit,
    check_restored_in_a_thread,
)

MIDDLE = {**ROCKSDB, "taskmanager.memory.managed.size": "150kb"}
"""Rows begin in memory, and move to disk after some batches."""
INTERVALS = {"before": (-60, 0), "around": (-40, 70), "behind": (5, 90)}


class Output(spilled_windows.Output):
    """Rows of both sides, in any order of time."""

    def emit_side(self, tag: str, batch: ColumnBatch) -> None:
        self.rows += [f"{tag} {row}" for row in batch.data.to_pylist()]

    def emit_watermark(self, timestamp: int) -> None:
        self.rows.append(f"watermark {timestamp}")


class Side(spilled_windows.Side):
    """The subtasks of an interval join."""

    states = ("left", "right")
    output = Output
    how: Any = "full"
    interval = "around"

    def new_operator(self) -> IntervalJoin:
        outer = outer_sides(self.how)
        nullable = (outer[1], outer[0])
        columns = join_columns(
            (SCHEMA, SCHEMA), (self.keys, self.keys), nullable, "_2", ("a", "b"), Origin("here")
        )
        return IntervalJoin(JoinStep("join", columns, outer), Interval(*INTERVALS[self.interval]))

    @classmethod
    def told_apart(cls, table: pa.Table) -> pa.Table:
        """Rows without their numbers."""
        assert table.column_names[:3] == ["key_group", ROW_COLUMN, "_time"]
        return table.drop_columns([ROW_COLUMN])

    def process(self, data: pa.RecordBatch, times: Any, input_index: int = 0) -> None:
        half = len(times) // 2
        super().process(data.slice(0, half), times[:half], 0)
        super().process(data.slice(half), times[half:], 1)


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(("seed", "options"), [(1, ROCKSDB), (2, ROOMY), (3, MIDDLE)])
def test_results_and_snapshots_are_those_of_memory(
    tmp_path: Path,
    keys: tuple[str, ...],
    how: str,
    interval: str,
    seed: int,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Side, "how", how)
    monkeypatch.setattr(Side, "interval", interval)
    spilled = check_against_memory(Side, tmp_path, keys, seed, options)
    assert (spilled > 2) == (options is not ROOMY)


def test_files_are_read_in_a_thread(tmp_path: Path) -> None:
    check_restored_in_a_thread(Side, tmp_path, lambda one: one._disk[0].active)


def test_files_need_their_backend(tmp_path: Path) -> None:
    check_files_fit(Side, tmp_path)
