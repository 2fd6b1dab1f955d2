"""The most delayed routes of a job under way, in Spark; its state corrected there; and the job resumed.

    pip install 'headgate[spark]'
    python examples/spark_state.py

The job keeps, per route, the number of flights and the sum of their delays. Halfway a savepoint is taken.
One airport is found to have reported its delays in seconds: its routes are divided by 60, and the job goes
on from there. The job runs in this process, on virtual time, so that the whole takes seconds.
"""

import os
import random
import sys
import tempfile
from typing import Any

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.testing import harness

FLIGHT = {"origin": "string", "dest": "string", "delay": "long"}
ORIGINS, DESTINATIONS = ("EWR", "JFK", "LGA"), ("ATL", "BOS", "LAX", "MIA", "ORD", "SFO")
WRONG = "LGA"
"""The airport that reports seconds until it is told."""
MOST = 10

job = hg.Job("routes", parallelism=2)
flights = job.read(from_list([], schema=FLIGHT), name="flights")
totals = flights.key_by("origin", "dest").agg(
    flights=hg.count(), delay=hg.sum("delay"), name="totals"
)
totals.write(collect(guarantee="none"), name="results")


def make_flights(count: int, seed: int, factor: int = 1) -> list[dict[str, Any]]:
    """Flights with delays in minutes; those from `WRONG` are multiplied by `factor`."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        origin, delay = rng.choice(ORIGINS), rng.randrange(90)
        delay *= factor if origin == WRONG else 1
        made.append({"origin": origin, "dest": rng.choice(DESTINATIONS), "delay": delay})
    return made


def first_half(directory: str) -> str:
    """Run the job on the first flights, and take a savepoint."""
    with harness(job) as running:
        running.push("flights", make_flights(2_000, seed=1, factor=60))
        return running.savepoint(directory)


def second_half(savepoint: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Go on from a savepoint with the other flights; the last totals of each route."""
    with harness(job, restore_from=savepoint) as running:
        running.push("flights", make_flights(2_000, seed=2))
        results = running.drain("results")
    return {(row["origin"], row["dest"]): (row["flights"], row["delay"]) for row in results}


def most_delayed(state: Any) -> Any:
    """The routes with the greatest mean delay."""
    mean = state.selectExpr("origin", "dest", "flights", "delay / flights AS mean_delay")
    return mean.orderBy("mean_delay", ascending=False).limit(MOST)


def corrected(spark: Any, savepoint: str, directory: str) -> str:
    """A savepoint in which the delays of `WRONG` are minutes, as all others; returns its path."""
    from headgate.spark import SavepointWriter

    state = totals_of(spark, savepoint)
    minutes = f"CASE WHEN origin = '{WRONG}' THEN delay DIV 60 ELSE delay END AS delay"
    repaired = state.selectExpr("origin", "dest", "flights", minutes)
    writer = SavepointWriter(spark, base=savepoint).put("totals", "running", repaired)
    return writer.write(directory)


def totals_of(spark: Any, savepoint: str) -> Any:
    """The state of the step `totals`."""
    reader = spark.read.format("headgate").option("operator", "totals").option("state", "running")
    return reader.load(savepoint)


def main() -> None:
    """All of it, on a Spark of this machine."""
    from pyspark.sql import SparkSession

    import headgate.spark

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # its workers are to find headgate too
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    headgate.spark.register(spark)
    with tempfile.TemporaryDirectory() as directory:
        taken = first_half(directory)
        spark.read.format("headgate").load(taken).select("operator", "state", "rows").show()
        most_delayed(totals_of(spark, taken)).show()
        repaired = corrected(spark, taken, directory)
        most_delayed(totals_of(spark, repaired)).show()
        before, after = second_half(taken), second_half(repaired)
    for route in sorted(after):
        print(*route, "delay:", before[route][1], "->", after[route][1])
    spark.stop()


if __name__ == "__main__":
    main()
