"""Goal: the main job, as YAML and in Python, gives the batch answer at any parallelism.

Method: the real command on the real flights, in process; the output against a Polars computation over the
same file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from headgate.tests.support.commands import ended_with

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ["origin", "window_start", "flights", "mean_delay", "worst_delay"]


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    directory = tmp_path_factory.mktemp("flights")
    script = ROOT / "examples" / "make_flights.py"
    subprocess.run([sys.executable, str(script), str(directory)], check=True)
    return directory / "flights.parquet"


@pytest.fixture(scope="module")
def answer(flights):
    return (
        pl.read_parquet(flights)
        .group_by("origin", pl.col("time_hour").alias("window_start"))
        .agg(
            flights=pl.len().cast(pl.Int64),
            mean_delay=pl.col("dep_delay").mean(),
            worst_delay=pl.col("dep_delay").max(),
        )
        .select(COLUMNS)
        .sort("window_start", "origin")
    )


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("file", ["flights.yaml", "flights.py"])
def test_the_main_job_equals_the_batch_answer(file, parallelism, flights, answer, tmp_path):
    environment = {
        **os.environ,
        "FLIGHTS": str(flights),
        "RESULTS": str(tmp_path / "delays"),
        "CHECKPOINTS": str(tmp_path / "checkpoints"),
        "HEADGATE_RUN_DIR": str(tmp_path / "run"),
    }
    headgate = Path(sys.executable).parent / "headgate"
    done = subprocess.run(
        [
            headgate,
            "run",
            ROOT / "examples" / file,
            "--cluster",
            "in-process",
            "-p",
            str(parallelism),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    ended_with(done, 0)
    streamed = pl.read_parquet(tmp_path / "delays" / "*.parquet").select(COLUMNS)
    streamed = streamed.sort("window_start", "origin")
    exact = [name for name in COLUMNS if name != "mean_delay"]
    assert streamed.select(exact).equals(answer.select(exact))
    difference = (streamed["mean_delay"] - answer["mean_delay"]).abs().max()
    assert difference is not None
    assert difference < 1e-9
    assert streamed["mean_delay"].is_null().equals(answer["mean_delay"].is_null())
