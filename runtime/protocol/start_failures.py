"""Delays the start of another worker when workers fail to start."""

from __future__ import annotations

from collections import deque
from typing import Final, final

WINDOW_MS: Final = 60_000


@final
class StartFailures:
    """A pause after each failure, and no start at all while the last minute has too many of them.

    All times are on one monotonic clock, ms.
    """

    def __init__(self, max_per_minute: float, pause_ms: int) -> None:
        self._max = max_per_minute
        self._pause_ms = pause_ms
        self._failures: deque[int] = deque()

    def failed(self, now_ms: int) -> None:
        """Note that a worker did not start, or died before it was needed."""
        self._failures.append(now_ms)
        while len(self._failures) > self._max + 1:
            self._failures.popleft()

    def wait_ms(self, now_ms: int) -> int:
        """Return the pause before the next start, ms."""
        while self._failures and self._failures[0] <= now_ms - WINDOW_MS:
            self._failures.popleft()
        if not self._failures:
            return 0
        paused_until = self._failures[-1] + self._pause_ms
        if len(self._failures) >= self._max:
            paused_until = max(paused_until, self._failures[0] + WINDOW_MS)
        return max(0, paused_until - now_ms)
