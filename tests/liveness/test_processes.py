"""Real worker processes whose event loop is in the hands of user code."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.runtime.job import runnable
from headgate.tests.liveness.conftest import on_processes
from headgate.tests.support.clocks import MovedClock

DEADLINE_S = 900.0


def sleeps(released: Path) -> None:
    """Holds the event loop, and lets other threads run."""
    while not released.exists():
        time.sleep(0.05)


def computes(released: Path) -> None:
    """Holds the event loop, and the interpreter as long as it is allowed to."""
    while not released.exists():
        sum(range(100_000))


@pytest.mark.parametrize("hold", [sleeps, computes])
def test_a_worker_whose_loop_is_held_is_alive_and_says_what_it_does(
    hold: Any, tmp_path: Path
) -> None:
    released = tmp_path / "released"

    def slow_function(n: int) -> int:
        if n == 3:
            hold(released)
        return n

    options = {
        "heartbeat.interval": "100 ms",
        "heartbeat.timeout": "60 s",
        "headgate.task.stuck-after": "500 ms",
    }
    clock = MovedClock()
    job = hg.Job("held", options=options)
    job.restart(attempts=0, delay="1ms")
    source = job.read(from_list(range(5)), name="numbers")
    source.map(slow_function, name="slow").write(blackhole(), name="out")

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            on_processes(runnable(job).spec(), tmp_path, clock) as running,
        ):
            stuck = await running.until("stuck")
            assert "slow_function" in stuck["stack"]
            assert "has been in one call in `slow` for" in stuck["text"]
            pool, beats = running.coordinator._pool, set[int]()
            while (
                len(beats) < 10
            ):  # each beat of its thread says how long the call has taken by then
                busy = running.coordinator._describe()["busy_steps"]
                if busy and busy[0]["busy_ms"] not in beats:
                    assert pool._monitor.silent_ms(busy[0]["worker"], int(1000 * clock.now_s)) == 0
                    beats.add(busy[0]["busy_ms"])
                    clock.now_s += 0.03
                assert not running.task.done()
                await asyncio.sleep(0.01)
            assert (busy[0]["operator"], busy[0]["subtask"]) == ("slow", 0)
            released.touch()
            outcome = await running.task
            assert outcome.status == "FINISHED"
            assert not running.texts("failure")

    asyncio.run(main())


def test_a_worker_that_cannot_cancel_is_killed_and_replaced(tmp_path: Path) -> None:
    hung = tmp_path / "hung"

    def hangs_once(n: int) -> int:
        if not hung.exists():
            hung.touch()
            while True:
                time.sleep(0.05)
        return n

    options = {
        "heartbeat.interval": "100 ms",
        "headgate.task.stuck-timeout": "6 s",  # for the first calls on a busy machine, too
        "task.cancellation.interval": "200 ms",
        "task.cancellation.timeout": "1 s",
    }
    job = hg.Job("hangs", options=options)
    job.restart(attempts=1, delay="1ms")
    source = job.read(from_list([0]), name="numbers")
    source.map(hangs_once, name="hangs").write(blackhole(), name="out")

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            on_processes(runnable(job).spec(), tmp_path) as running,
        ):
            outcome = await running.task
            assert outcome.status == "FINISHED"
            (failure,) = running.texts("failure")
            assert "it has been in one call for" in failure
            assert "operator=`hangs`" in failure
            killed, _ = running.cluster.workers
            assert killed.process.returncode == -signal.SIGKILL
            log = running.cluster.log_of(killed.worker_id).read_text()
            assert "the attempt was to end" in log
            assert "in hangs_once" in log

    asyncio.run(main())
