"""What a job says about checkpoints and restarts, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """How often and where state is made durable (features.md section 3)."""

    every_ms: int | None
    """None: no periodic checkpoints, only those asked for and the final one."""
    storage: str
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    retain: int = 1


@dataclass(frozen=True, slots=True)
class RestartSettings:
    """How often, and after how long, a failed job starts again."""

    attempts: int
    delay_ms: int
