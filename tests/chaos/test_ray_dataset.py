"""A job reads a real Ray Dataset on a local Ray, its processes are killed, and each row counts once.

Method: the function of the dataset notes each call; the answer follows from the numbers.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

import headgate as hg
from headgate.connectors import parquet_sink, ray_dataset_source

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
ROWS = 40_000


def restored(chaos: Any) -> bool:
    """A worker was killed, and the job goes on from a checkpoint."""
    return bool(chaos.texts("restored"))


def adopted(chaos: Any) -> bool:
    """The coordinator was killed, and another one leads the job."""
    return any(event.kind == "adopted" for event in chaos.events)


def wait_for(directory: Path, pattern: str) -> None:
    """Wait until a file is there."""
    while not any(directory.glob(pattern)):
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("victim", "parallelism"), [("worker", 1), ("worker", 3), ("coordinator", 2)]
)
def test_a_dataset_is_computed_once_whatever_dies(
    ring: Any, tmp_path: Path, victim: str, parallelism: int
) -> None:
    asked = tmp_path / "asked"

    def numbers() -> Any:
        import ray.data

        with asked.open("a") as file:
            file.write("once\n")
        return ray.data.range(ROWS, override_num_blocks=8).map_batches(
            lambda batch: {"id": batch["id"], "cents": batch["id"] % 7}
        )

    job = hg.Job("dataset", parallelism=parallelism)
    job.checkpoint(every="250ms", storage=str(tmp_path / "ck"))
    job.restart(5, delay="0s")
    source = ray_dataset_source(
        numbers, {"id": "long", "cents": "long"}, split_bytes="32kb", batch_rows=500
    )
    stream = job.read(source, name="numbers")
    stream.write(parquet_sink(str(tmp_path / "out"), guarantee="exactly_once"), name="out")

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        completed = event.kind == "checkpoint" and body.get("status") == "COMPLETED"
        if completed and not chaos.state:
            chaos.state["killed"] = True
            chaos.later(0, lambda c: getattr(c, f"kill_{victim}")())

    over = restored if victim == "worker" else adopted
    ran = ring.run(job, plan, seed=3, until=over, batches=4)
    assert len(ran.chaos.kills) == 1
    rows = ds.dataset(tmp_path / "out", format="parquet").to_table().to_pydict()
    assert sorted(rows["id"]) == list(range(ROWS))
    assert all(cents == number % 7 for number, cents in zip(rows["id"], rows["cents"], strict=True))
    assert asked.read_text() == "once\n"
    assert not list((tmp_path / "ck").rglob("sources/*/*/*")), "it goes with the job's end"


def test_a_coordinator_that_dies_while_it_writes_is_followed_by_one_that_computes_again(
    ring: Any, tmp_path: Path
) -> None:
    asked, begun = tmp_path / "asked", tmp_path / "begun"
    temporary = Path(tempfile.gettempdir())

    def numbers() -> Any:
        import ray.data

        with asked.open("a") as file:
            file.write("once\n")

        def computed(batch: Any) -> Any:
            """Leave the second half of the rows to the second coordinator."""
            if batch["id"][0] >= ROWS / 2:
                begun.touch()
                while len(asked.read_text().splitlines()) < 2:
                    time.sleep(0.05)
            return batch

        return ray.data.range(ROWS, override_num_blocks=8).map_batches(computed)

    job = hg.Job("dataset", parallelism=2)
    job.checkpoint(every="250ms", storage=str(tmp_path / "ck"))
    job.restart(5, delay="0s")
    source = ray_dataset_source(numbers, {"id": "long"}, split_bytes="32kb")
    out = parquet_sink(str(tmp_path / "out"), guarantee="exactly_once")
    job.read(source, name="numbers").write(out, name="out")

    async def kill(chaos: Any) -> None:
        # It has written rows of the first half into a file of its own, which it leaves behind.
        await asyncio.to_thread(wait_for, temporary, "headgate-result-*/part-*")
        await asyncio.to_thread(wait_for, tmp_path, "begun")
        chaos.kill_coordinator()

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        if not chaos.state:
            chaos.state["armed"] = True
            chaos.later(0, kill)

    ran = ring.run(job, plan, seed=3)
    assert len(ran.chaos.kills) == 1
    rows = ds.dataset(tmp_path / "out", format="parquet").to_table()
    assert sorted(rows["id"].to_pylist()) == list(range(ROWS))
    assert asked.read_text() == "once\nonce\n"
    assert not list((tmp_path / "ck").rglob("sources/*/*/*")), "it goes with the job's end"
