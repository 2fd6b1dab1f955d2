"""A job that numbers the records of each key, and the check that it has counted each record once."""

from __future__ import annotations

from typing import Any

import headgate as hg
from headgate.connectors import numbers
from headgate.runtime.job import runnable


def make_job(lab: Any, sink: Any, group: str = "default", **options: str) -> hg.Job:
    """The step `count`, and those behind it, are in the slot sharing group `group`."""
    resources = {group: hg.Resources()}
    job = hg.Job("job", parallelism=2, max_parallelism=12, resources=resources)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=0, delay="10ms")
    runnable(job).override(options)
    (
        job.read(numbers(None, rate=1500, batch_rows=10, splits=4), name="numbers")
        .key_with(lambda n: n % 12)
        .process(Counted(), name="count")
        .slot_sharing_group(group)
        .write(sink, name="out")
    )
    return job


class Counted(hg.KeyedProcess[int, int, tuple[int, int]]):
    """Numbers the records of each key."""

    count = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: hg.Context[int]) -> Any:
        self.count.set(self.count.get() + 1)
        yield record, self.count.get()


def check_exact(sink: Any) -> None:
    """Every number is there once, and was counted once."""
    numbers_seen = [number for number, _ in sink.rows]
    assert len(numbers_seen) == len(set(numbers_seen)) > 0
    for key in range(12):
        counts = sorted(count for number, count in sink.rows if number % 12 == key)
        assert counts == list(range(1, len(counts) + 1))
