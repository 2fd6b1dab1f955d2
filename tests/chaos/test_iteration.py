"""A loop whose processes are killed at random while several checkpoints are under way in it.

A source, a loop head, steps with state in the loop, a feedback edge and an exit. Barriers go round the loop
behind records that take their time, so that the logs of several checkpoints are open at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset as ds
import pytest

import headgate as hg
from headgate.connectors import generator, parquet_sink, sequence
from headgate.connectors.files.sink import FileSink
from headgate.operators.sink import SinkWriter

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
ROWS = 1_000
RATE = 200.0
WAYS = 5
"""The number of rounds of a record; every third has twice as many."""
HOP_S = 0.0004
PRECOMMIT_S = 0.1


class Traveller(msgspec.Struct, frozen=True):
    id: int
    left: int


def ways_of(id_: int) -> int:
    return WAYS * (1 + (id_ % 3 == 0))


class Hop(hg.KeyedProcess[int, Traveller, Traveller]):
    """Counts down, in no hurry. Its state would not take a record twice, or miss one."""

    last = hg.ValueState[int]()

    def on_record(self, record: Traveller, ctx: hg.Context[int]) -> Iterator[Traveller]:
        time.sleep(HOP_S)
        expected = self.last.get()
        if record.left != (ways_of(record.id) if expected is None else expected):
            raise AssertionError(f"{record} came, left=`{expected}` was expected")
        self.last.set(record.left - 1)
        yield Traveller(record.id, record.left - 1)


def start(row: Any) -> Traveller:
    return Traveller(row.id, ways_of(row.id))


def hops(stream: Any) -> tuple[Any, Any]:
    done = stream.key_by("id").process(Hop(), into=Traveller, name="hop")
    return done.filter("left > 0").rebalance().filter("left > 0", name="on"), done


class Unhurried(FileSink):
    """Files whose pre-commit takes so long that the next checkpoints begin meanwhile."""

    def writer(self) -> SinkWriter:
        writer = super().writer()
        roll = writer.roll

        def slowly(checkpoint_id: int) -> Callable[[], list[bytes]] | None:
            precommit = roll(checkpoint_id)
            return None if precommit is None else lambda: (time.sleep(PRECOMMIT_S), precommit())[1]

        writer.roll = slowly
        return writer


def make_job(path: Path) -> hg.Job:
    job = hg.Job("loop", parallelism=2, options={"headgate.iteration.memory": "32 kb"})
    job.checkpoint(every="20ms", storage=str(path / "chk"), max_concurrent=4)
    job.restart(attempts=1000, delay="50ms")
    sink = parquet_sink(str(path / "out"), guarantee="exactly_once")
    sink.__class__ = Unhurried
    rows = generator({"id": sequence()}, rows=ROWS, rate=RATE, batch_rows=20)
    (
        job.read(rows, name="rows")
        .map(start, into=Traveller)
        .iterate(hops, name="loop")
        .write(sink, name="out")
    )
    return job


def test_a_loop_survives_kills(ring: Any, kills: Any, killings: Any, tmp_path: Path) -> None:
    ran = ring.run(make_job(tmp_path), kills(workers=3, coordinators=1), seed=6, until=killings(4))
    assert len(ran.chaos.kills) == 4, ran.chaos.kills
    table = ds.dataset(tmp_path / "out", format="parquet").to_table()
    found = sorted(zip(table["id"].to_pylist(), table["left"].to_pylist(), strict=True))
    assert found == [(id_, left) for id_ in range(ROWS) for left in range(ways_of(id_))]
    completed = [
        body["id"]
        for body in (
            json.loads(event.body) for event in ran.chaos.events if event.kind == "checkpoint"
        )
        if body["status"] == "COMPLETED"
    ]
    # Numbers are given out at the start: those that are missing were under way when something died.
    assert max(after - before for before, after in pairwise(completed)) > 2
    lost = [text for text in ran.chaos.texts("failure") if "worker lost" in text or "died" in text]
    assert lost == ran.chaos.texts("failure")
