"""Patterns in whole jobs that fail in the middle of matches, stop, and go on at another parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.tests.support.held import Paced
from headgate.tests.support.lab import stop_with_savepoint

ROWS = 900
KEYS = 7
BACKENDS = ["hashmap", "rocksdb"]


def turn(number: int) -> int:
    """Return the place of a record in the rounds of eight of its key.

    The rounds of the keys begin one after the other, so that some match is open at any time.
    """
    return (number // KEYS + number % KEYS) % 8


def pattern() -> hg.cep.Pattern[int]:
    """The third of a round within 25 ms behind the first; behind the fifth none is in time."""
    return (
        hg.cep.begin("first")
        .where(lambda n: turn(n) in (0, 4))
        .followed_by("third")
        .where(lambda n, earlier: turn(n) == 2 and n > earlier["first"][0])
        .within("25ms")
    )


def expected() -> tuple[list[Any], list[int]]:
    begun = [n for n in range(ROWS) if turn(n) in (0, 4)]
    found = [(n, n + 2 * KEYS) for n in begun if turn(n) == 0 and n + 2 * KEYS < ROWS]
    return found, sorted(set(begun) - {n for n, _ in found})


def job_of(lab: Any, sinks: tuple[Any, Any], parallelism: int, backend: str = "hashmap") -> hg.Job:
    options = {"state.backend.type": backend, "pipeline.auto-watermark-interval": "0s"}
    job = hg.Job("patterns", parallelism=parallelism, max_parallelism=12, options=options)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    source = Paced(numbers(ROWS, batch_rows=10, splits=1), 9)
    found = (
        job.read(source, name="numbers", parallelism=1)
        .event_time(lambda n: n, max_out_of_order="20ms")
        .key_with(lambda n: n % KEYS)
        .match(pattern(), name="rounds", select=lambda m: (m["first"][0], m["third"][0]))
    )
    found.write(sinks[0], name="out", parallelism=1)
    late = found.timed_out.map(lambda m: m["first"][0], name="firsts")
    late.write(sinks[1], name="over", parallelism=1)
    return job


def sinks() -> tuple[Any, Any]:
    return collect(guarantee="exactly_once"), collect(guarantee="exactly_once")


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_job_whose_workers_die(lab: Any, faults: Any, parallelism: int) -> None:
    out, over = sinks()
    ran = lab.run(job_of(lab, (out, over), parallelism), faults.kills(parallelism, 3))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    assert (sorted(out.rows), sorted(over.rows)) == expected()


@pytest.mark.parametrize("backends", [BACKENDS, BACKENDS[::-1]])
def test_a_savepoint_goes_on_at_another_parallelism_and_backend(
    lab: Any, tmp_path: Path, backends: list[str]
) -> None:
    out, over = sinks()
    taken: list[str] = []

    script = stop_with_savepoint(tmp_path, taken, checkpoints=2)
    job = job_of(lab, (out, over), 2, backends[0])
    assert lab.run(job, script).outcome.status == "SUSPENDED"
    assert len(out.rows) < len(expected()[0])
    tables = {path.parent.name for path in Path(taken[0]).rglob("*.parquet")}
    assert {"match_waiting", "match_runs", "match_events", "match_nodes", "timers_event"} <= tables
    again = lab.run(job_of(lab, (out, over), 3, backends[1]), restore_from=taken[0])
    assert again.outcome.status == "FINISHED", again.failures
    assert (sorted(out.rows), sorted(over.rows)) == expected()


def test_a_changed_pattern_is_refused_with_its_line(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, over = sinks()

    async def script(running: Any) -> None:
        await running.checkpoint()
        await running.request("stop")

    lab.run(job_of(lab, (out, over), 1), script)
    changed = pattern().followed_by("more")
    monkeypatch.setitem(globals(), "pattern", lambda: changed)
    ran = lab.run(job_of(lab, (out, over), 1))
    assert ran.outcome.status == "FAILED"
    assert "pattern of another form" in " ".join(ran.failures)
