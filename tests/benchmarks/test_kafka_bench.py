"""The comparison of topics of Kafka counts the steady part of a job, by one rule for all engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"
MILLION = 1_000_000


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kafka_topics

    yield kafka_topics
    sys.modules.pop("kafka_topics", None)


class Host:
    """A process that takes 5 CPU seconds and 7 seconds for a start, and 2 and 3 for a million records."""

    def __init__(self) -> None:
        self.warmed: list[str] = []
        self.measured: list[str] = []

    def ask(self, request: dict[str, Any]) -> None:
        self.warmed.append(request["topic"])

    def measure(self, request: dict[str, Any]) -> Any:
        self.measured.append(request["topic"])
        millions = request["rows"] / MILLION
        return SimpleNamespace(seconds=7 + 3 * millions, cpu_seconds=5 + 2 * millions, answer={})


def test_the_start_of_a_job_does_not_count(bench: Any) -> None:
    host = Host()
    engine = bench.Engine("one", host, lambda asked: asked)
    for _ in range(2):
        engine.measure("window", 2, ("events", "first"), 4 * MILLION, "broker:1")
    assert host.warmed == ["events"]
    assert host.measured == ["first", "events"] * 2
    assert engine.cpu_seconds == {("window", 2): [2.0, 2.0]}
    assert engine.seconds == {("window", 2): [3.0, 3.0]}


def test_a_round_without_a_figure_makes_no_ratio(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one, peer = (bench.Engine(name, None, None) for name in ("one", "peer"))
    key = ("window", 2)
    one.seconds[key], peer.seconds[key] = [-0.5, -0.25, 1.0], [1.0, 2.0, 3.0]
    one.cpu_seconds[key], peer.cpu_seconds[key] = [1.0, 2.0, 4.0], [3.0, 4.0, 6.0]
    bench.show([one], key, peer)
    unknown = bench.UNKNOWN
    assert capsys.readouterr().out == (
        f"| window | 2 | one | {unknown} | 2.000 | {unknown} | 2.00 (1.50 to 3.00) |\n"
    )
