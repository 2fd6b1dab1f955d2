"""Tables in memory that can go back to a checkpoint, instead of being read again.

A worker that survives the death of another one still has its state, as it was when its subtasks were
cancelled. What changed since the newest complete checkpoint is in the undo logs of cuts (`cuts.py`), if
those are kept open until a later checkpoint is complete. The subtask of the next attempt takes the
dictionaries over, and puts the old values back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from ..queryable import CommittedPoints, held_bytes
from ..snapshot import KeptState
from .cuts import Changes, Cut

KEEP_STATE_OPTION: Final = "headgate.recovery.keep-state"
KEPT_BYTES_MAX_OPTION: Final = "headgate.recovery.keep-state.old-values-max"
KEPT_BYTES_MAX: Final = 256 << 20
"""The most bytes of old values that one state of one subtask keeps by default."""
_ENTRY_BYTES: Final = 150
"""Roughly the memory of a place and of its entry in a log."""
T = TypeVar("T")


class KeptCut:
    """A cut of a checkpoint that stays open; it has the old values of what has changed since.

    Args:
        changes: of the table.
        grew: called now and then while old values come.
    """

    __slots__ = ("_changes", "cut")

    def __init__(self, changes: Changes, grew: Callable[[], None]) -> None:
        self._changes = changes
        self.cut: Cut = changes.keep(grew)

    @property
    def nbytes(self) -> int:
        """See `OldValues`. This is an estimate: one old value of each part is measured."""
        size = 0
        for log in self.cut.undo:
            if log:
                size += len(log) * (_ENTRY_BYTES + held_bytes(next(iter(log.values()))))
        return size

    def absorb(self, later: KeptCut) -> None:
        """See `OldValues`."""
        later.close()
        self._changes.join_closed(self.cut)

    def close(self) -> None:
        """Close the cut: the table will not go back to it."""
        self._changes.close(self.cut)


def kept_cuts(changes: Changes, bytes_max: int) -> CommittedPoints[KeptCut]:
    """Return the points of a table; they keep no more than `bytes_max` of old values."""
    points: CommittedPoints[KeptCut]
    points = CommittedPoints(
        lambda: KeptCut(changes, lambda: points.grew()), bytes_max, KeptCut.close
    )
    return points


class KeptTable(msgspec.Struct, Generic[T], frozen=True):
    """The content of a table of a subtask that has ended.

    Attributes:
        parts: the dictionaries; the table itself has none of them any more.
        points: the checkpoints to which it can go back.
    """

    parts: list[dict[Any, T]]
    points: CommittedPoints[KeptCut]

    @classmethod
    def of(
        cls, parts: list[dict[Any, T]], points: CommittedPoints[KeptCut], changes: Changes
    ) -> KeptState:
        """Take the content out of a table: what still refers to it, finds nothing to read or write.

        If deltas cannot build on what the table has restored, it can go back to no checkpoint: only a
        table that has read the files knows that.
        """
        kept = cls(parts[:], points)
        parts.clear()
        return KeptState(frozenset() if changes.rebase else points.checkpoints, kept)

    def old_values(self, checkpoint_id: int) -> list[dict[Any, Any]]:
        """Return for each part the old values of what has changed since the cut of a checkpoint.

        Raises:
            NotKept: the cut is not kept.
        """
        cut = self.points.since(checkpoint_id)[0].cut
        return [cut.overlay(part) for part in range(len(self.parts))]
