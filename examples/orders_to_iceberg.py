"""A topic of Kafka with the changes of a table into an Iceberg table, exactly once.

`examples/lakehouse_demo.py` starts the servers, and kills this job now and then.
"""

import os

import headgate as hg
from headgate.connectors import iceberg_sink, kafka_source

SCHEMA = {"op": "string", "id": "long", "version": "long", "status": "string", "cents": "long"}

job = hg.Job("orders-to-iceberg", parallelism=2)
job.checkpoint(every="500ms", storage=os.environ["CHECKPOINTS"])
job.restart(attempts=1_000_000, delay="500ms")

orders = job.read(
    kafka_source("orders", bootstrap=os.environ["BROKER"], schema=SCHEMA), name="topic"
)
catalog = {"uri": f"sqlite:///{os.environ['LAKE']}/catalog.db", "warehouse": os.environ["LAKE"]}
orders.write(
    iceberg_sink("shop.orders", catalog=catalog, partition_by=["status", "bucket(2, id)"]),
    name="table",
)

if __name__ == "__main__":
    job.run()
