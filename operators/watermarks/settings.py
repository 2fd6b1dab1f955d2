"""The settings of an event-time step, apart from the source of times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from ..durations import format_duration
from .strategy import WatermarkStrategy

ALIGN_EVERY_MS: Final = 1_000


@final
@dataclass(frozen=True, slots=True)
class Alignment:
    """Sources that wait for each other.

    Attributes:
        group: the steps with this name wait for each other.
        max_drift_ms: how far a split's watermark may be ahead of the slowest subtask's.
        every_ms: how often each subtask reports its progress.
    """

    group: str
    max_drift_ms: int
    every_ms: int = ALIGN_EVERY_MS

    @property
    def text(self) -> str:
        """Describe the alignment for `explain`."""
        return f"aligned with group {self.group} to {format_duration(self.max_drift_ms)}"


@final
@dataclass(frozen=True, slots=True)
class WatermarkSettings:
    """The settings of the watermarks of a step.

    Attributes:
        idle_after_ms: time without records after which a split, or the subtask, is idle; None:
            never.
        close_after_ms: time without records after which the watermark follows the clock; None:
            never.
        per_split: a generator for each split of the source, not one for all.
        wait_for_queued: splits that the reader has not reached hold the watermark back as well.
        waits_by_default: `wait_for_queued` is a default: it has no effect where it is not
            supported.
    """

    strategy: WatermarkStrategy
    idle_after_ms: int | None = None
    close_after_ms: int | None = None
    per_split: bool = True
    alignment: Alignment | None = None
    wait_for_queued: bool = False
    waits_by_default: bool = False

    @property
    def beside_source(self) -> bool:
        """True if it needs what only its source's subtask knows: the split of a record, or who waits."""
        return self.per_split or self.alignment is not None

    @property
    def text(self) -> str:
        """Describe the settings for `explain`."""
        parts = [self.strategy.text]
        if self.idle_after_ms is not None:
            parts.append(f"idle after {format_duration(self.idle_after_ms)}")
        if self.close_after_ms is not None:
            parts.append(f"by the clock after {format_duration(self.close_after_ms)} of silence")
        if self.wait_for_queued:
            parts.append("waiting for queued splits")
        if self.alignment is not None:
            parts.append(self.alignment.text)
        return ", ".join(parts)
