"""Lookups that waited for the disk make the next ones ask for all their pages first."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from headgate.state.runs import run_set
from headgate.state.runs.run_file import MappedFile
from headgate.state.runs.run_set import RunSet


def test_pages_are_asked_for_after_a_lookup_that_waited(
    runs: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(runs.TINY, file_bytes=1 << 20, prefetch_faults=3)
    layout = runs.RowLayout(runs.SCHEMA, wide=True)
    found = RunSet(tmp_path, layout, settings, runs.Names("a"))
    hashes = np.arange(500, dtype=np.uint64) << np.uint64(50)
    table = runs.table_of([runs.row(f"{number}", number) for number in range(500)])
    found.add(iter([layout.pack(hashes, hashes, table)])).unpin()
    asked: list[tuple[int, int]] = []
    prefetch = MappedFile.prefetch

    def noted(self: MappedFile, start: int, stop: int) -> None:
        asked.append((start, stop))
        prefetch(self, start, stop)

    monkeypatch.setattr(MappedFile, "prefetch", noted)
    # The thread's counts of major faults are these before and after each of four lookups.
    faults = itertools.chain([0, 2], [2, 5], [5, 6], [6, 6])
    monkeypatch.setattr(run_set, "_faults", lambda: next(faults))
    some = np.array([3, 250, 499])
    file = found.version.runs[0].segments[0].file
    for lookup in range(4):
        asked.clear()
        rows = found.lookup(hashes[some], hashes[some])
        assert sorted(rows.table.column("name").to_pylist()) == ["250", "3", "499"]
        assert bool(asked) == (lookup == 2), lookup
        if asked:
            for row in some:
                first = file.records_at + row * layout.dtype.itemsize
                last = first + layout.dtype.itemsize - 1
                assert any(start <= first and last < stop for start, stop in asked)
    found.clear()
