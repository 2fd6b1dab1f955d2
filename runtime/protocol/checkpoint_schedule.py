"""When the next periodic checkpoint is due (features.md 3.10, CKP-18).

An interval counts from the last periodic trigger, or from the start. While sources read a backlog it is
another interval, or there is none. So what a backlog puts off is due as soon as it ends, if the normal
interval is over by then.
"""

from __future__ import annotations

from typing import final

from .checkpoint_settings import CheckpointSettings


@final
class CheckpointSchedule:
    """Knows when, not whether: how many checkpoints may be under way at once is not its business."""

    def __init__(self, settings: CheckpointSettings) -> None:
        self._settings = settings
        self._since_ms: int | None = None
        self._completion_ms: int | None = None
        self.backlog = False
        """Sources read records that are long past."""

    def begin(self, now_ms: int) -> None:
        """All subtasks of an attempt run."""
        self._since_ms, self._completion_ms = now_ms, None

    def triggered(self, now_ms: int) -> None:
        """The checkpoint that was due is under way."""
        self._since_ms = now_ms

    def completed(self, now_ms: int) -> None:
        """One is complete, whoever asked for it: the minimum pause begins."""
        self._completion_ms = now_ms

    def end(self) -> None:
        """The attempt is over."""
        self._since_ms = None

    @property
    def due_ms(self) -> int | None:
        """The time of the next periodic trigger; None: there is none."""
        interval_ms = self._settings.interval_in(self.backlog)
        if self._since_ms is None or interval_ms is None:
            return None
        due_ms = self._since_ms + interval_ms
        if self._completion_ms is None:
            return due_ms
        return max(due_ms, self._completion_ms + self._settings.min_pause_ms)
