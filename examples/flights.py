"""Mean and worst departure delay per origin and hour: the Python twin of flights.yaml.

`examples/make_flights.py` makes the input. Run it, kill it, run it again: it goes on where it was.
"""

import os

import headgate as hg
from headgate.connectors import parquet_sink, parquet_source, throttle

FLIGHTS = os.environ.get("FLIGHTS", "examples/data/flights.parquet")
RESULTS = os.environ.get("RESULTS", "examples/data/delays")
FLIGHTS_PER_SECOND = float(os.environ.get("FLIGHTS_PER_SECOND", "1000000"))
CHECKPOINTS = os.environ.get("CHECKPOINTS", "examples/data/checkpoints/flights")

job = hg.Job("flights", parallelism=2)
job.checkpoint(every="1s", storage=CHECKPOINTS)
job.restart(attempts=3, delay="1s")

flights = job.read(throttle(parquet_source(FLIGHTS), FLIGHTS_PER_SECOND), name="flights")
delays = (
    # within a day the rows are in order of actual departure: up to 22 hours late
    flights.event_time("time_hour", max_out_of_order="24h", wait_for_queued=False)
    .key_by("origin")
    .window(hg.tumbling("1h"))
    .agg(
        flights=hg.count(),
        mean_delay=hg.avg("dep_delay"),
        worst_delay=hg.max("dep_delay"),
        name="delays",
    )
)
delays.write(parquet_sink(RESULTS, guarantee="exactly_once"), name="results")

if __name__ == "__main__":
    job.run()
