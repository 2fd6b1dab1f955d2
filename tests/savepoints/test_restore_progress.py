"""The progress of a restore, as it is shown."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from headgate.runtime.control.messages import RestoreProgress
from headgate.runtime.coordinator.attempt import Attempt
from headgate.runtime.coordinator.deploying import Deploying
from headgate.tests.support.clocks import MovedClock


class NoSubtasks:
    """An attempt of a job that is deployed to no workers at all."""

    restored_bytes = Attempt.restored_bytes

    def __init__(self) -> None:
        nothing = SimpleNamespace(everything=frozenset(), subtasks_of=lambda regions: [])
        self.number = 7
        self.plan_blob = b""
        self.restoring: dict[tuple[str, int], tuple[int, int]] = {}
        self.plan = SimpleNamespace(vertices=[], slots_by_group={})
        self.executions = SimpleNamespace(
            place=lambda workers, slots: None, placement={}, failover=nothing
        )


class Watched:
    """The job with that attempt."""

    def __init__(self) -> None:
        self.clock = MovedClock(100.0)
        self.texts: list[str] = []
        self.env = SimpleNamespace(
            clock=self.clock,
            spec=SimpleNamespace(checkpoint=None, options={}),
            store=None,
            publish=lambda kind, text, **_: self.texts.append(text),
        )
        self.attempt = NoSubtasks()
        self.old_output = SimpleNamespace(idle=self._nothing)

    async def _nothing(self) -> None:
        """There is no output of earlier runs."""


def test_only_a_restore_that_takes_long_shows_how_far_it_is() -> None:
    job = Watched()
    deploying = Deploying(job)  # type: ignore[arg-type]
    asyncio.run(deploying._deploy([], None))

    def after(seconds: float, worker: str, done: int, attempt: int = 7) -> list[str]:
        job.clock.now_s = 100.0 + seconds
        message = RestoreProgress(attempt=attempt, done_bytes=done, total_bytes=2_000)
        deploying._progressed(worker, message)
        return job.texts

    assert after(0.3, "one", 900) == []
    assert after(0.9, "one", 1_000) == []
    assert after(1.1, "two", 500) == ["restoring: 37% (1,500 of 4,000 bytes)"]
    assert after(1.5, "two", 800) == ["restoring: 37% (1,500 of 4,000 bytes)"]
    assert after(9.0, "two", 900, attempt=6) == ["restoring: 37% (1,500 of 4,000 bytes)"]
    assert after(9.0, "two", 2_000)[1:] == ["restoring: 75% (3,000 of 4,000 bytes)"]
