"""The benchmark of the connectors measures what it says, and lists what it cannot start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate.testing.servers.programs import NotAvailableError

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import connectors

    yield connectors
    for name in ("connectors", "connector_systems", "kafka_topics", "report"):
        sys.modules.pop(name, None)


def test_every_connector_of_a_system_has_a_line() -> None:
    command = [sys.executable, str(BENCHMARKS / "connectors.py")]
    found = subprocess.run(
        [*command, "--only", "json,http", "--share", "0.01", "--rounds", "1"],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [line.split(" | ")[0] for line in found.stdout.splitlines() if line.startswith("| `")]
    assert lines == [
        "| `json_sink`, exactly once",
        "| `json_source`",
        "| `http_sink`, at least once",
        "| `http_sink`, exactly once",
        "| `http_source`",
        "| `sse_source`",
        "| `websocket_source`",
    ]


def test_start_up_is_no_part_of_the_figures(bench: Any) -> None:
    whole, start = [(3.0, 1.5), (5.0, 2.0)], [(1.0, 1.0), (1.0, 1.0)]
    figures = bench.Figures(1_000_000, whole, start)
    assert figures.line("a_sink, exactly once") == (
        "| `a_sink`, exactly once | 375 (250 to 500) | 0.75 (0.50 to 1.00) |"
    )
    figures = bench.Figures(1_000_000, [*whole, (1.0, 2.0)], start)
    assert "less than the start-up" in figures.line("a_sink")


def test_what_cannot_start_is_listed_with_the_reason(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def missing(_directory: Path, _rows: int) -> Iterator[Any]:
        raise NotAvailableError("there is no Go")
        yield

    monkeypatch.setitem(bench.SYSTEMS, "nats", (missing, 10))
    bench.measure(["nats"], 1.0, 1, tmp_path)
    assert (
        "Not measured: nats, which cannot be started here: there is no Go"
        in capsys.readouterr().out
    )
