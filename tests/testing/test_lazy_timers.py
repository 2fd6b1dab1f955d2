"""Timers of quiet operators: seldom while time passes, exact when it matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from headgate.testing import harness
from headgate.testing.loop import VirtualClock, VirtualLoop
from headgate.testing.steering import LazyTimers


class Loop:
    """The timers of a subtask, without the subtask."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(0)
        self.lazy = LazyTimers(self, VirtualClock(self.loop))
        self.ticks: list[float] = []

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        return self.loop.call_later(delay_ms / 1000, callback).cancel

    def tick(self) -> None:
        self.ticks.append(self.loop.time())
        self.stop = self.lazy.call_later(200, self.tick)

    def pass_time(self, until_s: float) -> None:
        self.loop.drive(until_s)
        self.lazy.catch_up()
        self.loop.drive()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.loop.close()


def test_ticks_become_rare_and_none_is_missed_at_the_end(loop: Loop) -> None:
    loop.tick()
    for end in (86_400.0, 90_000.0, 90_000.1, 90_000.2):
        loop.pass_time(end)
    assert len(loop.ticks) < 300
    gaps = [(b - a, a) for a, b in zip(loop.ticks, loop.ticks[1:], strict=False)]
    assert all(gap <= max(0.2, 0.05 * since) + 0.001 for gap, since in gaps)
    assert next(tick for tick in loop.ticks if tick >= 86_400.0 - 0.2) == 86_400.0
    assert loop.ticks[-2:] == [90_000.0, 90_000.2]


def test_ticks_are_exact_when_something_happens(loop: Loop) -> None:
    loop.tick()
    loop.pass_time(1_000.0)
    loop.loop.drive(1_000.05)
    loop.lazy.active()
    seen = len(loop.ticks)
    loop.loop.drive(1_001.1)
    assert loop.ticks[seen:] == pytest.approx([1000.2, 1000.4, 1000.6, 1000.8, 1001.0])


def test_cancelled_timers_stay_silent(loop: Loop) -> None:
    loop.tick()
    loop.pass_time(100.0)
    loop.stop()
    seen = len(loop.ticks)
    loop.lazy.active()
    loop.pass_time(200.0)
    assert len(loop.ticks) == seen


def test_days_pass_and_idleness_is_noticed(
    windows_job: Any, click: Any, count: Any, t0: Any
) -> None:
    with harness(windows_job(idle_after="1d"), parallelism=2) as h:
        h.push("clicks", click("ann", 1, t0), click("ann", 2, t0 + timedelta(minutes=2)))
        h.advance_time("23h 59m 59s")
        assert h.pending("out") == []
        h.advance_time("1s")
        assert h.pending("out") == [count("ann", 1, 1)]
        h.advance_time("365d")
        h.push("clicks", click("ann", 2, t0 + timedelta(minutes=3)))
        h.advance_time("200ms")
        assert h.pending("out") == [count("ann", 1, 1), count("ann", 1, 2)]
