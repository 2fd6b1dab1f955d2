"""What an event-time step was told, apart from where times come from."""

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
        every_ms: how often each subtask says how far it is.
    """

    group: str
    max_drift_ms: int
    every_ms: int = ALIGN_EVERY_MS

    @property
    def text(self) -> str:
        """For `explain`."""
        return f"aligned with group {self.group} to {format_duration(self.max_drift_ms)}"


@final
@dataclass(frozen=True, slots=True)
class WatermarkSettings:
    """How a step makes watermarks.

    Attributes:
        idle_after_ms: silence after which a split, or the subtask, is not waited for; None: never.
        close_after_ms: silence after which the watermark goes on with the clock; None: never.
        per_split: a generator for each split of the source, not one for all.
        wait_for_queued: splits that the reader has not come to hold time as well.
        waits_by_default: the user has not said so: it has no effect where it cannot be had.
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
        """It goes by what only its source's subtask knows: which split a record is of, or who waits."""
        return self.per_split or self.alignment is not None

    @property
    def text(self) -> str:
        """For `explain`."""
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
