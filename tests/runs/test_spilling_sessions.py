"""Sessions over runs give what those in memory give, also after snapshots, restores and rescales."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.operators.windows.sessions.gaps import FixedGap
from headgate.operators.windows.sessions.operator import SessionAggregate
from headgate.tests.support import spilled_windows
from headgate.tests.support.spilled_windows import (
    KEYS,
    ROCKSDB,
    ROOMY,
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
