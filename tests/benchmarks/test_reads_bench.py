"""The benchmarks of reads run, and count what they read."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The benchmarks of reads; their jobs are found in a directory of this test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path))
    import changes
    import direct_reads

    yield SimpleNamespace(changes=changes, direct_reads=direct_reads)
    for name in ("changes", "direct_reads"):
        sys.modules.pop(name, None)


def figures(printed: str) -> dict[str, dict[str, Any]]:
    """Return what was printed, by the names of the cases."""
    lines = (line.split(": ", 1) for line in printed.splitlines())
    return {name: json.loads(data) for name, data in lines}


def test_direct_reads(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def no_redis(*_: Any) -> dict[str, dict[str, float]]:
        return {}

    monkeypatch.setattr(bench.direct_reads, "redis_rates", no_redis)
    monkeypatch.setattr(bench.direct_reads, "CLIENTS", 2)
    kinds = ("clients", "callers", "many", "most")
    monkeypatch.setattr(bench.direct_reads, "COSTS", [(kind, 1_000) for kind in kinds])
    asyncio.run(bench.direct_reads.main(50, 1_000, 0.1, 1, only_cost=False))
    found = figures(capsys.readouterr().out)
    assert {name for name in found if name.startswith("cost")} == {
        f"cost, {speed}, {kind}" for speed in ("1,000 records/s", "at full speed") for kind in kinds
    }
    assert "worker, 100 keys per request, committed" in found
    assert all(each["keys/s"] > 0 for each in found.values())


def test_changes(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.changes, "CASES", [(2, 3)])
    asyncio.run(bench.changes.main(1_000, 0.2, 1))
    found = figures(capsys.readouterr().out)
    assert set(found) == {"live, 2 x 3 keys", "committed, 2 x 3 keys"}
    assert all(each["changes/s"] >= 0 for each in found.values())
