"""Sessions over runs give what those in memory give, also after snapshots, restores and rescales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headgate.operators.windows.sessions import table as session_table
from headgate.operators.windows.sessions.operator import SessionAggregate
from headgate.operators.windows.sessions.window import FixedGap
from headgate.tests.support import spilled_windows
from headgate.tests.support.schedules import seeded_threads
from headgate.tests.support.spilled_windows import (
    KEYS,
    ROCKSDB,
    ROOMY,
    batch,
    check_against_memory,
    check_files_fit,
    check_restored_in_a_thread,
    plan,
)

MIDDLE = {**ROCKSDB, "taskmanager.memory.managed.size": "150kb"}
"""Sessions begin in memory, and move to disk after some batches."""
GAPS = {"short": (5, 0), "late": (12, 100), "long": (60, 40)}
"""The gap and the allowed lateness, ms."""


class Side(spilled_windows.Side):
    """The subtasks of session windows."""

    states = ("sessions",)
    gap = "late"

    def new_operator(self) -> SessionAggregate:
        gap_ms, lateness_ms = GAPS[self.gap]
        return SessionAggregate(FixedGap(gap_ms), lateness_ms, plan(self.keys), "sessions")


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(("seed", "options"), [(1, ROCKSDB), (2, ROOMY), (3, MIDDLE), (4, ROCKSDB)])
def test_results_and_snapshots_are_those_of_memory(
    tmp_path: Path,
    keys: tuple[str, ...],
    gap: str,
    seed: int,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Side, "gap", gap)
    spilled = check_against_memory(Side, tmp_path, keys, seed, options)
    assert (spilled > 2) == (options is not ROOMY)


def test_files_are_read_in_a_thread(tmp_path: Path) -> None:
    check_restored_in_a_thread(
        Side, tmp_path, lambda one: one._disk.active and one._disk._table.spilled
    )


def test_files_need_their_backend(tmp_path: Path) -> None:
    check_files_fit(Side, tmp_path)


def test_records_come_while_a_delta_without_open_sessions_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its sessions have expired, and their keys have been forgotten."""
    monkeypatch.setattr(session_table, "_DEAD_MIN", 1)
    seeded_threads(monkeypatch, 1)
    sides = [Side(tmp_path, ("name",), 1, **options) for options in (ROCKSDB, {})]
    sides[0].operators[0]._disk.active = True
    rng = np.random.default_rng(1)
    for at in range(1_000, 21_000, 1_000):
        rows = batch(rng, at)
        for side in sides:
            side.process(*rows)
            side.watermark(at + 400)
        cut = sides[0].operators[0].snapshot(1).files["sessions"]
        rows = batch(rng, at + 900)
        for side in sides:
            side.process(*rows)
        assert not sum(map(len, cut.tables()))
        cut.release()
        assert sides[0].take() == sides[1].take()
    for side in sides:
        side.close()
