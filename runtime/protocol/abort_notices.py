"""Abort notices that arrive before the barrier: barriers travel with the records, notices beside them."""

from __future__ import annotations

from typing import final

from .ids import CheckpointId

ABORTED_IDS_MAX = 128
"""The number of abort notices remembered ahead of their barrier; the oldest is forgotten first."""


@final
class AbortNotices:
    """The checkpoints that the coordinator aborted and whose barriers may still come."""

    def __init__(self) -> None:
        self._ids: set[CheckpointId] = set()

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._ids

    def add(self, checkpoint_id: CheckpointId) -> None:
        """Remember a notice."""
        self._ids.add(checkpoint_id)
        if len(self._ids) > ABORTED_IDS_MAX:
            self._ids.remove(min(self._ids))

    def forget_to(self, checkpoint_id: CheckpointId) -> None:
        """Forget the notices up to this checkpoint: the barriers of all of them have been handled."""
        self._ids = {aborted for aborted in self._ids if aborted > checkpoint_id}
