"""The main job fed by a Spark query, a worker killed half-way: exact, and Spark was asked once.

Method: examples/flights_spark.py on the first three months, on a local Ray; the answer is that of Polars
over the same tables (examples/flights_spark_demo.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.compute as pc
import pytest

from headgate.runtime.job import runnable

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODULES = ("make_flights", "flights_spark", "demo", "flights_spark_demo")
FLIGHTS = 80_775
"""From January to March, by UTC."""
BATCHES_BEFORE = 3
"""Batches that each reader gives before the kill; it has 8 parts to read, each of one batch or more."""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The modules of the example, reading and writing below the test's directory."""
    pytest.importorskip("pyspark")
    monkeypatch.setenv("TABLES", str(tmp_path))
    for name in ("RESULTS", "CHECKPOINTS", "ASKED"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def restored(chaos: Any) -> bool:
    """A worker was killed, and the job goes on from a checkpoint."""
    return bool(chaos.texts("restored"))


def published(directory: Path) -> pl.DataFrame:
    """Return the rows that readers of the output see."""
    files = sorted(directory.glob("*.parquet"))
    return pl.read_parquet(files) if files else pl.DataFrame()


def test_spark_is_asked_once_whatever_dies(
    modules: dict[str, Any], ring: Any, tmp_path: Path
) -> None:
    make = modules["make_flights"]
    year = make.flights()
    make.write(year.filter(pc.less(pc.month(year["time_hour"]), 4)), tmp_path, False, False)
    make.write_others(tmp_path)
    expected = modules["flights_spark_demo"].answer(tmp_path)
    assert expected["flights"].sum() == FLIGHTS
    results: list[set[str]] = []

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        """Kill a worker as soon as there is output, which is before either reader has read half."""
        if event.kind in ("checkpoint", "restored"):
            below = (tmp_path / "checkpoints").rglob("sources/*/*/*")
            results.append({str(path) for path in below})
        completed = event.kind == "checkpoint" and body.get("status") == "COMPLETED"
        if completed and not chaos.state and (rows := len(published(tmp_path / "results"))):
            chaos.state["published"] = rows
            chaos.later(0, lambda c: c.kill_worker())

    job = modules["flights_spark"].job
    runnable(job).override({"io.tmp.dirs": str(tmp_path / "tmp")})  # where the log of Spark stays
    ran = ring.run(job, plan, seed=5, until=restored, batches=BATCHES_BEFORE)
    assert len(ran.chaos.kills) == 1
    assert 0 < ran.chaos.state["published"] < len(expected) / 2
    assert len(ran.chaos.texts("restored")) == 1
    streamed = published(tmp_path / "results").select(expected.columns)
    assert streamed.sort("window_start", "origin").equals(expected)
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    said = [text for text in ran.chaos.texts("source") if "Spark is done" in text]
    assert said == [f"flights: Spark is done: {FLIGHTS:,} rows in 16 files"]
    # As the job ends the result is removed, while the news of the last checkpoint are on their way.
    assert all(found == results[0] for found in results[:-1]), "one result, and it stays the same"
    assert results[-1] <= results[0]
    assert len(results[0]) == 2, "a directory of files, and the record that names them"
    assert not list((tmp_path / "checkpoints").rglob("sources/*/*/*")), "it goes with the job's end"
