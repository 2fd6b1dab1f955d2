"""Streaming what a Spark query made, beside the plain Parquet source over the same files.

    python benchmarks/spark/stream_result.py [--rows 10000000] [--rounds 5]

In each round a job with a Spark source runs, whose query makes N rows of three columns; then twice
one that reads the files of its result with `parquet_source`; then the first once more. All look at every
row and take checkpoints each second. A rate counts from the moment the job is RUNNING, when Spark is gone,
to its end. One round does not count. Prints JSON: all rates, the medians, `ratio`: that of the Spark source
to that of the Parquet source, to be at least 0.6; and how long each run was before that moment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import headgate as hg
from headgate.connectors import blackhole, parquet_source
from headgate.operators.source import Source
from headgate.runtime.cluster.launch import launch
from headgate.runtime.job import runnable

FILES = 8
SCHEMA = {"id": "long", "k": "long", "price": "double"}
JSON = dict[str, Any]


def spark(rows: int) -> Source:
    """The query, whose result stays."""
    return hg.spark_source(
        sql=f"SELECT id, id % 1000 AS k, id * 0.5D AS price FROM range(0, {rows}, 1, {FILES})",
        schema=SCHEMA,
        conf={"spark.driver.memory": "1g"},
        keep_result=True,
    )


def run(source: Source, storage: Path, rows: int) -> JSON:
    """Run a job that reads `source`: its rate in rows/s, and how long it took before it was RUNNING."""
    job = hg.Job("bench", parallelism=2)
    job.checkpoint(every="1s", storage=str(storage))
    job.read(source, name="rows").filter("price >= 0", name="all").write(blackhole(), name="out")
    seen: dict[str, float] = {}

    def note(event: Any) -> None:
        if event.kind == "status":
            seen.setdefault(json.loads(event.body)["status"], time.perf_counter())

    started = time.perf_counter()
    outcome = asyncio.run(launch(runnable(job).spec(), "in-process", on_event=note))
    assert outcome.status == "FINISHED", outcome
    return {
        "rate": rows / (seen["FINISHED"] - seen["RUNNING"]),
        "before_s": seen["RUNNING"] - started,
    }


def one_round(rows: int, directory: Path) -> dict[str, list[JSON]]:
    """Two runs of each source, in the order a, b, b, a."""
    made = run(spark(rows), directory / "spark", rows)
    (files,) = {path.parent for path in (directory / "spark").rglob("*.parquet")}
    plain = [
        run(parquet_source(str(files), schema=SCHEMA), directory / f"plain-{number}", rows)
        for number in range(2)
    ]
    again = run(spark(rows), directory / "again", rows)
    return {"spark": [made, again], "parquet": plain}


def main(rows: int, rounds: int) -> JSON:
    """Measure all rounds."""
    rates: dict[str, list[float]] = {"spark": [], "parquet": []}
    spark_s: list[float] = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as directory:
            found = one_round(rows, Path(directory))
        if number:
            for name, runs in found.items():
                rates[name] += [each["rate"] for each in runs]
            spark_s += [each["before_s"] for each in found["spark"]]
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "rows": rows,
        "rows_per_s": {name: [round(rate) for rate in found] for name, found in rates.items()},
        "median_rows_per_s": {name: round(rate) for name, rate in medians.items()},
        "ratio": round(medians["spark"] / medians["parquet"], 3),
        "spark_s": [round(each, 1) for each in spark_s],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(json.dumps(main(given.rows, given.rounds), indent=2))
