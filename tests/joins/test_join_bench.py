"""The benchmark of joins runs, and both sides of its comparison make the same rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import headgate

_PATH = Path(headgate.__file__).parent / "benchmarks" / "joins.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("joins_benchmark", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["interval", "window", "as of"])
def test_join_and_loop_make_the_same(bench: Any, name: str) -> None:
    make, loop, every = bench.CASES[name]
    batches = list(bench.records(2_000, 12 * bench.BATCH_ROWS, every))
    seconds, made = bench.vectorised(make(), batches)
    assert made == loop(batches) > 1_000
    assert seconds > 0
    assert bench.CASES.keys() == {"interval", "window", "as of"}
