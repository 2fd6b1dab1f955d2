"""The demo with Kafka (examples/flights_kafka_demo.py): its verdict can fail, and the job passes it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from headgate.tests.kafka.conftest import thorough_only
from headgate.tests.support.commands import output_of_demo
from headgate.tests.support.modules import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FLIGHTS = 60_000
"""Those of two months are enough for four kills."""


@pytest.fixture(scope="module")
def demo() -> Any:
    return load(EXAMPLES / "flights_kafka_demo.py")


@pytest.fixture
def expected() -> pl.DataFrame:
    hours = pl.Series("window_start", [0, 3_600_000, 7_200_000]).cast(pl.Datetime("ms", "UTC"))
    return pl.DataFrame(
        {
            "origin": ["EWR", "JFK", "LGA"],
            "window_start": hours,
            "flights": [1, 2, 3],
            "mean_delay": [0.5, None, 1.5],
            "worst_delay": [1, None, 3],
        }
    )


def records(frame: pl.DataFrame) -> list[tuple[bytes, bytes]]:
    """The records that the job writes for these rows."""
    return [
        (json.loads(line)["origin"].encode(), line)
        for line in frame.write_ndjson().encode().split(b"\n")[:-1]
    ]


def test_the_verdict_counts_what_is_lost_doubled_and_wrong(
    demo: Any, expected: pl.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    right = records(expected)
    assert demo.compare(right[::-1], expected)
    assert "lost: 0, doubled: 0, wrong: 0" in capsys.readouterr().out
    assert not demo.compare(right[1:], expected)
    assert "lost: 1, doubled: 0, wrong: 0" in capsys.readouterr().out
    assert not demo.compare([*right, right[2]], expected)
    assert "lost: 0, doubled: 1, wrong: 0" in capsys.readouterr().out
    assert not demo.compare(records(expected.with_columns(flights=pl.lit(2))), expected)
    assert "lost: 0, doubled: 0, wrong: 2" in capsys.readouterr().out
    assert not demo.compare([], expected)
    assert "lost: 3, doubled: 0, wrong: 0" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(3))
def test_every_schedule_kills_every_kind(demo: Any, seed: int) -> None:
    planned = demo.schedule(20, seed)
    assert planned == demo.schedule(20, seed)
    assert planned != demo.schedule(20, seed + 1)
    assert Counter(kill.kind for kill in planned) == {"worker": 7, "coordinator": 7, "broker": 6}
    assert {kill.early for kill in planned} == {True, False}


@thorough_only
@pytest.mark.ray
@pytest.mark.chaos
def test_kills_of_a_worker_the_coordinator_and_the_broker_change_no_result(tmp_path: Path) -> None:
    """Four kills: two workers, the coordinator and the broker."""
    command = [sys.executable, str(EXAMPLES / "flights_kafka_demo.py"), "--kills", "4"]
    output = output_of_demo(
        [*command, "--seed", "1", "--flights", str(FLIGHTS), "--keep", str(tmp_path / "demo")]
    )
    assert "==> EQUAL" in output
    assert "kill -9 4 of 4" in output
