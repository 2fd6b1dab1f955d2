"""The identifiers of the protocol, each a type of its own: never a bare int or str.

At run time all are plain ints and strings, so they cost nothing and are serialised as such.
"""

from __future__ import annotations

from typing import NewType, final

import msgspec

CheckpointId = NewType("CheckpointId", int)
"""Number of a checkpoint: 1, 2, ...; strictly increasing over the whole life of a job."""
WorkerId = NewType("WorkerId", str)
"""Name of a worker process."""
ChannelPosition = NewType("ChannelPosition", int)
"""The number of an input channel of a subtask, counted over all its inputs: 0, 1, ..."""

NO_CHECKPOINT = CheckpointId(0)
"""Means "none yet": smaller than the id of every checkpoint."""


@final
class SubtaskId(msgspec.Struct, frozen=True, order=True):
    """One parallel instance of one vertex of the job."""

    vertex: int
    index: int

    def __str__(self) -> str:
        return f"{self.vertex}.{self.index}"
