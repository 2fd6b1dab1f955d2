"""Abort notices that are here before the barrier: barriers travel with the records, notices beside them."""

from __future__ import annotations

from typing import final

from .ids import CheckpointId

ABORTED_IDS_MAX = 128
"""Abort notices remembered ahead of their barrier; the oldest is forgotten first."""


@final
class AbortNotices:
    """Checkpoints that the coordinator gave up and whose barriers may still come."""

    def __init__(self) -> None:
        self._ids: set[CheckpointId] = set()

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._ids

    def add(self, checkpoint_id: CheckpointId) -> None:
        """A notice came."""
        self._ids.add(checkpoint_id)
        if len(self._ids) > ABORTED_IDS_MAX:
            self._ids.remove(min(self._ids))

    def forget_to(self, checkpoint_id: CheckpointId) -> None:
        """The barriers of this checkpoint, and of all older ones, have been dealt with."""
        self._ids = {aborted for aborted in self._ids if aborted > checkpoint_id}
