"""State read into Spark, beside `spark.read.parquet` of the same files.

    python benchmarks/spark/state_read.py [--keys 5000000] [--rounds 5]

A savepoint with one state of N keys (int64 key, int64 value) is written first. Then both ways of
reading take turns, after one round that does not count; all columns of all rows go to Spark's sink `noop`.
Prints JSON: the times of all rounds, the medians, and `ratio`: rows/s of format("headgate") to rows/s of
Parquet. To be at least 0.5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

import headgate.spark
from headgate.runtime.offline.editor import DeclaredOperator, SavepointEditor, write_here
from headgate.state.codecs import codec_of
from headgate.state.keyed.canonical import Layout
from headgate.state.keyed.keys import keys_of_type

PARALLELISM = 4
GROUPS = 128


def make_savepoint(directory: str, keys: int) -> str:
    """Return a savepoint with one state of this number of keys."""
    info = Layout(keys_of_type(int), "value", codec_of(int)).info("total")
    editor = SavepointEditor(
        job="bench",
        base=None,
        declared={"totals": DeclaredOperator(PARALLELISM, {"total": info})},
        max_parallelism=GROUPS,
        options={},
        now_ms=0,
    )
    rng = np.random.default_rng(1)
    rows = pa.table({"key": np.arange(keys), "value": rng.integers(0, 1_000_000, keys)})
    return write_here(editor, directory, "0" * 12, {("totals", "total"): rows})


def headgate_frame(spark: Any, path: str) -> Any:
    """The state by the data source."""
    reader = spark.read.format("headgate").option("operator", "totals").option("state", "total")
    return reader.load(path)


def parquet_frame(spark: Any, path: str) -> Any:
    """The same files as they are."""
    return spark.read.parquet(f"{path}/totals-*/total/*.parquet")


def seconds(frame: Any) -> float:
    """Return the time in which all rows and columns are read into nothing."""
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def main(keys: int, rounds: int) -> dict[str, Any]:
    """Measure both in turns."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    headgate.spark.register(spark)
    times: dict[str, list[float]] = {"headgate": [], "parquet": []}
    with tempfile.TemporaryDirectory() as directory:
        path = make_savepoint(directory, keys)
        assert headgate_frame(spark, path).count() == parquet_frame(spark, path).count() == keys
        for number in range(rounds + 1):
            for name, make in (("parquet", parquet_frame), ("headgate", headgate_frame)):
                taken = seconds(make(spark, path))
                times[name] += [taken] if number else []
    spark.stop()
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "keys": keys,
        "seconds": times,
        "median_s": medians,
        "rows_per_s": {name: round(keys / found) for name, found in medians.items()},
        "ratio": round(medians["parquet"] / medians["headgate"], 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(json.dumps(main(given.keys, given.rounds), indent=2))
