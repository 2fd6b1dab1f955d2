"""Decides whether a state that is still in memory is taken over, or read from its files.

When a worker dies, the subtasks on the others are cancelled, with their state as it is at that moment. The
next attempt of a subtask may begin with it, if it goes back to the checkpoint that is restored. It must be
that of the very cut which the checkpoint has: numbers of checkpoints are used again by later attempts, so
the files decide. They have checksums, and so name their content. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from ...state.keygroups import KeyGroupRange
from ...state.snapshot import StateHandle

OTHER_JOB: Final = "the code or the options of the job are others"
OTHER_KEY_GROUPS: Final = "the subtask had other key groups"
OTHER_STORAGE: Final = "the state is not that of a checkpoint of this job"
NOT_WRITTEN: Final = "the subtask did not write the state of this checkpoint"
OTHER_FILES: Final = "the checkpoint has other files than the subtask wrote"
NOT_OPEN: Final = "the changes since the checkpoint are not known"


class KeptFacts(msgspec.Struct, frozen=True):
    """The facts about a state that a subtask had when it was cancelled.

    Attributes:
        code: a digest of the code and the options of the job.
        key_groups: those of the subtask.
        checkpoints: those to which the state can go back.
        handles: the files that the subtask wrote for the checkpoint that is restored, or restored from
            it; None: none are known.
    """

    code: str
    key_groups: KeyGroupRange
    checkpoints: Collection[int]
    handles: Sequence[StateHandle] | None


class RestoreFacts(msgspec.Struct, frozen=True):
    """The facts about a state that a subtask has to restore.

    Attributes:
        code: as in `KeptFacts`.
        key_groups: as in `KeptFacts`.
        checkpoint_id: the checkpoint.
        of_this_job: whether it is one of this job; otherwise it is a savepoint, or of another job.
        handles: the files that it has for the state of this subtask.
    """

    code: str
    key_groups: KeyGroupRange
    checkpoint_id: int
    of_this_job: bool
    handles: Sequence[StateHandle]


def reason_to_read(kept: KeptFacts, restored: RestoreFacts) -> str:
    """Return the reason why a state has to be read; empty: what is in memory is taken over."""
    if not restored.of_this_job:
        return OTHER_STORAGE
    if kept.code != restored.code:
        return OTHER_JOB
    if kept.key_groups != restored.key_groups:
        return OTHER_KEY_GROUPS
    if kept.handles is None:
        return NOT_WRITTEN
    if tuple(kept.handles) != tuple(restored.handles):
        return OTHER_FILES
    if restored.checkpoint_id not in kept.checkpoints:
        return NOT_OPEN
    return ""
