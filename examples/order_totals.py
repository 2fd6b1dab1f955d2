"""Totals per customer in one PostgreSQL table, kept right while orders change in another one.

    DATABASE=postgresql://me@db/shop CHECKPOINTS=s3://bucket/totals python examples/order_totals.py

It needs the table orders (id bigint PRIMARY KEY, customer text, amount numeric(10,2)), with
ALTER TABLE orders REPLICA IDENTITY FULL, and makes the table totals.
"""

import os

import headgate as hg
from headgate.connectors import postgres_cdc_source, postgres_sink


def effects(change):
    """Return the amounts that a change adds to the total of a customer, and takes away."""
    if change.op in ("snapshot", "insert", "update"):
        yield {"customer": change.customer, "orders": 1, "total": change.amount}
    if change.op in ("update", "delete"):
        yield {"customer": change.old_customer, "orders": -1, "total": -change.old_amount}


job = hg.Job("order-totals")
job.checkpoint(every=os.environ.get("CHECKPOINT_EVERY", "10s"), storage=os.environ["CHECKPOINTS"])

changes = job.read(
    postgres_cdc_source("env:DATABASE", "orders", slot="order_totals", before="old_"),
    name="changes",
)
totals = (
    changes.flat_map(
        effects,
        into={"customer": "string", "orders": "long", "total": "decimal(12,2)"},
        name="effects",
    )
    .key_by("customer")
    .agg(orders=hg.sum("orders"), total=hg.sum("total"), name="totals")
)
totals.write(
    postgres_sink(
        "env:DATABASE",
        "totals",
        mode="upsert",
        key="customer",
        create="if_not_exists",
        guarantee="exactly_once",
    ),
    name="table",
)

if __name__ == "__main__":
    job.run()
