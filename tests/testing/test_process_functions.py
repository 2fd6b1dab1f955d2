"""Process functions in a harness: timers of both clocks, side outputs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.testing import harness


class Sessions(hg.KeyedProcess[str, Any, tuple[str, str, int]]):
    """Sums amounts; closes a user's session 10 s later by the clock, or an hour later in event time."""

    total = hg.ValueState[int](default=0)
    refused = hg.SideOutput[Any]()

    def on_record(self, record: Any, ctx: Any) -> Iterator[tuple[str, str, int]]:
        if record.amount < 0:
            ctx.emit(Sessions.refused, record.amount)
            return
        self.total.set(self.total.get() + record.amount)
        ctx.processing_time.after("10s", tag="silence")
        ctx.event_time.at(record.at + timedelta(hours=1), tag="hour")
        yield from ()

    def on_timer(self, timer: Any, ctx: Any) -> Iterator[tuple[str, str, int]]:
        if self.total.exists():
            yield (ctx.key, timer.tag, self.total.get())
            self.total.clear()


@pytest.fixture
def job(click: Any) -> hg.Job:
    job = hg.Job("sessions")
    job.checkpoint(every="1h", storage="never-made")
    job.read(from_list([], schema=click), name="clicks").event_time("at").key_by("user").process(
        Sessions(), name="sessions"
    ).write(collect(guarantee="exactly_once"), name="out")
    return job


@pytest.mark.parametrize("parallelism", [1, 3])
def test_timers_of_both_clocks(job: hg.Job, click: Any, t0: Any, parallelism: int) -> None:
    with harness(job, parallelism=parallelism) as h:
        h.push("clicks", click("ann", 1, t0))
        h.advance_time("9s")
        h.push("clicks", click("ann", 2, t0))  # moves the timer
        h.advance_time("9s")
        assert h.pending("out") == []
        h.advance_time("1s")
        assert h.pending("out") == [("ann", "silence", 3)]
        h.push("clicks", click("bob", 5, t0))
        h.advance_watermark("clicks", t0 + timedelta(hours=1))
        assert h.pending("out")[1:] == [("bob", "hour", 5)]
        h.advance_time("1m")
        assert len(h.pending("out")) == 2


def test_timers_are_restored(job: hg.Job, click: Any, t0: Any) -> None:
    with harness(job, parallelism=2) as h:
        h.push("clicks", click("ann", 1, t0), click("bob", 2, t0))
        h.checkpoint()
        h.crash()
        h.rescale(3)
        h.advance_time("11s")
        assert sorted(h.pending("out")) == [("ann", "silence", 1), ("bob", "silence", 2)]
        h.checkpoint()
        h.crash()
        h.advance_watermark("clicks", t0 + timedelta(hours=2))
        h.end()
        assert len(h.drain("out")) == 2


def test_side_outputs_that_nobody_reads(job: hg.Job, click: Any, t0: Any) -> None:
    with harness(job, parallelism=2) as h:
        h.push("clicks", click("ann", -1, t0))
        h.push("clicks", click("bob", -2, t0), click("bob", 1, t0))
        assert h.drain("sessions.refused") == [-1, -2]
        assert h.drain("sessions.refused") == []


class Guard(hg.BroadcastProcess[str, Any, Any, tuple[str, int]]):
    """Amounts above the limit that was broadcast last."""

    rules = hg.BroadcastState[str, int]()

    def on_record(self, record: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        if record.amount > (self.rules.get("limit") or 0):
            yield (ctx.key, record.amount)

    def on_broadcast(self, record: Any, ctx: Any) -> None:
        self.rules.put("limit", record)


def test_broadcast_state(click: Any, t0: Any) -> None:
    job = hg.Job("guard")
    job.checkpoint(every="1h", storage="never-made")
    rules = job.read(from_list([]), name="rules")
    job.read(from_list([], schema=click), name="clicks").key_by("user").connect(
        rules.broadcast(name="rule-table")
    ).process(Guard(), name="guard").write(collect(guarantee="exactly_once"), name="out")
    with harness(job, parallelism=3) as h:
        h.push("rules", 10)
        for amount, user in ((5, "ann"), (15, "bob"), (25, "cy")):
            h.push("clicks", click(user, amount, t0))
        h.checkpoint()
        h.push("rules", 20)
        h.push("clicks", click("dan", 15, t0))
        h.crash()
        h.push("clicks", click("eve", 15, t0), click("eve", 21, t0))
        h.checkpoint()
        assert h.drain("out") == [("bob", 15), ("cy", 25), ("eve", 21)]
