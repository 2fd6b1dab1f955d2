"""The threads of a worker process: what a beat does not wait for, and when the worker gives up."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from headgate.operators.clock import SystemClock
from headgate.runtime.control.link import BlockingLink
from headgate.runtime.control.messages import (
    BusyStep,
    Heartbeat,
    Hello,
    StepStuck,
    Watching,
    Welcome,
)
from headgate.runtime.worker.heartbeats import EXIT_CODE, HeartbeatThreads
from headgate.runtime.worker.watch import StepWatch
from headgate.tests.support.clocks import MovedClock

HANG_S = 60.0
"""A test that hangs ends after this long; nothing else depends on it."""


def welcome(interval_ms: int, timeout_ms: int) -> Welcome:
    return Welcome(
        job_name="job",
        heartbeat_interval_ms=interval_ms,
        heartbeat_timeout_ms=timeout_ms,
        watching=Watching(cancellation_timeout_ms=30_000),
    )


class SlowWatch(StepWatch):
    """Its first look takes until it is released, as one does that reads files beside a busy function."""

    stuck = StepStuck(
        step=BusyStep(0, 0, "slow (1/1)", "slow", 60_000, 1), stack="in slow_function"
    )

    def __init__(self) -> None:
        super().__init__("w", SystemClock())
        self.looking, self.release = threading.Event(), threading.Event()

    def look(self) -> list[StepStuck]:
        if self.looking.is_set():
            return []
        self.looking.set()
        assert self.release.wait(HANG_S)
        return [self.stuck]


def test_no_beat_waits_for_a_look_and_what_the_look_found_is_sent_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = (BlockingLink(end) for end in socket.socketpair())
    monkeypatch.setattr(BlockingLink, "connect", lambda addresses: near)
    watch = SlowWatch()

    def receive() -> Any:
        message = far.receive(HANG_S)
        assert message is not None, "nothing came: the beat waits for the look"
        return message

    async def main() -> None:  # it holds its loop all the time, as a function that computes does
        heartbeats = HeartbeatThreads([], "token", "w", SystemClock())
        heartbeats.start(welcome(10, 1000 * int(HANG_S)), watch, lambda: None)
        assert isinstance(receive(), Hello)
        assert watch.looking.wait(HANG_S)
        assert all(isinstance(receive(), Heartbeat) for _ in range(5))
        watch.release.set()
        while isinstance(message := receive(), Heartbeat):
            pass
        assert message == watch.stuck
        heartbeats.stop()

    asyncio.run(main())
    far.close()


def exits_after(orphaned_ms: int, turns: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds from the loss of the coordinator to the exit, if a call never ends.

    Args:
        orphaned_ms: how long the worker may wait for another coordinator.
        turns: the call is in a thread, and the event loop waits for it; False: it holds the loop.
        monkeypatch: of the test.
    """
    clock, codes = MovedClock(), list[int]()
    for thread in ("_beat", "_look"):
        monkeypatch.setattr(HeartbeatThreads, thread, lambda heartbeats: None)

    async def main() -> None:
        heartbeats = HeartbeatThreads([], "token", "w", clock, die=codes.append)
        watch = StepWatch("w", clock)
        heartbeats.start(welcome(1_000, 5_000), watch, lambda: None, lambda: orphaned_ms)
        heartbeats._give_up()
        while not codes:
            heartbeats._exit_if_abandoned()
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
