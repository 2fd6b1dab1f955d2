"""Unaligned checkpoints under backpressure: exact through kills, restores and changes of parallelism.

The design is that of Flink's `UnalignedCheckpointITCase`: unique numbers, growing per source split, through
several shuffles into a slow end; each step keeps per key the last number it has seen. Lost, doubled and
out-of-order numbers are counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.runtime.job import runnable
from headgate.runtime.savepoint.compare import check
from headgate.runtime.savepoint.locate import StoredSnapshot
from headgate.state.snapshot import StateHandle

ROWS = 4000
BATCH = 32
SPLITS = 4
SMALL_BUFFERS = {
    "taskmanager.network.memory.buffers-per-channel": "1",
    "taskmanager.network.memory.floating-buffers-per-gate": "1",
    "execution.buffer-timeout.interval": "0 ms",
}


def key_of(n: int) -> int:
    """Numbers of one key come from one split, in order."""
    return n // BATCH % SPLITS * 6 + n % 6


class InOrder(hg.KeyedProcess[int, int, tuple[int, bool]]):
    """Passes numbers on, each with whether it was not above the one before of its key."""

    last = hg.ValueState[int](default=-1)

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[tuple[int, bool]]:
        wrong = record <= self.last.get()
        self.last.set(record)
        yield record, wrong


class Slowly(hg.KeyedProcess[int, tuple[int, bool], tuple[int, bool]]):
    """The end that all others wait for."""

    def on_record(
        self, record: tuple[int, bool], ctx: hg.Context[int]
    ) -> Iterator[tuple[int, bool]]:
        time.sleep(0.0005)
        yield record


def make_job(
    lab: Any,
    parallelism: int,
    path: Path,
    slow_key: Callable[[int], int] = key_of,
    **options: str,
) -> hg.Job:
    job = hg.Job(
        "unaligned",
        parallelism=parallelism,
        max_parallelism=24,
        options={
            "execution.checkpointing.unaligned.enabled": "true",
            "headgate.task.slice": "5 ms",
            **options,
        },
    )
    job.checkpoint(every="40ms", storage=lab.storage)
    job.restart(attempts=50, delay="10ms")
    (
        job.read(numbers(ROWS, batch_rows=BATCH, splits=SPLITS), name="numbers")
        .key_with(key_of)
        .process(InOrder(), name="order")
        .rebalance()
        .map(lambda pair: pair, name="between")
        .key_with(lambda pair: slow_key(pair[0]))
        .process(Slowly(), name="slow")
        .write(collect(path=str(path), guarantee="exactly_once"), name="out")
    )
    return job


def written(by_subtask: Any, path: Path) -> list[tuple[int, bool]]:
    return sum(by_subtask(path).values(), [])


def assert_exact(pairs: list[tuple[int, bool]]) -> None:
    assert Counter(n for n, _ in pairs) == Counter(range(ROWS))
    assert not [n for n, wrong in pairs if wrong], "numbers of one key came out of order"


@pytest.mark.parametrize("timeout", ["0 ms", "20 ms"])
@pytest.mark.parametrize("buffers", [{}, SMALL_BUFFERS], ids=["default", "small"])
@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_kills(
    lab: Any, faults: Any, by_subtask: Any, parallelism: int, buffers: Any, timeout: str
) -> None:
    aligned = {"execution.checkpointing.aligned-checkpoint-timeout": timeout}
    job = make_job(lab, parallelism, lab.path / "out", **buffers, **aligned)
    ran = lab.run(job, faults.kills(parallelism, 2))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.restores) >= 2
    assert_exact(written(by_subtask, lab.path / "out"))


class Crashed(Exception):
    """The whole job is gone, at a checkpoint with records on their way."""


def in_flight_of(running: Any) -> list[StateHandle]:
    """The records on their way in the newest checkpoint."""
    manifest = running.coordinator._context.env.log.view.newest.manifest
    return [handle for handle in manifest.handles() if handle.channel is not None]


def crash_with_records_on_their_way(kinds: set[str]) -> Any:
    async def script(running: Any) -> None:
        while True:
            await running.checkpoint()
            if kinds <= {handle.kind for handle in in_flight_of(running)}:
                raise Crashed

    return script


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (2, 3), (3, 7), (4, 8), (8, 4), (7, 3), (3, 1)]
)
def test_another_parallelism(lab: Any, by_subtask: Any, before: int, after: int) -> None:
    with pytest.raises(Crashed):
        lab.run(
            make_job(lab, before, lab.path / "out", **SMALL_BUFFERS),
            crash_with_records_on_their_way({"input", "output"}),
        )
    ran = lab.run(make_job(lab, after, lab.path / "out", **SMALL_BUFFERS))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.restores) == 1
    assert_exact(written(by_subtask, lab.path / "out"))


@pytest.mark.parametrize("after", [2, 3])
def test_records_on_their_way_to_another_key_are_refused(lab: Any, after: int) -> None:
    """They belong where the old key sends them: after a change of parallelism some would have no owner."""
    with pytest.raises(Crashed):
        lab.run(
            make_job(lab, 2, lab.path / "out", **SMALL_BUFFERS),
            crash_with_records_on_their_way({"input", "output"}),
        )
    ran = lab.run(make_job(lab, after, lab.path / "out", lambda n: n % 7, **SMALL_BUFFERS))
    assert ran.outcome.status == "FAILED"
    assert any("whose key was another one" in text for text in ran.failures), ran.failures


def test_a_plan_that_lacks_the_exchange_of_records_on_their_way_does_not_pass_the_check(
    lab: Any, retained: Any
) -> None:
    with pytest.raises(Crashed):
        lab.run(
            make_job(lab, 2, lab.path / "out", **SMALL_BUFFERS),
            crash_with_records_on_their_way({"input"}),
        )
    manifest = retained("unaligned").newest.manifest

    def other_text(**options: str) -> str:
        job = hg.Job("unaligned", parallelism=2, max_parallelism=24, options=options)
        job.read(numbers(ROWS), name="numbers").write(collect(guarantee="none"), name="out")
        return "; ".join(
            check(
                StoredSnapshot(manifest, lab.storage, "unaligned", None), runnable(job).spec()
            ).other
        )

    assert "not connected in the job" in other_text()
    key = "execution.state-recovery.without-channel-state.checkpoint-id"
    assert not other_text(**{key: str(manifest.checkpoint_id)})


@pytest.mark.parametrize("after", [2, 3])
def test_another_job_begins_with_records_on_their_way_and_a_savepoint_is_taken_behind_them(
    lab: Any, by_subtask: Any, after: int
) -> None:
    with pytest.raises(Crashed):
        lab.run(
            make_job(lab, 2, lab.path / "out", **SMALL_BUFFERS),
            crash_with_records_on_their_way({"input", "output"}),
        )
    taken_over, saved = f"{lab.storage}/unaligned", []
    lab.storage += "-second"

    async def stop(running: Any) -> None:
        await running.until("status", status="RUNNING")
        saved.append((await running.request("stop", savepoint=str(lab.path / "save")))["savepoint"])

    second = make_job(lab, after, lab.path / "out", **SMALL_BUFFERS)
    ran = lab.run(second, stop, restore_from=taken_over)
    assert ran.outcome.status == "SUSPENDED", ran.failures
    lab.storage += "-third"
    ran = lab.run(make_job(lab, 1, lab.path / "out", **SMALL_BUFFERS), restore_from=saved[0])
    assert ran.outcome.status == "FINISHED", ran.failures
    assert_exact(written(by_subtask, lab.path / "out"))
