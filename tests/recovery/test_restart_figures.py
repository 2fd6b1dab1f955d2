"""The figures of a restart: times of the slowest, sizes of all."""

from __future__ import annotations

from headgate.runtime.coordinator.reporting import describe_restart
from headgate.runtime.protocol.failure_history import FailureEntry, FailureHistory, RestoreFigures
from headgate.runtime.worker.reports import RestoreMeter
from headgate.tests.support.clocks import MovedClock


def test_a_worker_measures_its_slowest_subtask() -> None:
    clock = MovedClock(100.0)
    meter = RestoreMeter(10, clock, lambda done, total: None)  # type: ignore[arg-type]
    clock.now_s = 100.2
    first = meter.fetched()
    clock.now_s = 100.3
    second = meter.fetched()
    meter.opened(second)
    clock.now_s = 100.6
    meter.opened(first)
    assert (meter.fetching_ms, meter.opening_ms) == (300, 400)


def test_a_restart_is_told_in_a_sentence() -> None:
    figures = RestoreFigures(workers_ms=700)
    figures.add(fetching_ms=200, opening_ms=50, local_bytes=1_000, read_bytes=3_500)
    figures.add(fetching_ms=100, opening_ms=90, local_bytes=500, read_bytes=500)
    history = FailureHistory(5)
    assert history.running(500) is None, "nothing had failed"
    history.failed(FailureEntry(1_000, "worker_lost", "w", "w", "gone"), 1, silent_ms=20)
    history.cancelled(1_100)
    history.waited(2_100)
    history.deployed(3_200, "checkpoint 7", figures)
    record = history.running(3_250)
    assert record is not None
    assert describe_restart(record) == (
        "running again after 2s 250ms: silent before 20ms, stopping 100ms, waiting 1s, deploying 1s 100ms "
        "(workers 700ms, reading state 200ms, opening state 90ms; "
        "state: 1,500 bytes from workers' disks, 2,500 from storage)"
    )
