"""When checkpoints are taken, how, and how many may fail.

With *unaligned* checkpoints, a checkpoint and a savepoint are never in progress together; each
waits for the other. Otherwise the barrier of a newer checkpoint would overtake that of an older
savepoint, which subtasks would then abort. Savepoints and the last checkpoint of a job are always
aligned. The last one, or the savepoint before it, is nevertheless triggered at once, and
immediately subsumes an unaligned one in progress. That one could do no harm (it is older, so its
barrier stays in front on every channel), but a subtask that reads the last one's barrier on some
channel first would abort it in any case.

Two differences from Flink: the first periodic checkpoint comes one interval after the start, not
after a random part of it (a coordinator has one job, so jobs do not start in step). And the
deletion of old checkpoints delays no trigger: one trim runs at a time, and the next one deletes
what it left. Every checkpoint includes all subtasks: finished ones take part until the job ends.
"""

from __future__ import annotations

from typing import final

import msgspec

from ....errors import OptionError
from ....operators.elements import CheckpointOptions

INTERVAL_MS_MIN = 10


@final
class CheckpointRules(msgspec.Struct, frozen=True):
    """When checkpoints are taken, how, and how many may fail.

    Attributes:
        interval_ms: time between two triggers; None: only on request.
        timeout_ms: a checkpoint that is not acknowledged by all within this time is aborted.
        min_pause_ms: time between a completion and the next periodic trigger; if it is not 0,
            checkpoints are taken one at a time.
        max_concurrent: the most in progress at once (a stop or final checkpoint is extra).
        tolerable_failures: the number that may fail in a row without failing the job.
        incremental: whether a checkpoint may build on the files of the one before.
        exactly_once: channels wait for each other's barriers, or capture what those overtake.
        unaligned: barriers overtake records, except those of savepoints and of a job's last checkpoint.
        aligned_timeout_ms: for unaligned ones: barriers stay in line until a checkpoint is this
            old; 0:
            they overtake at once.
        interval_during_backlog_ms: replaces `interval_ms` while sources read a backlog; 0: only
            requested ones are taken meanwhile; None: `interval_ms` applies.
    """

    interval_ms: int | None
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    incremental: bool = True
    exactly_once: bool = True
    unaligned: bool = False
    aligned_timeout_ms: int = 0
    interval_during_backlog_ms: int | None = None

    def __post_init__(self) -> None:
        at_least = {
            "interval_ms": INTERVAL_MS_MIN,
            "timeout_ms": 1,
            "min_pause_ms": 0,
            "max_concurrent": 1,
            "tolerable_failures": 0,
            "aligned_timeout_ms": 0,
        }
        for name, smallest in at_least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise OptionError(
                    f"checkpoint setting is too small setting=`{name}` value=`{value}`",
                    fix=f"use at least {smallest}",
                )

        if self.unaligned:
            self._check_unaligned()
        self._check_backlog()

    def _check_backlog(self) -> None:
        if not self.interval_during_backlog_ms:
            return
        if self.interval_ms is None or self.interval_during_backlog_ms < self.interval_ms:
            raise OptionError(
                "checkpoints would be more frequent in a backlog than without one "
                f"execution.checkpointing.interval=`{self.interval_ms} ms` "
                "execution.checkpointing.interval-during-backlog="
                f"`{self.interval_during_backlog_ms} ms`",
                fix="raise the second to the first or above, or set it to 0s for no checkpoints; "
                "job.checkpoint(every=...) is the first, too",
            )

    def _check_unaligned(self) -> None:
        if not self.exactly_once:
            raise OptionError(
                "unaligned checkpoints are exactly-once "
                "execution.checkpointing.unaligned.enabled=`true` "
                "execution.checkpointing.mode=`AT_LEAST_ONCE`",
                fix="leave out one of the two",
            )
        if self.max_concurrent > 1:
            raise OptionError(
                "unaligned checkpoints are taken one at a time "
                "execution.checkpointing.unaligned.enabled=`true` "
                f"execution.checkpointing.max-concurrent-checkpoints=`{self.max_concurrent}`",
                fix="leave out one of the two; job.checkpoint(max_concurrent=...) is the second, too",
            )

    @property
    def plain_options(self) -> CheckpointOptions:
        """The options of a checkpoint that is neither a savepoint nor a job's last."""
        if not self.unaligned:
            return CheckpointOptions()
        if self.aligned_timeout_ms == 0:
            return CheckpointOptions(unaligned=True)
        return CheckpointOptions(aligned_timeout_ms=self.aligned_timeout_ms)

    def interval_in(self, backlog: bool) -> int | None:
        """The interval, in a backlog or not, raised to the minimum pause; None: no periodic checkpoints."""
        interval_ms = self.interval_ms
        if backlog and self.interval_during_backlog_ms is not None:
            interval_ms = self.interval_during_backlog_ms or None
        return None if interval_ms is None else max(interval_ms, self.min_pause_ms)

    @property
    def effective_max_concurrent(self) -> int:
        """The limit, or 1 if there is a minimum pause."""
        return 1 if self.min_pause_ms else self.max_concurrent


@final
class CheckpointSchedule:
    """The schedule of periodic checkpoints.

    It knows when a checkpoint is due, not whether the limit of concurrent ones allows it.

    An interval counts from the last periodic trigger, or from the start. While sources read a backlog
    the interval is another, or there is none. So a checkpoint put off by a backlog is due as soon as
    the backlog ends, if the normal interval has passed by then.
    """

    def __init__(self, settings: CheckpointRules) -> None:
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
