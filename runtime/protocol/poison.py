"""Counts how often the same record failed the job (features.md REC-16)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, final

from ...errors import check

KEPT_MAX: Final = 1_000
"""Records that are remembered."""
FORGET_MS: Final = 3_600_000
"""A record that failed the job longer ago than that was no poison then: it went through meanwhile."""


@final
class PoisonCounter:
    """Of one coordinator. A record is known by the step that it failed and a hash of what it says."""

    def __init__(self, failures_max: int) -> None:
        check(failures_max >= 1, "no failure is allowed", failures_max=failures_max)
        self._failures_max = failures_max
        self._seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """Failures, and when the last was, in ms; the most recent at the end."""

    def failed(self, step: str, record_id: str, now_ms: int) -> int | None:
        """Count a failure; how many there were, once they are too many, else None.

        Args:
            step: whose function raised.
            record_id: of the record; empty: unknown, and nothing is counted.
        """
        if not record_id:
            return None
        count, last_ms = self._seen.pop((step, record_id), (0, now_ms))
        count = 1 if now_ms - last_ms > FORGET_MS else count + 1
        self._seen[step, record_id] = (count, now_ms)
        if len(self._seen) > KEPT_MAX:
            self._seen.popitem(last=False)
        return count if count >= self._failures_max else None
