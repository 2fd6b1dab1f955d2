"""Unaligned checkpoints of real processes that are killed: nothing lost, nothing twice, all in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

import headgate as hg
from headgate.connectors import numbers, parquet_sink

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
ROWS = 24_000
BATCH = 64
SPLITS = 4
RECORD_S = 0.001


def key_of(n: int) -> int:
    """Numbers of one key come from one split, in order."""
    return n // BATCH % SPLITS * 6 + n % 6


class InOrder(hg.KeyedProcess[int, int, dict[str, Any]]):
    """The slow end: says of each number whether it was above the one before of its key."""

    last = hg.ValueState[int](default=-1)

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[dict[str, Any]]:
        time.sleep(RECORD_S)
        wrong = record <= self.last.get()
        self.last.set(record)
        yield {"n": record, "wrong": wrong}


def make_job(path: Path) -> hg.Job:
    job = hg.Job(
        "overtaken",
        parallelism=2,
        max_parallelism=24,
        options={
            "execution.checkpointing.unaligned.enabled": "true",
            "taskmanager.network.memory.buffers-per-channel": "1",
            "headgate.task.slice": "20 ms",
        },
    )
    job.checkpoint(every="200ms", storage=str(path / "chk"))
    job.restart(attempts=1000, delay="50ms")
    (
        job.read(numbers(ROWS, batch_rows=BATCH, splits=SPLITS), name="numbers")
        .key_with(key_of)
        .process(InOrder(), into={"n": "long", "wrong": "boolean"}, name="slow")
        .write(parquet_sink(str(path / "out"), guarantee="exactly_once"), name="out")
    )
    return job


def test_kills_while_records_are_on_their_way(
    ring: Any, kills: Any, killings: Any, tmp_path: Path
) -> None:
    ran = ring.run(make_job(tmp_path), kills(workers=3, coordinators=1), seed=5, until=killings(4))
    assert len(ran.chaos.kills) == 4, ran.chaos.kills
    table = ds.dataset(tmp_path / "out", format="parquet").to_table()
    assert sorted(table["n"].to_pylist()) == list(range(ROWS))
    assert not any(table["wrong"].to_pylist())
    completed = [json.loads(event.body) for event in ran.chaos.events if event.kind == "checkpoint"]
    assert sum(body["status"] == "COMPLETED" for body in completed) > 4
    assert any(body.get("persisted_data", 0) > 0 for body in completed)
