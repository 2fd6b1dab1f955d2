"""Detects that something which should make progress stands still."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

from ...errors import check


@final
class StallMonitor:
    """Reports when nothing has changed for `timeout_ms` although there was work.

    `look` must be called every `interval_ms`. At most twice that counts of the time between two
    looks: if it was longer, this process itself stood still.
    """

    def __init__(self, timeout_ms: int, interval_ms: int) -> None:
        check(timeout_ms > 0, "a stall must last", timeout_ms=timeout_ms)
        self._timeout_ms = timeout_ms
        self._step_max_ms = 2 * interval_ms
        self._mark: Hashable = None
        self._looked_ms: int | None = None
        self._stood_ms = 0

    def look(self, now_ms: int, mark: Hashable, *, pending: bool) -> bool:
        """Return True once there was no progress for too long; the time then starts again.

        Args:
            now_ms: the time.
            mark: changes with any progress.
            pending: there is work; without it, standing still is normal.
        """
        looked_ms, self._looked_ms = self._looked_ms, now_ms
        if looked_ms is None or not pending or mark != self._mark:
            self._mark, self._stood_ms = mark, 0
            return False
        self._stood_ms += max(0, min(now_ms - looked_ms, self._step_max_ms))
        if self._stood_ms < self._timeout_ms:
            return False
        self._stood_ms = 0
        return True
