"""Event time under unaligned checkpoints, in whole jobs: what a barrier overtook is not lost."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import Pause, collect, from_list, numbers

SMALL_BUFFERS = {
    "taskmanager.network.memory.buffers-per-channel": "1",
    "taskmanager.network.memory.floating-buffers-per-gate": "1",
    "execution.buffer-timeout.interval": "0 ms",
}

MANY_BUFFERS = {
    "taskmanager.network.memory.buffers-per-channel": "100",
    "execution.buffer-timeout.interval": "0 ms",
}


def new_job(lab: Any, parallelism: int, **options: str) -> hg.Job:
    job = hg.Job(
        "times",
        parallelism=parallelism,
        max_parallelism=12,
        options={
            "execution.checkpointing.unaligned.enabled": "true",
            "pipeline.auto-watermark-interval": "0 ms",
            "headgate.task.slice": "5 ms",
            **options,
        },
    )
    job.checkpoint(every="40ms", storage=lab.storage)
    job.restart(attempts=50, delay="10ms")
    return job


def in_flight_of(running: Any) -> list[Any]:
    """The records on their way in the newest checkpoint."""
    manifest = running.coordinator._context.env.log.view.newest.manifest
    return [handle for handle in manifest.handles() if handle.channel is not None]


class Over(Exception):
    """The whole job is gone."""


# --- a source that falls silent, or ends, with its last watermark on its way -----------------------------

READ = 3_000
WINDOW_MS = 250


class Counting(hg.WindowProcess[int, int, tuple[int, int]]):
    def on_window(self, key: int, window: Any, records: Any, ctx: Any) -> Any:
        yield window.start, len(records)


def held_job(lab: Any, parallelism: int, *, ends: bool) -> hg.Job:
    """Records read at once pass the shuffle in 15 s, until there is a file `go`."""
    last, go = lab.path / "read", lab.path / "go"

    def time_of(n: int) -> int:
        if n == READ - 1:
            last.touch()
        return n

    def held(n: int) -> int:
        if not go.exists():
            time.sleep(0.005)
        return n

    job = new_job(lab, parallelism, **MANY_BUFFERS)
    items: list[Any] = [*range(READ)] if ends else [*range(READ), Pause("1h")]
    (
        job.read(from_list(items, batch_rows=20, splits=1), name="in", parallelism=1)
        .event_time(time_of)
        .rebalance()
        .map(held, name="held")
        .key_with(lambda n: n % 2)
        .window(hg.tumbling(f"{WINDOW_MS}ms"))
        .process(Counting(), name="windows")
        .write(collect(path=str(lab.path / "out"), guarantee="exactly_once"), name="out")
    )
    return job


async def crash_behind_the_last_record(running: Any, read: Path) -> None:
    while not read.exists():
        await running.tick()
    for _ in range(2):  # the second began behind the last record
        await running.checkpoint()
    assert in_flight_of(running)
    raise Over


@pytest.mark.parametrize("after", [2, 3])
def test_windows_close_though_the_source_is_silent_after_a_restore(
    lab: Any, by_subtask: Any, after: int
) -> None:
    with pytest.raises(Over):
        lab.run(
            held_job(lab, 2, ends=False),
            lambda running: crash_behind_the_last_record(running, lab.path / "read"),
        )
    (lab.path / "go").touch()
    complete = {(start, WINDOW_MS // 2): 2 for start in range(0, READ - WINDOW_MS, WINDOW_MS)}

    def written() -> Counter[Any]:
        return Counter(sum(by_subtask(lab.path / "out").values(), []))

    async def until_they_are_closed(running: Any) -> None:
        while written() != complete:
            await running.checkpoint()
        raise Over

    with pytest.raises(Over):
        lab.run(held_job(lab, after, ends=False), until_they_are_closed)


@pytest.mark.parametrize("after", [2, 3])
def test_an_end_that_was_overtaken_comes_again(lab: Any, by_subtask: Any, after: int) -> None:
    with pytest.raises(Over):
        lab.run(
            held_job(lab, 2, ends=True),
            lambda running: crash_behind_the_last_record(running, lab.path / "read"),
        )
    (lab.path / "go").touch()
    ran = lab.run(held_job(lab, after, ends=True))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.restores) == 1
    found = Counter(sum(by_subtask(lab.path / "out").values(), []))
    assert found == {(start, WINDOW_MS // 2): 2 for start in range(0, READ, WINDOW_MS)}


# --- windows and joins through kills and a change of parallelism ------------------------------------------

ROWS, BATCH, SPLITS = 800, 16, 4
BURST, KEYS = 40, 5
"""Records of one key come in bursts of consecutive times."""
SLIDE_MS, GAP_MS = 25, 20


def key_of(n: int) -> int:
    return n // BURST % KEYS


def slowly(row: Any) -> Any:
    time.sleep(0.0003)
    return row


def busy_job(lab: Any, parallelism: int) -> hg.Job:
    job = new_job(lab, parallelism, **SMALL_BUFFERS)
    rows = (
        job.read(numbers(ROWS, batch_rows=BATCH, splits=SPLITS), name="numbers")
        .map(lambda n: {"k": key_of(n), "a": n}, into={"k": "long", "a": "long"})
        .event_time("a")
    )
    left = rows.filter("a % 2 = 0").key_by("k")
    right = rows.filter("a % 2 = 1").select("k", "a AS b").key_by("k")
    keyed = rows.key_by("k")
    results = [
        keyed.window(window)
        .agg(n=hg.count(), total=hg.sum("a"), name=kind)
        .map(lambda row, kind=kind: (kind, row.k, row.n, row.total), name=f"{kind}-rows")
        for kind, window in (
            ("tumbling", hg.tumbling("50ms", allowed_lateness="20ms")),
            ("sliding", hg.sliding("50ms", f"{SLIDE_MS}ms", allowed_lateness="20ms")),
            ("session", hg.session(f"{GAP_MS}ms")),
        )
    ]
    pairs = left.join(right, within=("-3ms", "1ms"), name="pairs")
    results.append(pairs.map(lambda row: ("pair", row.k, row.a, row.b), name="pair-rows"))
    (
        results[0]
        .union(*results[1:])
        .rebalance()
        .map(slowly, name="slow")
        .write(collect(path=str(lab.path / "out"), guarantee="exactly_once"), name="out")
    )
    return job


def expected() -> Counter[Any]:
    """All results, without anything of ours."""
    found: Counter[Any] = Counter()
    for kind, size, slide in (("tumbling", 50, 50), ("sliding", 50, SLIDE_MS)):
        for start in range(slide - size, ROWS, slide):
            inside: dict[int, list[int]] = {}
            for n in range(max(0, start), min(ROWS, start + size)):
                inside.setdefault(key_of(n), []).append(n)
            found.update((kind, k, len(ns), sum(ns)) for k, ns in inside.items())
    for start in range(0, ROWS, BURST):
        burst = range(start, start + BURST)
        found["session", key_of(start), BURST, sum(burst)] += 1
    for a in range(0, ROWS, 2):
        near = (b for b in range(a - 3, a + 2) if b % 2 == 1 and 0 <= b < ROWS)
        found.update(("pair", key_of(a), a, b) for b in near if key_of(b) == key_of(a))
    return found


def test_windows_and_joins_through_kills_and_another_parallelism(
    lab: Any, faults: Any, by_subtask: Any
) -> None:
    async def kill_and_crash(running: Any) -> None:
        await faults.kills(2, 1)(running)
        while not {"input", "output"} <= {handle.kind for handle in in_flight_of(running)}:
            await running.checkpoint()
        raise Over

    with pytest.raises(Over):
        lab.run(busy_job(lab, 2), kill_and_crash)
    ran = lab.run(busy_job(lab, 3), faults.kills(3, 1))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.restores) == 2
    found = Counter(sum(by_subtask(lab.path / "out").values(), []))
    assert found - expected() == Counter(), "came out twice, or wrong"
    assert expected() - found == Counter(), "is missing"
