"""Whole jobs over keyed state, in this process: source, key_by, aggregate, a sink that counts."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from metering import MeteredSource, TallySink, read_marks
from premade import WINDOW as PREMADE_WINDOW
from premade import Premade, PremadeSource, made
from state_operators import WINDOW, aggregates, source

import headgate as hg
from headgate.operators.source import Source


@dataclass(frozen=True, slots=True)
class JobRun:
    """One job behind its warm-up."""

    rate: float
    """Rows per second."""
    cpu_rate: float
    """Rows per second of processor time."""
    longest_ms: float
    """Most processor time between two reads of the source, warm-up included."""
    rows_out: int


def make_job(
    kind: str, records: Source, window: str, directory: str, checkpoint_every: str | None = None
) -> hg.Job:
    """An aggregate at parallelism 1; `directory` takes the marks and the checkpoints."""
    job = hg.Job(f"bench-state-{kind}-{Path(directory).name}", parallelism=1)
    if checkpoint_every is not None:
        job.checkpoint(every=checkpoint_every, storage=str(Path(directory, "checkpoints")))
    stream = job.read(MeteredSource(records, directory), name="records")
    if kind == "running":
        result = stream.key_by("key").agg(**aggregates(), name="state")
    else:
        timed = stream.event_time("ts")
        result = timed.key_by("key").window(hg.tumbling(window)).agg(**aggregates(), name="state")
    result.write(TallySink(directory, False), name="out")
    return job


def run_job(kind: str, keys: int, rows: int, checkpoint_every: str | None = None) -> JobRun:
    """Run one over generated records, in one large window."""
    return _run(kind, source(keys, rows), WINDOW, checkpoint_every)


def run_premade(kind: str, plan: Premade) -> JobRun:
    """Run one over records that are in memory already."""
    made(plan)
    return _run(kind, PremadeSource(plan), PREMADE_WINDOW, None)


def _run(kind: str, records: Source, window: str, checkpoint_every: str | None) -> JobRun:
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        make_job(kind, records, window, directory, checkpoint_every).run()
        steady = read_marks(directory)
        (read,) = Path(directory).glob("source-*.json")
        marks = json.loads(read.read_text())["marks"]
    gaps = [later - before for (*_, before), (*_, later) in pairwise(marks)]
    return JobRun(
        rate=steady.events / (steady.ended - steady.began),
        cpu_rate=steady.events / steady.cpu_s,
        longest_ms=1000 * max(gaps, default=0.0),
        rows_out=steady.rows_out,
    )
