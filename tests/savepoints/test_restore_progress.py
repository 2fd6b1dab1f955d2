"""What is shown of a restore under way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from headgate.runtime.control.messages import RestoreProgress
from headgate.runtime.coordinator.deploying import Deploying


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Watched:
    """A job that is deployed to no workers at all."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.attempt = 7
        self.restoring: dict[tuple[str, int], tuple[int, int]] = {}
        self.texts: list[str] = []
        self.spec = SimpleNamespace(checkpoint=None)
        self.plan = SimpleNamespace(vertices=[])
        nothing = SimpleNamespace(everything=frozenset(), subtasks_of=lambda regions: [])
        self.executions = SimpleNamespace(
            place=lambda workers, slots: None, placement={}, failover=nothing
        )
        self.store = None
        self.old_output = SimpleNamespace(idle=self._nothing)

    async def _nothing(self) -> None:
        """There is no output of earlier runs."""

    def publish(self, kind: str, text: str, **_: Any) -> None:
        self.texts.append(text)


def test_only_a_restore_that_takes_long_shows_how_far_it_is() -> None:
    deploying, job = Deploying(), Watched()
    asyncio.run(deploying._deploy(job, [], None))  # type: ignore[arg-type]

    def after(seconds: float, worker: str, done: int, attempt: int = 7) -> list[str]:
        job.clock.now = 100.0 + seconds
        message = RestoreProgress(attempt=attempt, done_bytes=done, total_bytes=2_000)
        deploying._progressed(job, worker, message)  # type: ignore[arg-type]
        return job.texts

    assert after(0.3, "one", 900) == []
    assert after(0.9, "one", 1_000) == []
    assert after(1.1, "two", 500) == ["restoring: 37% (1,500 of 4,000 bytes)"]
    assert after(1.5, "two", 800) == ["restoring: 37% (1,500 of 4,000 bytes)"]
    assert after(9.0, "two", 900, attempt=6) == ["restoring: 37% (1,500 of 4,000 bytes)"]
    assert after(9.0, "two", 2_000)[1:] == ["restoring: 75% (3,000 of 4,000 bytes)"]
