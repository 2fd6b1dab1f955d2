"""kill -9 of workers while a job with incremental state changes its parallelism, from 1 to 3 to 2."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, generator, sequence
from headgate.errors import HeadgateError
from headgate.runtime.job import runnable

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
ROWS = 20_000
RATE = 1_600
KEYS = 500
TARGETS = [3, 2]


class Count(hg.KeyedProcess[int, Any, tuple[int, int, int]]):
    """Counts the records of a key, in two kinds of state."""

    seen = hg.ValueState[int](default=0)
    numbers = hg.ListState[int]()

    def on_record(self, record: Any, ctx: Any) -> list[tuple[int, int, int]]:
        self.seen.set(self.seen.get() + 1)
        self.numbers.add(record.n)
        return [(record.k, self.seen.get(), len(self.numbers.get()))]


def make_job(path: Path) -> hg.Job:
    job = hg.Job("rescaled", parallelism=1, max_parallelism=12)
    job.checkpoint(every="200ms", storage=str(path / "checkpoints"))
    job.restart(attempts=1000, delay="50ms")
    runnable(job).override(
        {
            "state.backend.type": "rocksdb",
            "execution.checkpointing.data-inline-threshold": "0 b",
            "headgate.checkpoint.delta-chain-max": "3",
        }
    )
    (
        job.read(generator({"n": sequence()}, rows=ROWS, rate=RATE, batch_rows=50), name="rows")
        .select("n", f"n % {KEYS} AS k")
        .key_by("k")
        .process(Count(), name="count")
        .write(collect(path=str(path / "out"), guarantee="exactly_once"), name="out")
    )
    return job


def rescale_and_kill(chaos: Any, event: Any, body: dict[str, Any]) -> None:
    """After a checkpoint ask for the next parallelism; kill a worker once the change is under way.

    A change whose checkpoint fails with the worker is asked for again.
    """
    left = chaos.state.setdefault("left", list(TARGETS))
    if event.kind == "rescaled":
        assert body["after"] == left.pop(0)
    elif event.kind == "checkpoint" and body["status"] == "COMPLETED":
        if left and not chaos.state.get("asking"):
            chaos.state["asking"] = True
            chaos.later(0.0, lambda c: rescale(c, left[0]))
    elif event.kind == "rescaling" and len(chaos.kills) <= 2 * (len(TARGETS) - len(left)):
        # Into the last checkpoint before, the change itself, and the restore behind it.
        chaos.later(chaos.rng.uniform(0, 0.1), lambda c: c.kill_worker())
    elif event.kind == "restart" and len(chaos.kills) <= 2 * (len(TARGETS) - len(left)) + 1:
        chaos.later(chaos.rng.uniform(0.05, 0.4), lambda c: c.kill_worker())


def rescaled_and_killed(chaos: Any) -> bool:
    return chaos.state["left"] == [] and len(chaos.kills) >= 2


async def rescale(chaos: Any, parallelism: int) -> None:
    client = await chaos.connect()
    try:
        answer = await client.request("rescale", parallelism=parallelism)
        chaos.state.setdefault("answers", []).append(answer["parallelism"])
    except HeadgateError as error:
        chaos.state.setdefault("refusals", []).append(str(error))
    finally:
        await client.close()
        chaos.state["asking"] = False


def test_workers_are_killed_while_a_job_is_rescaled(ring: Any, tmp_path: Path) -> None:
    ran = ring.run(make_job(tmp_path), rescale_and_kill, seed=2, until=rescaled_and_killed)
    told = ran.chaos.kills, ran.chaos.state, ran.chaos.texts("rescaled"), ran.chaos.texts("failure")
    assert ran.chaos.state["left"] == [], told
    assert len(ran.chaos.kills) >= 2, told
    rows = [
        row
        for file in (tmp_path / "out").glob("*.pickle")
        for row in pickle.loads(file.read_bytes())
    ]
    assert sorted(rows) == [(k, i, i) for k in range(KEYS) for i in range(1, ROWS // KEYS + 1)]
    assert not [p for p in (tmp_path / "checkpoints").rglob("chk/*/*") if p.is_file()]
