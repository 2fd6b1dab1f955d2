"""Real worker processes whose event loop is in the hands of user code."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list

_PATH = Path(__file__).parent / "conftest.py"
_spec = importlib.util.spec_from_file_location("liveness_conftest", _PATH)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
on_processes = _module.on_processes

DEADLINE_S = 60.0


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
        "heartbeat.timeout": "1 s",
        "headgate.task.stuck-after": "500 ms",
    }
    job = hg.Job("held", options=options)
    job.restart(attempts=0, delay="1ms")
    source = job.read(from_list(range(5)), name="numbers")
    source.map(slow_function, name="slow").write(blackhole(), name="out")

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), on_processes(job.spec(), tmp_path) as running:
            stuck = await running.until("stuck")
            assert "slow_function" in stuck["stack"]
            assert "has been in one call in `slow` for" in stuck["text"]
            while True:  # until it has been silent, but for its thread, for twice the timeout
                busy = running.coordinator._describe()["busy_steps"]
                if busy and busy[0]["busy_ms"] > 2_000:
                    break
                assert not running.task.done()
                await asyncio.sleep(0.05)
            assert (busy[0]["operator"], busy[0]["subtask"]) == ("slow", 0)
            released.touch()
            outcome = await running.task
            assert outcome.status == "FINISHED"
            assert not running.texts("failure")

    asyncio.run(main())


def test_a_worker_that_cannot_cancel_is_killed_and_replaced(tmp_path: Path) -> None:
    hung, again = tmp_path / "hung", tmp_path / "again"

    def hangs(n: int) -> int:
        if not again.exists():
            hung.write_text(str(os.getpid()))
            while True:
                time.sleep(0.05)
        return n

    options = {
        "heartbeat.interval": "100 ms",
        "task.cancellation.interval": "200 ms",
        "task.cancellation.timeout": "2 s",
    }
    job = hg.Job("hangs", parallelism=2, options=options)
    job.restart(attempts=1, delay="1ms")
    source = job.read(from_list([0]), name="numbers")
    source.map(hangs, name="hangs").write(blackhole(), name="out")

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), on_processes(job.spec(), tmp_path) as running:
            while not (hung.exists() and hung.read_text()):
                assert not running.task.done()
                await asyncio.sleep(0.05)
            stuck = int(hung.read_text())
            workers = {worker.process.pid: worker for worker in running.cluster.workers}
            again.touch()
            next(worker for pid, worker in workers.items() if pid != stuck).kill()
            outcome = await running.task
            assert outcome.status == "FINISHED"
            assert len(running.texts("failure")) == 1
            assert workers[stuck].process.returncode == -signal.SIGKILL
            assert len(running.cluster.workers) == 4
            log = running.cluster.log_of(workers[stuck].worker_id).read_text()
            assert "the attempt was to end" in log
            assert "in hangs" in log

    asyncio.run(main())
