"""The progress of one worker's restore."""

from __future__ import annotations

from collections.abc import Callable

from ...operators.clock import Clock

REPORT_S = 0.5
"""Reports are at least this far apart, but for the last."""


class RestoreMeter:
    """Adds up what the subtasks have read and reports it, not too often."""

    def __init__(self, total_bytes: int, clock: Clock, report: Callable[[int, int], None]) -> None:
        self._total, self._done = total_bytes, 0
        self._clock = clock
        self._report = report
        self._next = self._began = clock.monotonic()
        self.fetching_ms = 0
        """The time until the last subtask had read its state."""
        self.opening_ms = 0
        """The time in which the slowest subtask took its state over."""

    def fetched(self) -> float:
        """A subtask has read its state; returns the time, for `opened`."""
        now = self._clock.monotonic()
        self.fetching_ms = max(self.fetching_ms, round(1000 * (now - self._began)))
        return now

    def opened(self, since: float) -> None:
        """It has taken it over, which began at `since`."""
        took_ms = round(1000 * (self._clock.monotonic() - since))
        self.opening_ms = max(self.opening_ms, took_ms)

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        self._done += count
        now = self._clock.monotonic()
        if now >= self._next or self._done >= self._total:
            self._next = now + REPORT_S
            self._report(self._done, self._total)
