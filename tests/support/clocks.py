"""A clock that tests move by hand."""

from __future__ import annotations


class MovedClock:
    """Time stands still until a test sets `now_s`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def now_ms(self) -> int:
        return round(1000 * self.now_s)

    def monotonic(self) -> float:
        return self.now_s
