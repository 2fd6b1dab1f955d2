"""Whole jobs over keyed state, in this process: generator, key_by, aggregate, a sink that counts."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from metering import MeteredSource, TallySink, read_marks
from state_operators import WINDOW, aggregates, source

import headgate as hg


@dataclass(frozen=True, slots=True)
class JobRun:
    """One job behind its warm-up."""

    rate: float
    """Rows per second."""
    longest_ms: float
    """The longest time between two reads of the source, warm-up included."""
    rows_out: int


def make_job(
    kind: str, keys: int, rows: int, directory: str, checkpoint_every: str | None
) -> hg.Job:
    """An aggregate at parallelism 1; `directory` takes the marks and the checkpoints."""
    job = hg.Job(f"bench-state-{kind}-{Path(directory).name}", parallelism=1)
    if checkpoint_every is not None:
        job.checkpoint(every=checkpoint_every, storage=str(Path(directory, "checkpoints")))
    records = job.read(MeteredSource(source(keys, rows), directory), name="records")
    if kind == "running":
        result = records.key_by("key").agg(**aggregates(), name="state")
    else:
        timed = records.event_time("ts")
        result = timed.key_by("key").window(hg.tumbling(WINDOW)).agg(**aggregates(), name="state")
    result.write(TallySink(directory, False), name="out")
    return job


def run_job(kind: str, keys: int, rows: int, checkpoint_every: str | None = None) -> JobRun:
    """Run one, and read its clocks."""
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        make_job(kind, keys, rows, directory, checkpoint_every).run()
        steady = read_marks(directory)
        marks = json.loads(Path(directory, "source-0.json").read_text())["marks"]
    gaps = [later - before for (before, _), (later, _) in pairwise(marks)]
    return JobRun(
        rate=steady.events / (steady.ended - steady.began),
        longest_ms=1000 * max(gaps, default=0.0),
        rows_out=steady.rows_out,
    )
