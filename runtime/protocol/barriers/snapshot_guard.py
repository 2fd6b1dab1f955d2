"""The guard in front of every snapshot of a subtask.

Barriers travel with the records, abort notices beside them: a notice can arrive before the barrier.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import final

from ..ids import NO_CHECKPOINT, CheckpointId

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


@unique
class SnapshotVerdict(Enum):
    """The decision about a checkpoint whose barriers are all here."""

    TAKE = "take"
    CANCEL = "cancel"
    """It was already aborted: send a cancel marker instead of the barrier."""
    IGNORE = "ignore"
    """It is out of order: this or a newer one was handled before."""


@final
class SnapshotGuard:
    """Keeps the snapshots of one subtask in order, and drops those that are already aborted."""

    def __init__(self) -> None:
        self._last = NO_CHECKPOINT
        self._aborted = AbortNotices()

    def on_trigger(self, checkpoint_id: CheckpointId) -> SnapshotVerdict:
        """Decide about a checkpoint whose barriers are all here (at a source: that was triggered)."""
        if checkpoint_id <= self._last:
            return SnapshotVerdict.IGNORE
        aborted = checkpoint_id in self._aborted
        self._advance(checkpoint_id)
        return SnapshotVerdict.CANCEL if aborted else SnapshotVerdict.TAKE

    def on_declined(self, checkpoint_id: CheckpointId) -> None:
        """Note that the alignment was aborted: never take this snapshot, nor an older one."""
        self._advance(max(self._last, checkpoint_id))

    def on_abort_notice(self, checkpoint_id: CheckpointId) -> None:
        """Note that the coordinator aborted a checkpoint."""
        if checkpoint_id > self._last:
            self._aborted.add(checkpoint_id)

    def _advance(self, checkpoint_id: CheckpointId) -> None:
        self._last = checkpoint_id
        self._aborted.forget_to(checkpoint_id)
