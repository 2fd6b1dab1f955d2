"""A slow sink slows the source down: memory stays bounded, and nothing is lost or doubled."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, function_sink, numbers

BATCH = 16
RECORD_S = 0.001
BUFFERS = {"taskmanager.network.memory.buffers-per-channel": "2"}
FLOATING = {"taskmanager.network.memory.floating-buffers-per-gate": "4"}
UNCOALESCED = {"execution.buffer-timeout.interval": "0 ms"}


def slow_identity(n: int) -> int:
    time.sleep(RECORD_S)
    return n


def make_job(
    lab: Any, parallelism: int, rows: int | None, path: Path, rate: float | None
) -> hg.Job:
    job = hg.Job(
        "slow",
        parallelism=parallelism,
        options={**BUFFERS, **FLOATING, **UNCOALESCED, "headgate.task.slice": "10 ms"},
    )
    job.checkpoint(every="1h", storage=lab.storage)
    (
        job.read(numbers(rows, rate=rate, batch_rows=BATCH, splits=4), name="numbers")
        .rebalance()
        .map(slow_identity, name="slow")
        .write(collect(path=str(path), guarantee="exactly_once"), name="out")
    )
    return job


def bound(parallelism: int) -> int:
    """Records that may be between the sources and the sinks; a buffer is a batch (no coalescing)."""
    channels = parallelism * parallelism
    in_gates = 2 * channels + 4 * parallelism  # exclusive and floating buffers
    parked = channels  # what a partition still takes before it notices that it is backlogged
    in_hand = parallelism  # records count as read when their buffer begins to be worked on
    return (in_gates + parked + in_hand) * BATCH


@pytest.mark.parametrize("rate", [None, 20_000])
def test_a_slow_operator(lab: Any, by_subtask: Any, rate: float | None) -> None:
    parallelism = 2
    limit = bound(parallelism)
    gaps: list[int] = []
    pressure: list[int] = []
    job = make_job(lab, parallelism, None, lab.path / "out", rate)

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        while len(gaps) < 8 or max(pressure) <= 500:
            status = await running.status()
            source, sink = status["vertices"]
            if sink["records_in"]:
                gaps.append(source["records_out"] - sink["records_in"])
                pressure.append(source["backpressured"])
            await running.tick()
        answer = await running.request("stop")
        assert answer["status"] == "SUSPENDED"

    ran = lab.run(job, script)
    assert BATCH < max(gaps) <= limit
    assert max(pressure) > 500
    written = sorted(sum(by_subtask(lab.path / "out").values(), []))
    assert written
    # Everything read before the stop's barrier is written: a gapless prefix of each split.
    assert len(set(written)) == len(written)

    rows = max(written) + 50
    again = lab.run(make_job(lab, parallelism, rows, lab.path / "out", rate))
    assert again.outcome.status == "FINISHED"
    assert again.restores == [ran.outcome.checkpoint]
    assert Counter(sum(by_subtask(lab.path / "out").values(), [])) == Counter(range(rows))


def test_a_slow_function_sink_gets_everything(lab: Any, faults: Any) -> None:
    path = str(lab.path / "seen")

    def note(n: int) -> None:
        time.sleep(RECORD_S / 4)
        with open(path, "a") as file:
            file.write(f"{n}\n")

    job = hg.Job("slow", parallelism=2)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.read(numbers(1000, batch_rows=BATCH), name="numbers").rebalance().write(
        function_sink(note), name="out"
    )
    ran = lab.run(job, faults.none(checkpoints=2))
    assert ran.outcome.status == "FINISHED"
    assert ran.completed >= 2
    seen = [int(line) for line in Path(path).read_text().split()]
    assert Counter(seen) == Counter(range(1000))
