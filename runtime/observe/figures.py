"""Counts of a coordinator for its metrics only: kept by its event loop, read when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from .catalogue import DURATIONS
from .metrics import PlainHistogram

CHECKPOINT_PARTS: Final = ("start_delay", "alignment", "sync", "async")
RESTART_PHASES: Final = (
    "silence",
    "cancel",
    "delay",
    "deploy",
    "workers",
    "download",
    "initialize",
)


def _durations() -> PlainHistogram:
    return PlainHistogram(DURATIONS)


@final
@dataclass(slots=True)
class CheckpointFigures:
    """The figures of all checkpoints under this coordinator. Times are in seconds."""

    duration: PlainHistogram = field(default_factory=_durations)
    parts: dict[str, PlainHistogram] = field(
        default_factory=lambda: {part: _durations() for part in CHECKPOINT_PARTS}
    )
    state_bytes: dict[str, int] = field(default_factory=dict)
    """State of each operator in the last completed checkpoint."""


@final
@dataclass(slots=True)
class JobFigures:
    """The figures of all failures, restarts and rescalings under this coordinator. Times are in seconds."""

    failures: Counter[str] = field(default_factory=Counter)
    """By category."""
    restart: PlainHistogram = field(default_factory=_durations)
    phases: dict[str, PlainHistogram] = field(
        default_factory=lambda: {phase: _durations() for phase in RESTART_PHASES}
    )
    restore: PlainHistogram = field(default_factory=_durations)
    local_bytes: int = 0
    storage_bytes: int = 0
    rescale: PlainHistogram = field(default_factory=_durations)

    def failures_of(self, category: str) -> int:
        """The number of failures of this category."""
        return self.failures[category]

    def restarted(self, down_ms: int, phases_ms: Mapping[str, int | None]) -> None:
        """All subtasks run again."""
        self.restart.observe(down_ms / 1000)
        for phase, spent_ms in phases_ms.items():
            if spent_ms is not None:
                self.phases[phase].observe(spent_ms / 1000)

    def restored(self, spent_ms: int, local_bytes: int, storage_bytes: int) -> None:
        """All state of a deployment has been read and taken over."""
        self.restore.observe(spent_ms / 1000)
        self.local_bytes += local_bytes
        self.storage_bytes += storage_bytes
