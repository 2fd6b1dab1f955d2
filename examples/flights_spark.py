"""The main job on what Spark makes of three tables: flights, their destinations, and the weather.

    pip install "headgate[spark,demo]"
    python examples/make_flights.py --all-tables
    headgate run examples/flights_spark.py

Spark joins the tables once; its result is kept in the job's storage and read exactly once from there,
whatever dies. `examples/flights_spark_demo.py` shows it.
"""

import os
from datetime import datetime

import msgspec

import headgate as hg
from headgate.connectors import parquet_sink, throttle

TABLES = os.environ.get("TABLES", "examples/data")
RESULTS = os.environ.get("RESULTS", "examples/data/delays_and_weather")
FLIGHTS_PER_SECOND = float(os.environ.get("FLIGHTS_PER_SECOND", "1000000"))
CHECKPOINTS = os.environ.get("CHECKPOINTS", "examples/data/checkpoints/flights_spark")
ASKED = os.environ.get("ASKED", "examples/data/asked")
"""A file that gets a line whenever Spark is asked."""
PARTS = 16


class Flight(msgspec.Struct, frozen=True):
    origin: str
    dep_delay: int | None
    tzone: str | None
    wind_speed: float | None
    time_hour: datetime


def joined_flights(spark):
    """Every flight with the time zone it goes to and the wind it left in, in the order of event time."""
    with open(ASKED, "a") as asked:
        asked.write(f"process {os.getpid()}\n")
    flights, airports, weather = (
        spark.read.parquet(f"{TABLES}/{name}.parquet")
        for name in ("flights", "airports", "weather")
    )
    destinations = airports.selectExpr("faa AS dest", "tzone")
    winds = weather.select("origin", "time_hour", "wind_speed")
    return (
        flights.join(destinations, "dest", "left")
        .join(winds, ["origin", "time_hour"], "left")
        .repartitionByRange(PARTS, "time_hour")
        .sortWithinPartitions("time_hour")
    )


job = hg.Job("flights-spark", parallelism=2)
job.checkpoint(every="1s", storage=CHECKPOINTS)
job.restart(attempts=3, delay="1s")

query = hg.spark_source(query=joined_flights, schema=Flight, conf={"spark.driver.memory": "1g"})
flights = job.read(throttle(query, FLIGHTS_PER_SECOND), name="flights")
hours = (
    # each part is in the order of event time, and a reader reads its parts in their order
    flights.event_time("time_hour", max_out_of_order="0s", wait_for_queued=False)
    .key_by("origin")
    .window(hg.tumbling("1h"))
    .agg(
        flights=hg.count(),
        mean_delay=hg.avg("dep_delay"),
        worst_delay=hg.max("dep_delay"),
        time_zones=hg.count_distinct("tzone"),
        wind=hg.max("wind_speed"),
        name="hours",
    )
)
hours.write(parquet_sink(RESULTS, guarantee="exactly_once"), name="results")

if __name__ == "__main__":
    job.run()
