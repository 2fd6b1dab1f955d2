"""The clocks of a simulation: each process has a wall clock of its own, which may be wrong."""

from __future__ import annotations

from headgate.testing.loop import VirtualClock

from .process import current


class SimClock(VirtualClock):
    """Durations are right everywhere; clocks do not agree on the time of day."""

    def now_ms(self) -> int:
        process = current()
        return super().now_ms() + (0 if process is None else process.clock_ms)
