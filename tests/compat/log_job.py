"""The job whose log and checkpoints are kept here. It must not change any more."""

from __future__ import annotations

from typing import Any

import headgate as hg
from headgate.connectors import collect, generator, throttle

NAME = "compat-log"
ROWS = 400
KEYS = 7
FIELDS = {"n": {"kind": "sequence"}, "user": {"kind": "pattern", "prefix": "u", "distinct": KEYS}}


def make_job(storage: str, parallelism: int, rate: float = 1e6) -> tuple[hg.Job, Any]:
    """Counts per user, and the sink of the counts. State is in files, and positions are in the log."""
    in_files = {"execution.checkpointing.data-inline-threshold": "0b"}
    job = hg.Job(NAME, parallelism=parallelism, max_parallelism=12, options=in_files)
    job.checkpoint(every="1h", storage=storage)
    events = job.read(throttle(generator(FIELDS, rows=ROWS, batch_rows=5), rate), name="events")
    counts = events.key_by("user").agg(rows=hg.count(), total=hg.sum("n"), name="counts")
    sink = collect()
    counts.write(sink, name="out")
    return job, sink


def totals(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Rows and sum over all users, of the last result of each."""
    last: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["rows"]):
        last[row["user"]] = row
    return sum(row["rows"] for row in last.values()), sum(row["total"] for row in last.values())
