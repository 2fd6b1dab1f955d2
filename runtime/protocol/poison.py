"""Counts how often the same record, or the same bug, failed the job."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, final

from ...errors import check

KEPT_MAX: Final = 1_000
"""The most records that are remembered."""
FORGET_MS: Final = 3_600_000
"""A failure longer ago than this, in ms, does not count: the record was processed meanwhile."""


@final
class PoisonCounter:
    """The counter of one coordinator.

    A record is identified by the failed step and a hash of its content.
    """

    def __init__(self, failures_max: int) -> None:
        check(failures_max >= 1, "no failure is allowed", failures_max=failures_max)
        self._failures_max = failures_max
        self._seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """The failures, and the time of the last, in ms, by record; the most recent at the end."""

    def failed(self, step: str, record_id: str, now_ms: int) -> int | None:
        """Count a failure; return the number of failures once they are too many, else None.

        Args:
            step: the step whose function raised.
            record_id: of the record; empty: unknown, and nothing is counted.
            now_ms: the time.
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
    """Counts consecutive failures with the same message, while no checkpoint completes."""

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
            checkpoint: the newest completed checkpoint; a newer one than at the failure before
                means that the job made progress, and resets the count.

        Returns:
            The number of such failures, once they are too many; else None.
        """
        found = (where, text, checkpoint)
        self._count = self._count + 1 if found == self._last else 1
        self._last = found
        return self._count if self._count >= self._failures_max else None
