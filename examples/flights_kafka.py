"""Mean and worst departure delay per origin and hour, from one topic of Kafka into another, exactly once.

`examples/flights_kafka_demo.py` starts a broker, produces the flights, and runs this job while it kills
its processes.
"""

import json
import os

import headgate as hg
from headgate.connectors import kafka_sink, kafka_source

BROKER = os.environ["BROKER"]
STOP = {int(number): offset for number, offset in json.loads(os.environ["STOP"]).items()}
"""The number of flights that each partition will have had in the end."""

job = hg.Job("flights-kafka", parallelism=2)
job.checkpoint(every=os.environ["CHECKPOINT_EVERY"], storage=os.environ["CHECKPOINTS"])
job.restart(attempts=1_000_000, delay="500ms")

flights = job.read(
    kafka_source(
        "flights",
        bootstrap=BROKER,
        schema={"origin": "string", "dep_delay": "long", "time_hour": "timestamp"},
        stop={"flights": STOP},
    ),
    name="flights",
)
delays = (
    # within a day the rows are in order of actual departure: up to 22 hours late
    flights.event_time("time_hour", max_out_of_order="24h")
    .key_by("origin")
    .window(hg.tumbling("1h"))
    .agg(
        flights=hg.count(),
        mean_delay=hg.avg("dep_delay"),
        worst_delay=hg.max("dep_delay"),
        name="delays",
    )
)
delays.write(
    kafka_sink("delays", bootstrap=BROKER, metadata={"key": "origin"}, guarantee="exactly_once"),
    name="results",
)

if __name__ == "__main__":
    job.run()
