"""Finds out whether something that should move stands still."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

from ...errors import check


@final
class StallMonitor:
    """Says so once nothing has changed for `timeout_ms` though something was to be done.

    `look` is to be called every `interval_ms`. Of the time between two looks no more than twice that
    counts: if it was longer, it was ourselves who stood still.
    """

    def __init__(self, timeout_ms: int, interval_ms: int) -> None:
        check(timeout_ms > 0, "a stall must last", timeout_ms=timeout_ms)
        self._timeout_ms = timeout_ms
        self._step_max_ms = 2 * interval_ms
        self._mark: Hashable = None
        self._looked_ms: int | None = None
        self._stood_ms = 0

    def look(self, now_ms: int, mark: Hashable, *, pending: bool) -> bool:
        """True once it stands still for too long; it begins anew then.

        Args:
            mark: changes whenever anything moves.
            pending: there is something to be done; if not, standing still is rest.
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
