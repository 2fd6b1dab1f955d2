"""The failure detector: who is lost, when, and what is not held against anybody."""

from __future__ import annotations

import pytest

from headgate.errors import InternalError
from headgate.runtime.protocol.liveness import HeartbeatMonitor


def monitor(*workers: str) -> HeartbeatMonitor:
    watched = HeartbeatMonitor(interval_ms=10, timeout_ms=50)
    for worker in workers:
        watched.watch(worker, 0)
    return watched


def tick_until(watched: HeartbeatMonitor, start_ms: int, end_ms: int) -> list[tuple[int, str]]:
    """Tick every interval; the losses as (time, worker)."""
    return [(now, lost) for now in range(start_ms, end_ms + 1, 10) for lost in watched.tick(now)]


def test_a_silent_worker_is_lost_once_the_timeout_has_passed() -> None:
    assert tick_until(monitor("b", "a"), 10, 200) == [(50, "a"), (50, "b")]


def test_beats_keep_a_worker_and_only_that_one() -> None:
    watched = monitor("a", "b")
    assert tick_until(watched, 10, 40) == []
    watched.beat("a", 45)
    assert tick_until(watched, 50, 100) == [(50, "b"), (100, "a")]


def test_a_lost_or_forgotten_worker_stays_so_until_watched_again() -> None:
    watched = monitor("a", "b")
    watched.forget("b")
    assert tick_until(watched, 10, 50) == [(50, "a")]
    watched.beat("a", 60)
    watched.beat("b", 60)
    assert tick_until(watched, 60, 200) == []
    watched.watch("a", 300)
    assert tick_until(watched, 310, 400) == [(350, "a")]


def test_time_we_overslept_is_held_against_nobody() -> None:
    watched = monitor("a")
    assert tick_until(watched, 10, 20) == []
    assert watched.tick(1000) == []  # 980 ms late: the beats of that time are still unread
    assert tick_until(watched, 1010, 1100) == [(1020, "a")]


def test_a_clock_that_goes_back_loses_nobody() -> None:
    watched = monitor("a")
    watched.beat("a", 40)
    assert tick_until(watched, 10, 50) == []
    watched.beat("a", 5)
    assert watched.tick(5) == []
    assert tick_until(watched, 60, 100) == [(90, "a")]


def test_the_timeout_must_be_longer_than_the_interval() -> None:
    with pytest.raises(InternalError, match="longer than the interval"):
        HeartbeatMonitor(interval_ms=10, timeout_ms=10)
