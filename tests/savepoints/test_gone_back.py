"""A job takes a savepoint, fails before its next checkpoint is complete, and goes back to the one before.

A run that begins with the savepoint then has all records, or it is refused: no record is lost in silence.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

import headgate as hg
from headgate.connectors import collect, delta_sink, json_sink
from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.source import Source, SourceReader
from headgate.tests.support.lab import Lab, RunningJob

ROWS = 12
SCHEMA = pa.schema({"n": pa.int64()})


class Numbers(Source[Any]):
    """The numbers up to `ROWS`, of which readers give as many as the file `limit` says."""

    schema = SCHEMA
    bounded = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def splits(self, parallelism: int) -> list[bytes]:
        return [b"0"]

    def reader(self) -> SourceReader:
        return NumbersReader(self.directory)

    def allow(self, limit: int) -> None:
        (self.directory / "limit").write_text(str(limit))

    async def read(self, attempt: int, count: int) -> None:
        """Wait until the attempt of this number, from 1 on, has read up to `count`."""
        while True:
            places = sorted(self.directory.glob("read-*"))
            if len(places) >= attempt and int(places[attempt - 1].read_text() or 0) >= count:
                return
            await asyncio.sleep(0.01)


class NumbersReader(SourceReader):
    def __init__(self, directory: Path) -> None:
        self.directory, self.at = directory, ROWS

    def add_splits(self, splits: Sequence[bytes]) -> None:
        for split in splits:
            self.at = int(split)

    @property
    def finished(self) -> bool:
        return self.at >= ROWS

    def poll(self) -> Batch | None:
        if self.at >= int((self.directory / "limit").read_text()):
            return None
        self.at += 1
        (self.directory / f"read-{self.context.attempt}").write_text(str(self.at))
        return ColumnBatch(pa.RecordBatch.from_pydict({"n": [self.at - 1]}, SCHEMA))

    async def wait(self) -> None:
        await asyncio.sleep(0.005)

    def snapshot(self) -> list[bytes]:
        return [] if self.finished else [str(self.at).encode()]


def make_job(lab: Lab, source: Numbers, sink: Any) -> hg.Job:
    job = hg.Job("job")
    job.checkpoint(every="1h", storage=lab.storage)
    job.restart(attempts=2, delay="10ms")
    job.read(source, name="numbers").write(sink, name="out")
    return job


def gone_back(lab: Lab, source: Numbers, sink: Any) -> str:
    """Run the job, and return the address of the savepoint.

    A checkpoint has the numbers up to 2, and the savepoint those up to 8. Behind it the job goes back to
    the checkpoint, commits those up to 5, and ends.
    """
    taken: list[str] = []

    async def script(job: RunningJob) -> None:
        await source.read(1, 2)
        await job.request("checkpoint")
        source.allow(8)
        await source.read(1, 8)
        done = await job.request("savepoint", savepoint=str(lab.path))
        taken.append(done["savepoint"])
        source.allow(5)
        job.kill(random.Random(1))
        await source.read(2, 5)
        await job.request("checkpoint")
        await job.request("cancel")

    source.allow(2)
    lab.run(make_job(lab, source, sink), script)
    source.allow(ROWS)
    return taken[0]


def test_a_run_from_the_savepoint_is_refused_if_what_was_staged_is_gone(lab: Lab) -> None:
    out = lab.path / "out"
    source = Numbers(lab.path)
    savepoint = gone_back(lab, source, json_sink(out, guarantee="exactly_once"))
    before = sorted(file.name for file in out.glob("part-*"))
    again = json_sink(out, guarantee="exactly_once")
    ran = lab.run(make_job(lab, source, again), restore_from=savepoint)
    assert ran.outcome.status == "FAILED"
    assert all("begin with a newer savepoint" in text for text in ran.failures)
    assert sorted(file.name for file in out.glob("part-*")) == before


def test_a_run_from_the_savepoint_adds_what_was_staged_to_a_table(lab: Lab) -> None:
    """The numbers that the job has committed once more are there twice, as after any step back."""
    table = lab.path / "table"
    source = Numbers(lab.path)
    savepoint = gone_back(lab, source, delta_sink(table))
    ran = lab.run(make_job(lab, source, delta_sink(table)), restore_from=savepoint)
    assert ran.outcome.status == "FINISHED"
    found = Counter(DeltaTable(str(table)).to_pyarrow_table().column("n").to_pylist())
    assert found == Counter([*range(ROWS), *range(2, 5)])


def test_a_run_from_the_savepoint_has_what_was_staged_in_it(lab: Lab) -> None:
    sink, source = collect(guarantee="exactly_once"), Numbers(lab.path)
    savepoint = gone_back(lab, source, sink)
    lab.run(make_job(lab, source, sink), restore_from=savepoint)
    assert Counter(row["n"] for row in sink.rows) == Counter([*range(ROWS), *range(2, 5)])
