"""State on disk gives what state in memory gives, whenever its threads work."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.operators.windows.kinds import CountWindow
from headgate.tests.runs.test_spilling_counts import Counts
from headgate.tests.runs.test_spilling_joins import AsOfSide, Side, WindowSide
from headgate.tests.runs.test_spilling_panes import Side as Panes
from headgate.tests.runs.test_spilling_panes import Soon
from headgate.tests.runs.test_spilling_sessions import Side as Sessions
from headgate.tests.support.schedules import seeded_threads
from headgate.tests.support.spilled_windows import (
    ROCKSDB,
    batch,
    canonical_rows,
    check_against_memory,
)


class Versions(AsOfSide):
    """The subtasks of a temporal join.

    After a rescale some key groups are further than others. Their versions are left out on disk as soon as
    they are replaced there, and in memory when the whole subtask is as far. So only the rows that wait are
    compared, and the results.
    """

    states = ("left",)
    how = "left"


THOROUGH = bool(os.environ.get("HEADGATE_THOROUGH"))
SEEDS = range(10 if THOROUGH else 1)
KINDS: list[tuple[Any, tuple[str, ...]]] = [
    (Side, ("name",)),
    (Versions, ("number",)),
    (WindowSide, ("name", "number")),
    (Counts, ("name",)),
]
CUTS: list[Any] = [Side, AsOfSide, WindowSide]
if THOROUGH:
    KINDS += [(Soon, ("number",)), (Sessions, ("name",))]
    CUTS += [Panes, Sessions]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "keys"), KINDS)
def test_it_does_not_matter_when_threads_work(
    tmp_path: Path, kind: Any, keys: tuple[str, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded_threads(monkeypatch, seed)
    monkeypatch.setattr(Counts, "window", CountWindow(9, 6))
    assert check_against_memory(kind, tmp_path, keys, seed, ROCKSDB) > 2


@pytest.mark.parametrize("canonical", [True, False])
@pytest.mark.parametrize("kind", CUTS)
def test_a_cut_stays_what_it_was(
    tmp_path: Path, kind: Any, canonical: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread writes it while time goes on, so that merges leave out more and more rows."""
    seeded_threads(monkeypatch, 1)
    disk, memory = kind(tmp_path, ("name",), 1, **ROCKSDB), kind(tmp_path, ("name",), 1)
    rng, compared = np.random.default_rng(4), 0

    def go_on(now: int) -> None:
        rows = batch(rng, now)
        for side in (disk, memory):
            side.process(*rows)
            side.watermark(now - 20)

    steps = itertools.count(1)
    for _ in range(12):
        for _ in range(4):
            go_on(40 * next(steps))
        wanted = canonical_rows(kind, memory.snapshots(tmp_path, canonical=True))
        snapshot = disk.operators[0].snapshot(1)
        for _ in range(3):
            go_on(40 * next(steps))
        state = disk.state_of(snapshot, 0, tmp_path, canonical=canonical)
        if not canonical:
            again = kind(tmp_path, ("name",), 1, **ROCKSDB)
            again.restore([state])
            (state,) = again.snapshots(tmp_path, canonical=True)
            again.close()
        assert canonical_rows(kind, [state]) == wanted
        compared += len(wanted)
    assert compared > 500
    for side in (disk, memory):
        side.close()
