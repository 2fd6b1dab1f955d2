"""The phases of the checkpoints of a job.

    IDLE ──start──> RUNNING ──stop or final checkpoint triggered──> ENDING ──published──> ENDED
      ^                │  ^────────── final checkpoint failed ────────│                     │
      └──job failed────┴───────────────────┴────────────────────────────────────────────────┘

A stop with savepoint is ENDING from the trigger of the savepoint
to the publication of the checkpoint after it.
"""

from __future__ import annotations

from enum import Enum, unique


@unique
class Phase(Enum):
    """See the drawing above."""

    IDLE = "idle"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"
