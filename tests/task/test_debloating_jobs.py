"""Whole jobs on virtual time: what is under way in front of a slow step is worth about the target."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, collect, generator, numbers, sequence
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.sink import Sink
from headgate.runtime.exchange.gate import InputGate
from headgate.runtime.job import runnable
from headgate.testing.run import VirtualRun

ROW_S = {"columns": 0.001, "objects": 0.005}
"""The time of a record in the slow step. Objects take a timer each, so they are fewer."""
BUFFER = {"columns": "32 kb", "objects": "8 kb"}
DEBLOAT = "taskmanager.network.memory.buffer-debloat"


async def slow(batch: Any) -> Any:
    await asyncio.sleep(ROW_S["columns"] * len(batch))
    return batch


async def slow_record(record: int) -> int:
    await asyncio.sleep(ROW_S["objects"])
    return record


def job(
    kind: str,
    enabled: str = "true",
    target: str = "1 s",
    rows: int | None = None,
    sink: Sink | None = None,
) -> hg.Job:
    """Source, a step that passes on, a slow one: two gates."""
    job = hg.Job(
        "debloated",
        options={
            f"{DEBLOAT}.enabled": enabled,
            f"{DEBLOAT}.target": target,
            "headgate.buffer.max-size": BUFFER[kind],
        },
    )
    job.checkpoint(every="1h", storage="never-made")
    sink = sink or blackhole()
    if kind == "columns":
        read = job.read(generator({"n": sequence(), "m": sequence()}, rows=rows), name="in")
        passed = read.rebalance().filter("n >= 0", name="pass").rebalance()
        passed.map_batches(slow, name="slow").write(sink, name="out")
    else:
        read = job.read(numbers(rows), name="in")
        passed = read.rebalance().filter(lambda n: n >= 0, name="pass").rebalance()
        passed.map_async(slow_record, name="slow", max_in_flight=1, timeout="1h").write(
            sink, name="out"
        )
    return job


class Run:
    """A job under way, and its gates: that of the step that passes on, and that of the slow one."""

    def __init__(self, kind: str, **arguments: Any) -> None:
        self.row_s = ROW_S[kind]
        self.run = VirtualRun(runnable(job(kind, **arguments)).spec(), seed=1)
        self.run.start()
        (worker,) = self.run._cluster.workers
        regions = worker.hub._regions.values()
        gates = list(dict.fromkeys(gate for each in regions for gate in each.gates.values()))
        self.gates: list[InputGate] = sorted(gates, key=lambda gate: gate.channel_ids)
        self.senders: list[Any] = [gate._channels[0].sender for gate in self.gates]

    def under_way_s(self) -> list[float]:
        """For each gate, what waits there and at its sender, in seconds of work."""
        return [
            self.row_s
            * sum(
                len(element)
                for element in (*gate._channels[0].queue, *sender.queue)
                if isinstance(element, ColumnBatch | ObjectBatch)
            )
            for gate, sender in zip(self.gates, self.senders, strict=True)
        ]


@pytest.fixture
def runs() -> Iterator[list[VirtualRun]]:
    runs: list[VirtualRun] = []
    yield runs
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    ("kind", "target_s"), [("columns", 1.0), ("columns", 0.3), ("objects", 1.0)]
)
def test_what_is_under_way_is_worth_about_the_target(
    runs: list[VirtualRun], kind: str, target_s: float
) -> None:
    made = Run(kind, target=f"{int(1000 * target_s)} ms")
    runs.append(made.run)
    made.run.advance(5_000)
    before = made.under_way_s()
    made.run.advance(80_000)
    for seen in made.under_way_s():
        # The threshold of 25 % either way, and buffers that are not quite full.
        assert 0.5 * target_s < seen < 1.35 * target_s
    assert sum(before) > 3 * sum(made.under_way_s())
    for sender in made.senders:
        assert sender.queued_buffers <= 2, "more than the subtask could have held back"


def test_a_source_is_asked_for_no_more_than_fits(runs: list[VirtualRun]) -> None:
    """Else what it had read, and its position behind, would hold up its barriers."""
    made = Run("columns")
    runs.append(made.run)
    made.run.advance(120_000)
    (source,) = (
        task.get_coro().cr_frame.f_locals["self"]
        for task in asyncio.all_tasks(made.run._loop)
        if task.get_name() == "subtask in (1/1)"
    )
    wanted = source._reader.rows_wanted
    assert 0 < wanted * 16 < made.senders[0].buffer_size_bytes


def test_off_changes_nothing(runs: list[VirtualRun]) -> None:
    made = Run("columns", enabled="false")
    runs.append(made.run)
    made.run.advance(60_000)
    for gate, sender in zip(made.gates, made.senders, strict=True):
        assert sender.buffer_size_bytes is None
        sizes = [len(element) for element in gate._channels[0].queue]
        assert max(sizes) * 16 > 0.9 * 32_768
    assert min(made.under_way_s()) > 10


@pytest.mark.parametrize("kind", ["columns", "objects"])
def test_nothing_is_lost_and_order_is_kept(runs: list[VirtualRun], kind: str) -> None:
    sink = collect(guarantee="none")
    rows = {"columns": 60_000, "objects": 6_000}[kind]
    made = Run(kind, rows=rows, sink=sink)
    runs.append(made.run)
    made.run.finish()
    assert all(sender.buffer_size_bytes is not None for sender in made.senders)
    numbers_in = [row["n"] if kind == "columns" else row for row in sink.rows]
    assert numbers_in == list(range(rows))


def test_two_workers_whose_sizes_change_all_the_time(tmp_path: Path) -> None:
    """Over sockets, and in real time; how small buffers become is left to chance."""
    job = hg.Job(
        "restless",
        parallelism=2,
        options={
            f"{DEBLOAT}.enabled": "true",
            f"{DEBLOAT}.target": "1 ms",
            f"{DEBLOAT}.period": "1 ms",
            f"{DEBLOAT}.threshold-percentages": "1",
        },
    )
    job.checkpoint(every="1h", storage=str(tmp_path))
    sink = collect(guarantee="none")
    read = job.read(numbers(20_000, batch_rows=500), name="in")
    read.rebalance().filter(lambda n: n % 2 == 0, name="even").rebalance().write(sink, name="out")
    job.run()
    assert sorted(sink.rows) == list(range(0, 20_000, 2))
