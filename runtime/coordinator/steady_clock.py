"""The time by which checkpoints are triggered and expire, and restarts are due."""

from __future__ import annotations

from typing import final

from ...operators.clock import Clock


@final
class SteadyClock:
    """A wall clock that nobody sets: what it showed when this was made, and what has passed since.

    Checkpoints and restarts are a matter of durations: were the machine's clock set back by an hour, the
    next one would come an hour late.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.now_ms() - 1000 * clock.monotonic()

    def now_ms(self) -> int:
        return round(self._began_ms + 1000 * self._clock.monotonic())

    def monotonic(self) -> float:
        return self._clock.monotonic()
