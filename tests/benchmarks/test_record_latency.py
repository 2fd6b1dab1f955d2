"""The latency benchmark counts every record once, from the time when it was due."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"


@pytest.fixture
def latency(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import record_latency

    monkeypatch.setattr(record_latency, "WARM_S", 0.0)
    yield record_latency
    for name in ("record_latency", "process_cluster"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_each_record_has_a_latency(latency: Any, tmp_path: Path, parallelism: int) -> None:
    latency.make_job(2_000, 0.1, parallelism, {}, str(tmp_path)).run()
    found = [np.load(path) for path in tmp_path.glob("latency-*.npy")]
    assert len(found) == parallelism
    together = np.concatenate(found)
    # Each subtask leaves out records that were due before the first one that it got.
    assert 200 - 20 * parallelism <= len(together) <= 200
    assert together.min() >= 0


def test_windows_count_from_their_end(latency: Any, tmp_path: Path) -> None:
    latency.make_job(2_000, 0.1, 1, {}, str(tmp_path), windows=True).run()
    (path,) = tmp_path.glob("latency-*.npy")
    # The last windows fire at the end of the data, before their own ends.
    assert np.load(path).max() < 1_000
