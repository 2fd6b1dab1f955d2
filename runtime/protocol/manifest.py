"""The manifest of a completed checkpoint: which state of which subtask lies where.

It is part of the job log entry that completes the checkpoint, as JSON (byte strings in base64).
Unknown fields are ignored on reading, so that a newer minor version may add some.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...state.snapshot import OperatorSnapshot


class ManifestSubtask(msgspec.Struct, frozen=True, kw_only=True):
    """What one subtask handed over: the snapshots of all operators in its chain."""

    subtask: int
    snapshots: tuple[OperatorSnapshot, ...] = ()
    finished: bool = False
    """True if the subtask had seen the end of its data: after a restore it does not run again."""


class ManifestOperator(msgspec.Struct, frozen=True, kw_only=True):
    """A chain of operators that ran as one vertex, with all its subtasks."""

    name: str
    parallelism: int
    subtasks: tuple[ManifestSubtask, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to restore a job from one checkpoint."""

    checkpoint_id: int
    trigger_ms: int
    completed_ms: int
    duration_ms: int
    max_parallelism: int
    operators: tuple[ManifestOperator, ...] = ()

    def files(self) -> frozenset[str]:
        """Names of all state files this checkpoint needs; shared ones occur in several manifests."""
        return frozenset(
            handle.file
            for operator in self.operators
            for subtask in operator.subtasks
            for snapshot in subtask.snapshots
            for handle in snapshot.handles
            if handle.file is not None
        )


def unshared_files(subsumed: Iterable[Manifest], kept: Iterable[Manifest]) -> list[str]:
    """Files of `subsumed` checkpoints that no `kept` one needs, sorted."""
    needed = frozenset[str]().union(*(manifest.files() for manifest in kept))
    return sorted(frozenset[str]().union(*(manifest.files() for manifest in subsumed)) - needed)
