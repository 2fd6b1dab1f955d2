"""Segments: objects in the store that hold small state of many subtasks, for one request instead of many.

The small pieces that the subtasks of a worker write for one checkpoint go into one segment. A handle names
the segment, and the place of its piece in it. A segment is deleted with the last checkpoint that needs any
of its pieces, as every file is. Until then it also holds pieces that no checkpoint needs any more.
`SegmentLedger` finds the segments of which too little is needed; the next checkpoint writes their needed
pieces anew.

docs/design/0032-small-state-shares-objects.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, final

import msgspec

from ....state.snapshot import StateHandle
from .. import names

Owner: TypeAlias = tuple[int, int]
"""A subtask: its vertex and its index."""


def is_piece(handle: StateHandle) -> bool:
    """Return True if the state lies in a segment, so that it is read by its place there."""
    return handle.file is not None and names.segment_bytes(handle.file) is not None


def layout(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of pieces of these sizes, which lie one behind the other."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += size
    return offsets


@final
class Extent(msgspec.Struct):
    """Adjacent pieces of one file, which are read at once."""

    file: str
    start: int
    end: int


def extents(handles: Iterable[StateHandle], size_max: int) -> dict[tuple[str, int], Extent]:
    """Return the extents in which pieces are read, by the place of each piece.

    Args:
        handles: the pieces to read, of segments or of other files; what lies in no file is left out.
        size_max: the most bytes of an extent of several pieces.
    """
    pieces = {(h.file, h.offset): h.size_bytes for h in handles if h.file}
    found: dict[tuple[str, int], Extent] = {}
    last: Extent | None = None
    for (file, offset), size in sorted(pieces.items()):
        end = offset + size
        adjacent = last is not None and (last.file, last.end) == (file, offset)
        if last is None or not adjacent or end - last.start > size_max:
            last = Extent(file, offset, end)
        last.end = end
        found[file, offset] = last
    return found


@final
class SegmentLedger(msgspec.Struct):
    """The pieces in segments that the subtasks of one worker need, by checkpoint.

    A worker counts only what its own subtasks need of a segment. If other workers need pieces of it as
    well, each of them counts less than is really needed. It then writes its pieces anew too early, but
    never too late.
    """

    amplification_max: float = 2.0
    """The most bytes of a segment for each byte of it that is needed."""
    _needed: dict[int, dict[Owner, dict[str, int]]] = msgspec.field(default_factory=dict)
    """By checkpoint and subtask: the bytes that it needs of each segment."""
    _sparse: dict[int, frozenset[str]] = msgspec.field(default_factory=dict)

    def note(self, checkpoint_id: int, owner: Owner, handles: Iterable[StateHandle]) -> None:
        """Note what a subtask's part of a checkpoint consists of."""
        needed: dict[str, int] = {}
        for handle in handles:
            if handle.file is not None and is_piece(handle):
                needed[handle.file] = needed.get(handle.file, 0) + handle.size_bytes
        self._needed.setdefault(checkpoint_id, {})[owner] = needed
        self._sparse.pop(checkpoint_id, None)

    def forget(self, checkpoint_id: int) -> None:
        """Forget a checkpoint that was declined or aborted."""
        self._needed.pop(checkpoint_id, None)
        self._sparse.pop(checkpoint_id, None)

    def sparse(self, base: int) -> frozenset[str]:
        """Return the segments of which a checkpoint needs too little; `base` is complete.

        Older checkpoints are forgotten: no later one builds on them.
        """
        for id_ in [id_ for id_ in self._needed if id_ < base]:
            self.forget(id_)
        if base not in self._needed:
            return frozenset()
        if base not in self._sparse:
            self._sparse[base] = self._find_sparse(base)
        return self._sparse[base]

    def _find_sparse(self, base: int) -> frozenset[str]:
        total: dict[str, int] = {}
        for needed in self._needed[base].values():
            for file, size in needed.items():
                total[file] = total.get(file, 0) + size
        return frozenset(
            file
            for file, size in total.items()
            if (names.segment_bytes(file) or 0) > self.amplification_max * size
        )

    def clear(self) -> None:
        """Forget everything: other subtasks run here."""
        self._needed.clear()
        self._sparse.clear()
