"""A worker on a local Ray is killed while a spare one waits."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import polars as pl
import pyarrow.dataset as ds
import pytest

import headgate as hg
from headgate.connectors import generator, parquet_sink, sequence

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
ROWS = 24_000


def test_a_spare_worker_takes_the_place_of_one_that_is_killed(ring: Any, tmp_path: Any) -> None:
    job = hg.Job(
        "standby",
        parallelism=2,
        options={
            "slotmanager.redundant-taskmanager-num": "1",
            "execution.checkpointing.local-backup.enabled": "true",
            "execution.state-recovery.from-local": "true",
            "execution.checkpointing.data-inline-threshold": "0b",
            "io.tmp.dirs": str(tmp_path),
        },
    )
    job.checkpoint(every="250ms", storage=str(tmp_path / "chk"))
    job.restart(attempts=1000, delay="0s")
    rows = generator({"n": sequence()}, rows=ROWS, rate=4_000, batch_rows=50)
    counted = job.read(rows, name="rows").key_by("n").agg(c=hg.count(), name="count")
    counted.write(parquet_sink(str(tmp_path / "out"), guarantee="exactly_once"), name="out")
    before: list[dict[str, Any]] = []
    after: list[set[str]] = []

    async def kill(chaos: Any) -> None:
        """The first worker, once the spare is there."""
        while len(before) < 3:
            before[:] = (await chaos.status())["workers"]
            await asyncio.sleep(0.05)
        chaos.kills.append(before[0]["worker"])
        os.kill(before[0]["pid"], signal.SIGKILL)

    async def look(chaos: Any) -> None:
        after.append({worker["worker"] for worker in (await chaos.status())["workers"]})

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        completed = event.kind == "checkpoint" and body.get("status") == "COMPLETED"
        if completed and not chaos.state.get("armed"):
            chaos.state["armed"] = True
            chaos.later(0.0, kill)
        elif event.kind == "recovered":
            chaos.state["recovered"] = body
            chaos.later(0.0, look)

    ran = ring.run(job, plan, seed=1, until=lambda chaos: bool(after))
    assert len(ran.chaos.kills) == 1
    assert len(ran.chaos.texts("failure")) == 1
    assert {worker["worker"] for worker in before[1:]} <= after[0], "nobody else was started for it"
    told = ran.chaos.state["recovered"]
    assert told["lastRestartLocalStateSize"] > 0, "the spare is of the same machine"
    assert told["lastRestartRemoteStateSize"] == 0
    table = pl.from_arrow(ds.dataset(tmp_path / "out", format="parquet").to_table())
    assert isinstance(table, pl.DataFrame)
    assert sorted(table["n"].to_list()) == list(range(ROWS))
    assert not list(tmp_path.glob("headgate-copies-*/*/*")), "the job is over"
