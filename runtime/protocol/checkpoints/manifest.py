"""The manifest of a completed checkpoint: the state files of each subtask.

It is part of the job log entry that completes the checkpoint, as sealed JSON (`state/sealed.py`;
byte strings in base64).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ....state.sealed import Record
from ....state.snapshot import OperatorSnapshot, StateHandle, StateInfo
from .. import names


class ManifestSubtask(Record, frozen=True, kw_only=True):
    """The snapshots of one operator in one subtask."""

    subtask: int
    snapshots: tuple[OperatorSnapshot, ...] = ()
    finished: bool = False
    """Whether the subtask had seen the end of its data: after a restore it does not run again."""

    def handles(self) -> Iterator[StateHandle]:
        """Yield every piece of state of this subtask."""
        for snapshot in self.snapshots:
            yield from snapshot.handles


class ManifestOperator(Record, frozen=True, kw_only=True):
    """One operator with all its subtasks; another run may have other chains."""

    name: str
    parallelism: int
    subtasks: tuple[ManifestSubtask, ...]

    def handles(self) -> Iterator[StateHandle]:
        """Yield every piece of state of this operator."""
        for subtask in self.subtasks:
            yield from subtask.handles()

    def infos(self) -> dict[str, StateInfo]:
        """Return the declarations of its states, by name."""
        return {
            info.name: info
            for subtask in self.subtasks
            for snapshot in subtask.snapshots
            for info in snapshot.states
        }


class Manifest(Record, frozen=True, kw_only=True):
    """Everything needed to restore a job from one checkpoint."""

    checkpoint_id: int
    trigger_ms: int
    completed_ms: int
    duration_ms: int
    max_parallelism: int
    operators: tuple[ManifestOperator, ...] = ()

    def handles(self) -> Iterator[StateHandle]:
        """Yield every piece of state of this checkpoint."""
        for operator in self.operators:
            yield from operator.handles()

    @property
    def size_bytes(self) -> int:
        """The bytes of all state, including what it shares with older checkpoints."""
        return sum(handle.size_bytes for handle in self.handles())

    def state_bytes(self) -> dict[str, int]:
        """Return these bytes by operator, for operators that have state."""
        found = {
            operator.name: sum(handle.size_bytes for handle in operator.handles())
            for operator in self.operators
        }
        return {name: size for name, size in found.items() if size}

    def files(self) -> frozenset[str]:
        """Return the names of all state files this checkpoint needs; shared ones are in several
        manifests."""
        return frozenset(handle.file for handle in self.handles() if handle.file is not None)


def unshared_files(subsumed: Iterable[Manifest], kept: Iterable[Manifest]) -> list[str]:
    """Return the files of `subsumed` checkpoints that no `kept` one needs, sorted."""
    needed = frozenset[str]().union(*(manifest.files() for manifest in kept))
    return sorted(frozenset[str]().union(*(manifest.files() for manifest in subsumed)) - needed)


def files_written_by(
    snapshots: Iterable[OperatorSnapshot], generation: int, checkpoint_id: int
) -> list[str]:
    """Return the files of `snapshots` that this checkpoint wrote, sorted; not those shared with
    older ones."""
    mine = (generation, checkpoint_id)
    return sorted(
        {
            handle.file
            for snapshot in snapshots
            for handle in snapshot.handles
            if handle.file is not None and names.checkpoint_of(handle.file) == mine
        }
    )


class FileProblem(msgspec.Struct, frozen=True):
    """A file that a checkpoint needs and that is wrong; `found_bytes` None: it is missing."""

    file: str
    expected_bytes: int
    found_bytes: int | None


def verify(manifest: Manifest, present: Mapping[str, int]) -> list[FileProblem]:
    """Return the problems of the files of `manifest`, given the sizes of those in the store; by name."""
    expected: dict[str, int] = {}
    for handle in manifest.handles():
        if handle.file is not None:
            size = names.segment_bytes(handle.file) or handle.offset + handle.size_bytes
            expected[handle.file] = max(expected.get(handle.file, 0), size)
    return [
        FileProblem(file, expected[file], present.get(file))
        for file in sorted(expected)
        if present.get(file) != expected[file]
    ]


def orphans(present: Iterable[str], needed: Iterable[str], generation: int) -> list[str]:
    """Return state files that no checkpoint needs and that no coordinator can finish any more, sorted.

    Args:
        present: names of files in the store.
        needed: files of all retained checkpoints.
        generation: of the current coordinator: its own files may belong to a checkpoint in
            progress.
    """
    kept = frozenset(needed)
    return sorted(
        name
        for name in present
        if name not in kept
        and (written := names.checkpoint_of(name)) is not None
        and written[0] < generation
    )
