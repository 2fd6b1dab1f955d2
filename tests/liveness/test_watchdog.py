"""Jobs that stand still, on a clock that a test moves; and jobs that may."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

import headgate as hg
from headgate.connectors import Pause, blackhole, from_list
from headgate.runtime.control.messages import BusyStep
from headgate.runtime.coordinator.context import JobContext
from headgate.runtime.coordinator.watchdog import Watchdog
from headgate.runtime.options.registry import Options
from headgate.runtime.protocol.failures import FailureKind
from headgate.runtime.protocol.liveness import StallMonitor
from headgate.runtime.task.accounting import Activity
from headgate.runtime.task.input_subtask import InputSubtask
from headgate.runtime.worker.deployment import Deployment

LONG_S = 100_000.0


def with_options(options: dict[str, str], items: Any = range(5)) -> hg.Job:
    job = hg.Job("still", options=options)
    job.restart(attempts=1, delay="1ms")
    numbers = job.read(from_list(items), name="numbers").rebalance()
    numbers.map(lambda n: n, name="same").write(blackhole(), name="out")
    return job


def test_what_changes_or_rests_does_not_stand_still() -> None:
    monitor = StallMonitor(3_000, 1_000)
    assert not any(monitor.look(now, now, pending=True) for now in range(0, 20_000, 1_000))
    assert not any(monitor.look(now, 0, pending=False) for now in range(20_000, 40_000, 1_000))
    stalls = [now for now in range(40_000, 50_000, 1_000) if monitor.look(now, 0, pending=True)]
    assert stalls == [42_000, 45_000, 48_000]


def test_time_we_stood_still_ourselves_counts_little() -> None:
    monitor = StallMonitor(3_000, 1_000)
    assert not monitor.look(0, 0, pending=True)
    assert not monitor.look(1_000_000, 0, pending=True)
    assert monitor.look(1_001_000, 0, pending=True)


def test_a_recovery_that_makes_no_progress_fails_and_is_tried_again(
    virtual: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, hung = Deployment.prepare, []

    async def hangs_once(self: Deployment) -> None:
        if not hung:
            hung.append(self)
            await asyncio.Event().wait()
        await prepare(self)

    monkeypatch.setattr(Deployment, "prepare", hangs_once)
    outcome = virtual.run(with_options({"headgate.recovery.stall-timeout": "1 min"}))
    assert outcome.status == "FINISHED"
    ((kind, text),) = virtual.failures
    assert kind == "recovery_stalled"
    assert "for 1m no state was read and no worker became ready: 0 of 0 bytes restored" in text
    assert virtual.loop.time() < 90


def test_an_open_that_does_not_return_is_named(
    virtual: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, hung = InputSubtask.prepare, []

    async def hangs_once(self: InputSubtask, *args: Any) -> None:
        if not hung:
            hung.append(self)
            await asyncio.Event().wait()
        await prepare(self, *args)

    monkeypatch.setattr(InputSubtask, "prepare", hangs_once)
    outcome = virtual.run(with_options({"headgate.task.stuck-timeout": "2 min"}))
    assert outcome.status == "FINISHED"
    ((kind, text),) = virtual.failures
    assert kind == "stuck"
    assert text.startswith("same -> out (1/1): it has been in one call for 2m")
    # It was warned of before, and then once more at twice the time.
    warned = [
        json.loads(event.body)["busy_ms"] for event in virtual.events if event.kind == "stuck"
    ]
    assert [ms // 60_000 for ms in warned] == [1, 2]


def deaf_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first subtask behind an exchange never reads it."""
    step, deaf = InputSubtask.step, []

    async def first_reads_nothing(self: InputSubtask) -> bool:
        if not deaf:
            deaf.append(self)
        return False if self is deaf[0] else await step(self)

    monkeypatch.setattr(InputSubtask, "step", first_reads_nothing)


def test_a_running_job_in_which_nothing_moves_is_restarted(
    virtual: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf_once(monkeypatch)
    outcome = virtual.run(with_options({"headgate.job.stall-timeout": "1 min"}))
    assert outcome.status == "FINISHED"
    ((kind, text),) = virtual.failures
    assert kind == "stalled"
    assert "nothing moved for 1m, though records wait: 1 buffers wait in front of same" in text


def test_a_source_may_be_silent_for_long(virtual: Any) -> None:
    items = [1, Pause("5 min"), 2]
    outcome = virtual.run(with_options({"headgate.job.stall-timeout": "1 min"}, items))
    assert outcome.status == "FINISHED"
    assert not virtual.failures
    assert virtual.loop.time() >= 300


def test_who_waits_for_the_outside_may_do_so(virtual: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(self: InputSubtask) -> bool:
        self.time.switch(Activity.BUSY)
        await asyncio.sleep(60)
        return await step(self)

    step = InputSubtask.step
    monkeypatch.setattr(InputSubtask, "step", slow)
    outcome = virtual.run(with_options({"headgate.job.stall-timeout": "20 s"}))
    assert outcome.status == "FINISHED"
    assert not virtual.failures


def test_what_a_worker_said_of_the_last_attempt_is_not_held_against_this_one() -> None:
    step = BusyStep(0, 0, "numbers (1/1)", "numbers", 3_600_000, attempt=1)
    line = SimpleNamespace(steps=(step,))
    worker = SimpleNamespace(worker_id="w", pulse=line)
    events: asyncio.Queue[Any] = asyncio.Queue()
    running = 2
    job = SimpleNamespace(
        env=SimpleNamespace(
            options=Options({"headgate.task.stuck-timeout": "1 min"}), events=events
        ),
        pool=SimpleNamespace(live={"w": worker}),
        lifecycle=SimpleNamespace(status="RUNNING"),
        attempt=SimpleNamespace(
            number=2,
            deployment_events=None,
            executions=SimpleNamespace(attempt_of=lambda subtask: running),
        ),
    )
    watchdog = Watchdog(cast(JobContext, job), 1_000)
    watchdog.look()
    assert events.empty()
    running = 1
    watchdog.look()
    assert events.get_nowait().failure.kind is FailureKind.STUCK
