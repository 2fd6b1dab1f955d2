"""The job of `backpressure.py`: a keyed shuffle, and a sink that is far too slow.

The sink sleeps as long as its records are worth, as one does that waits for a database: it blocks the event
loop of its worker meanwhile, in which the source and the senders are at work, too.
"""

from __future__ import annotations

import time
from typing import Any

from metering import MeteredSource, TallySink

import headgate as hg
from headgate.connectors.generator import generator, random_int
from headgate.operators.elements import Batch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.operators.source import Source

KEYS = 1_000_000
PARALLELISM = 2


class SlowSink(Sink):
    """Takes `record_us` for each record, and forgets it."""

    guarantees = frozenset(Guarantee)
    guarantee = Guarantee.NONE

    def __init__(self, record_us: float) -> None:
        self._record_us = record_us

    def writer(self) -> SinkWriter:
        return _SlowWriter(self._record_us)


class _SlowWriter(SinkWriter):
    def __init__(self, record_us: float) -> None:
        self._record_s = record_us / 1e6

    def write(self, batch: Batch) -> None:
        if self._record_s:
            time.sleep(len(batch) * self._record_s)


def make_job(
    name: str,
    records: str,
    record_us: float,
    storage: str,
    options: dict[str, str],
    rows: int | None = None,
    metered: str = "",
) -> hg.Job:
    """A running sum per key behind one shuffle.

    Args:
        name: of the job.
        records: `columns` or `objects`.
        record_us: what the sink takes per record; 0: nothing.
        storage: where checkpoints go.
        options: of the job.
        rows: how many records there are; None: no end.
        metered: a directory for the marks of source and sink; empty: none are made.
    """
    job = hg.Job(name, parallelism=PARALLELISM, options=options)
    job.checkpoint(every="1s", storage=storage)
    made: Source
    if records == "columns":
        fields = {"key": random_int(0, KEYS), "value": random_int(0, 1_000)}
        made = generator(fields, rows=rows, batch_rows=32_768)
    else:
        made = generator(function=_pair, rows=rows)
    stream: Any = job.read(MeteredSource(made, metered) if metered else made, name="records")
    if records == "columns":
        sums = stream.key_by("key").agg(value=hg.sum("value"), name="sums")
    else:
        sums = stream.key_with(lambda pair: pair[0]).reduce(
            lambda a, b: (a[0], a[1] + b[1]), name="sums"
        )
    sums.write(TallySink(metered, False) if metered else SlowSink(record_us), name="slow")
    return job


def _pair(number: int) -> tuple[int, int]:
    return number * 2_654_435_761 % KEYS, number % 1_000
