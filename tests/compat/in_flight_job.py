"""The job whose log is kept with records on their way in its checkpoints. It must not change any more."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa

import headgate as hg
from headgate.connectors import collect, generator

NAME = "compat-in-flight"
ROWS = 400
FIELDS = {"n": {"kind": "sequence"}, "user": {"kind": "pattern", "prefix": "u", "distinct": 7}}
OPTIONS = {
    "execution.checkpointing.unaligned.enabled": "true",
    "execution.checkpointing.data-inline-threshold": "0b",
    "taskmanager.network.memory.buffers-per-channel": "1",
    "taskmanager.network.memory.floating-buffers-per-gate": "1",
    "execution.buffer-timeout.interval": "0 ms",
}


def make_job(storage: str, parallelism: int, pause: float = 0.0) -> tuple[hg.Job, Any]:
    """Counts per user, between steps that take `pause` seconds or more for a batch, and the sink of them.

    Records are on their way to the first slow step and, by key, to the counts.
    """

    def slowly(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(pause)
        return batch

    def more_slowly(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(3 * pause)
        return batch

    job = hg.Job(NAME, parallelism=parallelism, max_parallelism=12, options=OPTIONS)
    job.checkpoint(every="1h", storage=storage)
    events = job.read(generator(FIELDS, rows=ROWS, batch_rows=5), name="events")
    passed = events.rebalance().map_batches(slowly, name="slow")
    counts = passed.key_by("user").agg(rows=hg.count(), total=hg.sum("n"), name="counts")
    sink = collect()
    counts.map_batches(more_slowly, name="slower").write(sink, name="out")
    return job, sink
