"""The benchmark of parallelism runs in a process of its own and gives its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headgate


def test_a_case_has_processor_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Path(headgate.__file__).parent
    monkeypatch.syspath_prepend(str(checkout / "benchmarks"))
    import parallelism

    found: Any = parallelism.run_in(checkout, ["q5", "2", "400000", "8192"])
    assert found["cpu_s"] >= 0
    assert found["memory_mb"] > 10
