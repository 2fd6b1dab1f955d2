"""The thread of a worker process, driven by hand: when it gives up (runtime/worker/pulse.py)."""

from __future__ import annotations

import asyncio

import pytest

from headgate.runtime.control.messages import Watching, Welcome
from headgate.runtime.worker.pulse import EXIT_CODE, Pulse
from headgate.runtime.worker.watch import StepWatch


class Clock:
    now_s = 0.0

    def now_ms(self) -> int:
        return int(1000 * self.now_s)

    def monotonic(self) -> float:
        return self.now_s


def exits_after(orphaned_ms: int, turns: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds from the loss of the coordinator to the exit, if a call never ends.

    Args:
        orphaned_ms: how long the worker may wait for another coordinator.
        turns: the call is in a thread, and the event loop waits for it; False: it holds the loop.
        monkeypatch: of the test.
    """
    clock, codes = Clock(), list[int]()
    monkeypatch.setattr(Pulse, "_run", lambda pulse: None)

    async def main() -> None:
        pulse = Pulse([], "token", "w", clock, die=codes.append)
        welcome = Welcome(
            job_name="job",
            heartbeat_interval_ms=1_000,
            heartbeat_timeout_ms=5_000,
            watching=Watching(cancellation_timeout_ms=30_000),
        )
        pulse.start(welcome, StepWatch("w", clock), lambda: None, lambda: orphaned_ms)
        pulse._give_up()
        while not codes:
            pulse._look()
            if turns:
                await asyncio.sleep(0)
            clock.now_s += 1

    asyncio.run(main())
    assert codes == [EXIT_CODE]
    return clock.now_s - 1


@pytest.mark.parametrize("turns", [False, True], ids=["loop held", "thread hangs"])
@pytest.mark.parametrize(("orphaned_ms", "expected_s"), [(0, 30), (60_000, 90)])
def test_a_worker_that_may_wait_for_another_coordinator_is_not_ended_meanwhile(
    orphaned_ms: int, expected_s: float, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exits_after(orphaned_ms, turns, monkeypatch) == expected_s
