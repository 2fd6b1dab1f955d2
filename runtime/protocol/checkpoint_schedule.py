"""The schedule of periodic checkpoints.

An interval counts from the last periodic trigger, or from the start. While sources read a backlog
the interval is another, or there is none. So a checkpoint put off by a backlog is due as soon as
the backlog ends, if the normal interval has passed by then.
"""

from __future__ import annotations

from typing import final

from .checkpoint_settings import CheckpointSettings


@final
class CheckpointSchedule:
    """Knows when a checkpoint is due, not whether the limit of concurrent ones allows it."""

    def __init__(self, settings: CheckpointSettings) -> None:
        self._settings = settings
        self._since_ms: int | None = None
        self._completion_ms: int | None = None
        self.backlog = False
        """True while sources read records from long ago."""

    def begin(self, now_ms: int) -> None:
        """Begin the schedule: all subtasks of an attempt run."""
        self._since_ms, self._completion_ms = now_ms, None

    def triggered(self, now_ms: int) -> None:
        """Note that the due checkpoint was triggered."""
        self._since_ms = now_ms

    def completed(self, now_ms: int) -> None:
        """Note that a checkpoint, periodic or requested, is complete: the minimum pause begins."""
        self._completion_ms = now_ms

    def end(self) -> None:
        """End the schedule with the attempt."""
        self._since_ms = None

    @property
    def due_ms(self) -> int | None:
        """Return the time of the next periodic trigger; None: there is none."""
        interval_ms = self._settings.interval_in(self.backlog)
        if self._since_ms is None or interval_ms is None:
            return None
        due_ms = self._since_ms + interval_ms
        if self._completion_ms is None:
            return due_ms
        return max(due_ms, self._completion_ms + self._settings.min_pause_ms)
