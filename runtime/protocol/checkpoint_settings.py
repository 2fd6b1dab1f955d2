"""When checkpoints are taken, and how many may fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ...errors import OptionError

INTERVAL_MS_MIN = 10


@final
@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When checkpoints are taken, and how many may fail.

    Attributes:
        interval_ms: time between two triggers; None: only on request.
        timeout_ms: a checkpoint that is not acknowledged by all within this time is aborted.
        min_pause_ms: time between a completion and the next periodic trigger; if it is not 0,
            checkpoints are taken one at a time.
        max_concurrent: how many may be under way at once (a stop or final checkpoint goes on top).
        tolerable_failures: how many may fail in a row without failing the job.
        incremental: whether a checkpoint may build on the files of the one before.
        unaligned: barriers overtake records. Then checkpoints are taken one at a time, and none beside a
            savepoint, whose barriers stay in line: one would overtake the other's.
        aligned_timeout_ms: with `unaligned`: barriers overtake only once a checkpoint is this old; 0: at
            once.
    """

    interval_ms: int | None
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    incremental: bool = True
    unaligned: bool = False
    aligned_timeout_ms: int = 0

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

    @property
    def effective_interval_ms(self) -> int | None:
        """The interval, raised to the minimum pause."""
        return None if self.interval_ms is None else max(self.interval_ms, self.min_pause_ms)

    @property
    def effective_max_concurrent(self) -> int:
        """The limit, 1 if there is a pause to keep, or if barriers overtake records."""
        return 1 if self.min_pause_ms or self.unaligned else self.max_concurrent
