"""Counts how often the same record, or the same bug, failed the job (features.md REC-16)."""

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


@final
class RepeatCounter:
    """Counts failures that say the same, one after the other, while no checkpoint completes."""

    def __init__(self, failures_max: int) -> None:
        check(failures_max >= 1, "no failure is allowed", failures_max=failures_max)
        self._failures_max = failures_max
        self._last: tuple[str, str, int] | None = None
        self._count = 0

    def failed(self, where: str, text: str, checkpoint: int) -> int | None:
        """Count a failure.

        Args:
            where: the subtask or the phase that failed.
            text: the message.
            checkpoint: the newest completed checkpoint; a newer one than at the failure before means that
                the job got on, and the count begins again.

        Returns:
            How many such failures there were, once they are too many; else None.
        """
        found = (where, text, checkpoint)
        self._count = self._count + 1 if found == self._last else 1
        self._last = found
        return self._count if self._count >= self._failures_max else None
