"""The changes of a PostgreSQL table into a topic of Kafka, exactly once.

`examples/lakehouse_demo.py` starts the servers, changes the table, and kills this job now and then.
"""

import os

import headgate as hg
from headgate.connectors import kafka_sink, postgres_cdc_source

job = hg.Job("orders-to-kafka", parallelism=1)
job.checkpoint(every="500ms", storage=os.environ["CHECKPOINTS"])
job.restart(attempts=1_000_000, delay="500ms")

changes = job.read(
    postgres_cdc_source(os.environ["DATABASE"], "orders", slot="lake"), name="orders"
)
changes.write(
    kafka_sink("orders", bootstrap=os.environ["BROKER"], guarantee="exactly_once"), name="topic"
)

if __name__ == "__main__":
    job.run()
