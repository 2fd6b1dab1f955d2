"""Timers on disk fire as those in memory do, whatever happens to their checkpoints.

`tests/support/twins.py` says how. The timers of the function come in the order of time, and those of one
key and time in the order of their tags, so what it sends for a key does not depend on where they lie.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.state.keyed.timers import SpillingTimerTable
from headgate.state.rocksdb.timers import RocksDBTimerTable
from headgate.tests.support.twins import Twins

LEFT = {"k": "string", "n": "long", "a": "long", "word": "string"}
OPTIONS = {"headgate.task.slice": "1h"}
LIVES = 12 if os.environ.get("HEADGATE_THOROUGH") else 1


class Reminders(hg.KeyedProcess[str, Any, Any]):
    """Sets, moves and cancels timers, when a record comes and when one of them is due."""

    fired = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
        ctx.event_time.at(record.a + 40, tag="idle")  # each record moves it on
        ctx.event_time.at(record.a + record.n, tag=record.word or "")
        if record.n % 7 == 0:
            ctx.event_time.cancel(f"{record.n // 7}")
        yield from ()

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
        count = self.fired.get() + 1
        self.fired.set(count)
        yield ctx.key, timer.tag, timer.timestamp, count
        if timer.tag == "idle":
            ctx.event_time.cancel("3")
            ctx.event_time.at(timer.timestamp - 5, tag="before")
            ctx.event_time.at(timer.timestamp, tag="again")
        elif timer.tag == "again" and not ctx.input_ended:
            ctx.event_time.at(timer.timestamp + 25, tag="idle")


class Collect(hg.WindowProcess[str, Any, Any]):
    def on_window(self, key: Any, window: Any, records: Any, ctx: Any) -> Iterator[Any]:
        yield key, window.start, window.end, sorted(record.n for record in records)


STEPS: dict[str, Callable[[Any], Any]] = {
    "process": lambda keyed: keyed.process(Reminders(), name="step"),
    "windows of records": lambda keyed: keyed.window(hg.session("8ms")).process(
        Collect(), name="step"
    ),
}


class TimerTwins(Twins):
    """Two lives of a step with timers."""

    def rows(self, tables: dict[str, list[dict[str, Any]]]) -> list[str]:
        return sorted(f"{name} {row}" for name, rows in tables.items() for row in rows)


def job_of(name: str) -> hg.Job:
    job = hg.Job("timers", max_parallelism=12)
    job.options["pipeline.operator-chaining.enabled"] = "false"
    rows = job.read(from_list([], schema=LEFT), name="in").event_time("a")
    STEPS[name](rows.key_by("k")).write(blackhole(guarantee="none"), name="out")
    return job


@pytest.mark.parametrize("timers", [1, 60])
@pytest.mark.parametrize("name", STEPS)
def test_timers_on_disk_fire_as_those_in_memory_do(
    new_life: Callable[..., Any], name: str, timers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, go_to_disk = [], SpillingTimerTable._go_to_disk

    def noted(table: Any) -> Any:
        moved.append(go_to_disk(table))
        return moved[-1]

    monkeypatch.setattr(SpillingTimerTable, "_go_to_disk", noted)
    sent = 0
    for seed in range(LIVES):
        job = job_of(name)
        managed = f"{8 * 2 * 450 * timers}b"
        on_disk = {"state.backend.type": "rocksdb", "taskmanager.memory.managed.size": managed}
        lives = new_life(job, OPTIONS), new_life(job, {**OPTIONS, **on_disk})
        twins = TimerTwins(("k",), lives, random.Random(seed))
        asyncio.run(twins.run())
        sent += twins.sent
    assert sent > 20 * LIVES
    assert len(moved) >= LIVES
    assert isinstance(moved[0], RocksDBTimerTable)
