"""The progress of a restore on one worker, and its times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...operators.clock import Clock
from ...state.snapshot import StateHandle

REPORT_S = 0.5
"""Reports on the progress of a restore are at least this far apart, but for the last."""


class RestoreMeter:
    """Adds up what the subtasks have read and reports it, not too often."""

    def __init__(self, total_bytes: int, clock: Clock, report: Callable[[int, int], None]) -> None:
        self._total, self._done = total_bytes, 0
        self._clock = clock
        self._report = report
        self._next = self._began = clock.monotonic()
        self.fetching_ms = 0
        """The time until the last subtask had read its state."""
        self.more_in_files = 0
        """The bytes to be read from files, beyond those that were expected at first."""
        self.opening_ms = 0
        """The time in which the slowest subtask took its state over."""

    def expect(self, counted: Sequence[StateHandle], needed: Sequence[StateHandle]) -> None:
        """Count the in-flight records that are `needed` in place of the handles counted before."""
        self._total += sum(h.size_bytes for h in needed) - sum(h.size_bytes for h in counted)
        self.more_in_files += bytes_in_files(needed) - bytes_in_files(counted)

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


def bytes_in_files(handles: Iterable[StateHandle]) -> int:
    """Return the bytes of those handles that are in files."""
    return sum(handle.size_bytes for handle in handles if handle.file is not None)
