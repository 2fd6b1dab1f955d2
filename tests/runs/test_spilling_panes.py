"""Panes over runs give what those in memory give, also after snapshots, restores and rescales."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import StateError
from headgate.operators.aggregation.aggregates import AggregatePlan, sum
from headgate.operators.elements import WATERMARK_MAX
from headgate.operators.windows.kinds import WINDOW_FIELDS, CumulativeWindow, Early, SlidingWindow
from headgate.operators.windows.panes.operator import PaneAggregate
from headgate.state.snapshot import RestoredFiles, RestoredState
from headgate.tests.support import spilled_windows
from headgate.tests.support.spilled_windows import (
    KEYS,
    ROCKSDB,
    ROOMY,
    batch,
    canonical_rows,
    events,
    plan,
)

MIDDLE = {**ROCKSDB, "taskmanager.memory.managed.size": "500kb"}
"""Panes begin in memory, and move to disk after some batches."""
WINDOWS = {
    "sliding": SlidingWindow(100, 20, 7, 150),
    "paired": SlidingWindow(100, 30, 0, 60),
    "cumulative": CumulativeWindow(120, 20, 7, 150),
}


class Side(spilled_windows.Side):
    """The subtasks of windows of panes."""

    state = "panes"
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
    chance = random.Random(seed)
    disk, memory = Side(tmp_path, keys, 1, **options), Side(tmp_path, keys, 1)
    spilled = fired = 0
    for kind, what in events(seed, 40):
        if kind == "batch":
            for side in (disk, memory):
                side.process(*what)
        elif kind == "watermark":
            for side in (disk, memory):
                side.watermark(what)
        elif kind == "checkpoint":
            both = [side.snapshots(tmp_path, canonical=True) for side in (disk, memory)]
            assert canonical_rows(both[0], "panes") == canonical_rows(both[1], "panes")
        elif kind == "restore":
            before = [disk, memory]
            canonical = chance.random() < 0.4
            parts = [side.snapshots(tmp_path, canonical=canonical) for side in before]
            if canonical:  # each backend reads what the other wrote
                parts.reverse()
            parallelism = chance.choice([1, 2, 3])
            disk = Side(tmp_path, keys, parallelism, **options)
            memory = Side(tmp_path, keys, parallelism)
            for side, part in zip((disk, memory), parts, strict=True):
                side.restore(part)
            for side in before:
                side.close()
        found = disk.take()
        assert found == memory.take()
        fired += len(found)
        spilled = np.maximum(spilled, len(list(tmp_path.rglob("attempt*/panes/*.arrow"))))
    for side in (disk, memory):
        side.watermark(WATERMARK_MAX)
    assert disk.take() == memory.take()
    for side in (disk, memory):
        side.close()
    assert fired > 100
    assert (spilled > 2) == (options is not ROOMY)
    assert not list(tmp_path.rglob("attempt*/panes/*.arrow"))


def test_files_are_read_in_a_thread(tmp_path: Path) -> None:
    """A worker has one event loop: while it reads for long it would miss its heartbeats."""
    side, rng = Side(tmp_path, ("name",), 1, **ROCKSDB), np.random.default_rng(6)
    for _ in range(5):
        side.process(*batch(rng, 50))
    parts = side.snapshots(tmp_path, canonical=False)
    again = Side(tmp_path, ("name",), 1, **ROCKSDB)
    again.calls = []
    again.restore(parts)
    disk = again.operators[0]._disk
    assert not disk.active
    for call in again.calls:
        call()
    assert disk.active
    assert disk.next_from(-100) is not None
    for one in (side, again):
        one.close()


def test_files_need_their_backend_and_window(tmp_path: Path) -> None:
    side, rng = Side(tmp_path, ("name",), 1, **ROCKSDB), np.random.default_rng(5)
    for _ in range(5):
        side.process(*batch(rng, 50))
    parts = side.snapshots(tmp_path, canonical=False)
    with pytest.raises(StateError, match="files of another state backend"):
        Side(tmp_path, ("name",), 1).restore(parts)
    other = Side(tmp_path, ("name",), 1, **ROCKSDB)
    other.operators[0]._window = SlidingWindow(100, 50)
    with pytest.raises(StateError, match="other windows"):
        other.restore(parts)
    damaged = RestoredFiles(b"?", {}, 0, 15)
    with pytest.raises(StateError, match="damaged"):
        side.restore([RestoredState(files={"panes": [damaged]})])
    for one in (side, other):
        one.close()


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


def test_early_results_stay_in_memory(tmp_path: Path) -> None:
    """They are of keys that have changed since the last ones, which are in memory."""

    class Soon(Side):
        def new_operator(self) -> PaneAggregate:
            return PaneAggregate(SlidingWindow(100, 50, early=Early(rows=5)), plan(self.keys))

    side = Soon(tmp_path, ("name",), 1, **ROCKSDB)
    assert side.operators[0]._disk is None
    side.close()
