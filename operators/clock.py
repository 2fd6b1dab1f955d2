"""The clock is passed in, so that the same code runs in real and in simulated time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock and monotonic time."""

    def now_ms(self) -> int:
        """Return the wall-clock time, milliseconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back; only differences are meaningful."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()  # noqa: TID251  the one place that reads the machine's clock
