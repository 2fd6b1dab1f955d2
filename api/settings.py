"""The checkpoint and restart settings of a job, in plain numbers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class CheckpointSettings(msgspec.Struct, frozen=True):
    """The interval and the place of checkpoints."""

    every_ms: int | None
    """None: no periodic checkpoints, only requested ones and the final one."""
    storage: str
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    retain: int = 1


class FixedDelay(msgspec.Struct, frozen=True):
    """At most `attempts` restarts, each `delay_ms` after the failure. 0 attempts: never restart."""

    attempts: int
    delay_ms: int


class FailureRate(msgspec.Struct, frozen=True):
    """Restarts, each `delay_ms` after the failure, while at most `max_failures` fall in `interval_ms`."""

    max_failures: int = 1
    interval_ms: int = 60_000
    delay_ms: int = 1_000


class ExponentialDelay(msgspec.Struct, frozen=True):
    """Restarts after pauses that grow from `initial_ms` by `multiplier` up to `max_ms`.

    Attributes:
        jitter: the largest random fraction by which a pause is lengthened or shortened.
        reset_ms: this long without a failure, counted from the restart, resets the pauses.
        attempts: restarts before the reset; None: any number.
    """

    initial_ms: int = 1_000
    max_ms: int = 60_000
    multiplier: float = 1.5
    jitter: float = 0.1
    reset_ms: int = 3_600_000
    attempts: int | None = None


RestartSettings: TypeAlias = FixedDelay | FailureRate | ExponentialDelay
"""Decides when a failed job is restarted, and when it has failed for good."""
NO_RESTART = FixedDelay(0, 0)
