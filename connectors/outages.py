"""The time for which servers have not answered. Readers try them again until it is too long."""

from __future__ import annotations

from ..operators.clock import Clock


class Outage:
    """The time from the first failure since the servers answered last.

    The time since the last answer would say less: while enough records wait for the subtask, a reader asks
    for nothing, so there are no answers either.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        """Begin without an outage.

        Args:
            clock: measures the time.
            longest_s: servers that do not answer are tried again for this time.
        """
        self._clock = clock
        self._longest_s = longest_s
        self._since_s: float | None = None

    def end(self) -> None:
        """Note that the servers have answered."""
        self._since_s = None

    def is_too_long(self) -> bool:
        """Note that the servers have not answered; return True if it is time to give up."""
        now_s = self._clock.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s > self._longest_s
