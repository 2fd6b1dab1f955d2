"""Panes over runs give what those in memory give, also after snapshots, restores and rescales."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.aggregation.aggregates import AggregatePlan, sum
from headgate.operators.elements import WATERMARK_MAX
from headgate.operators.windows.kinds import (
    WINDOW_FIELDS,
    CumulativeWindow,
    Early,
    SlidingWindow,
    TumblingWindow,
)
from headgate.operators.windows.panes.operator import PaneAggregate
from headgate.tests.support import spilled_windows
from headgate.tests.support.spilled_windows import (
    KEYS,
    ROCKSDB,
    ROOMY,
    UnorderedOutput,
    check_against_memory,
    check_files_fit,
    check_restored_in_a_thread,
    plan,
)

MIDDLE = {**ROCKSDB, "taskmanager.memory.managed.size": "500kb"}
"""Panes begin in memory, and move to disk after some batches."""
LESS = {**ROCKSDB, "taskmanager.memory.managed.size": "150kb"}
WINDOWS = {
    "sliding": SlidingWindow(100, 20, 7, 150),
    "paired": SlidingWindow(100, 30, 0, 60),
    "cumulative": CumulativeWindow(120, 20, 7, 150),
}


class Side(spilled_windows.Side):
    """The subtasks of windows of panes."""

    states = ("panes",)
    window: Any = WINDOWS["sliding"]

    def new_operator(self) -> PaneAggregate:
        return PaneAggregate(self.window, plan(self.keys))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(("seed", "options"), [(1, ROCKSDB), (2, ROOMY), (3, MIDDLE)])
def test_results_and_snapshots_are_those_of_memory(
    tmp_path: Path,
    keys: tuple[str, ...],
    window: str,
    seed: int,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Side, "window", WINDOWS[window])
    spilled = check_against_memory(Side, tmp_path, keys, seed, options)
    assert (spilled > 2) == (options is not ROOMY)


def test_files_are_read_in_a_thread(tmp_path: Path) -> None:
    check_restored_in_a_thread(
        Side, tmp_path, lambda one: one._disk.active and one._disk.next_from(-100) is not None
    )


def test_files_need_their_backend_and_window(tmp_path: Path) -> None:
    check_files_fit(Side, tmp_path, SlidingWindow(100, 50))


def test_a_column_may_have_the_name_of_the_pane(tmp_path: Path) -> None:
    schema = pa.schema([("pane", pa.int64()), ("n", pa.int64())])
    plan_ = AggregatePlan(("pane",), {"pane_": sum("n")}, schema, WINDOW_FIELDS)

    class Named(Side):
        def new_operator(self) -> PaneAggregate:
            return PaneAggregate(SlidingWindow(100, 50), plan_)

    side = Named(tmp_path, ("pane",), 1, **ROCKSDB)
    columns = [pa.array([1, 2]), pa.array([3, 4])]
    side.process(pa.RecordBatch.from_arrays(columns, schema=schema), np.array([10, 60]))
    side.watermark(WATERMARK_MAX)
    assert len(side.take()) == 4
    side.close()


SOON = {
    "sliding": SlidingWindow(100, 20, 7, 150, early=Early(rows=37)),
    "paired": SlidingWindow(100, 30, 0, 60, early=Early(every_ms=30)),
    "tumbling": TumblingWindow(50, 0, 20, early=Early(rows=700)),
    "cumulative": CumulativeWindow(120, 20, 7, 150, early=Early(every_ms=90)),
}


class Soon(Side):
    """The subtasks of windows with early results."""

    output = UnorderedOutput
    window = SOON["sliding"]


SOON_CASES = [
    ("paired", ("number",), ROCKSDB),
    ("tumbling", ("name",), LESS),
]
if os.environ.get("HEADGATE_THOROUGH"):
    SOON_CASES = list(itertools.product(SOON, KEYS, (ROCKSDB, LESS, ROOMY)))


@pytest.mark.parametrize(("window", "keys", "options"), SOON_CASES)
def test_early_results_are_those_of_memory(
    tmp_path: Path,
    window: str,
    keys: tuple[str, ...],
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Soon, "window", SOON[window])
    spilled = check_against_memory(Soon, tmp_path, keys, len(window), options)
    assert (spilled > 2) == (options is not ROOMY)
