"""While a sink is backlogged its subtask reads no records, and everything else goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import headgate as hg
from headgate.connectors import from_list
from headgate.operators.base import OperatorContext
from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.tests.batch.conftest import run_here


class SlowWriter(SinkWriter):
    """Has room for one batch, which takes some ms."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self.full = False

    def write(self, batch: Batch) -> None:
        assert not self.full, "a batch comes although the sink is backlogged"
        assert isinstance(batch, ColumnBatch)
        with self.path.open("a") as file:
            file.writelines(f"{row['n']}\n" for row in batch.data.to_pylist())
        self.full = True
        self.context.timers.call_later(2, self._has_room)

    def _has_room(self) -> None:
        self.full = False

    def backlogged(self) -> bool:
        return self.full


class SlowSink(Sink):
    guarantee = Guarantee.AT_LEAST_ONCE
    needs_columns = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def writer(self) -> SinkWriter:
        return SlowWriter(self.path)


def slow_job(
    tmp_path: Path, *, exchange: bool, run: Callable[[hg.Job], object] = hg.Job.run
) -> list[int]:
    """Run a job with a slow sink, and return what it has written."""
    path = tmp_path / "out"
    job = hg.Job("slow", options={"execution.buffer-timeout.interval": "0ms"})
    job.checkpoint(every="10ms", storage=str(tmp_path / "state"))
    records = [(n,) for n in range(40)]
    stream = job.read(from_list(records, schema={"n": "int64"}, batch_rows=1), name="in")
    if exchange:
        stream = stream.rebalance()
    stream.filter("n >= 0").write(SlowSink(path), name="out")
    run(job)
    return [int(line) for line in path.read_text().split()]


def test_a_source_waits_for_the_sink_of_its_chain(tmp_path: Path) -> None:
    assert slow_job(tmp_path, exchange=False) == list(range(40))


def test_a_subtask_with_inputs_waits_for_its_sink(tmp_path: Path) -> None:
    assert sorted(slow_job(tmp_path, exchange=True)) == list(range(40))


def test_a_batch_subtask_waits_for_its_sink(tmp_path: Path) -> None:
    assert slow_job(tmp_path, exchange=False, run=run_here) == list(range(40))
