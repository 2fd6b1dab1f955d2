"""Which records in a loop belong to a checkpoint: pure decisions about positions of a feedback queue.

    barrier goes into the loop ──> open, from the next position to be sent ──> barrier comes back ──> cut
                                    └── checkpoint aborted ──> forgotten

A barrier that goes in separates what the loop has seen from what it has not. After it come the
records that wait in the queue, and those that come back ahead of the barrier: everything that was
in flight in the loop. They are one range of the queue, so a log is two positions, and overlapping
checkpoints share the records. Barriers are told apart by where they come from: one from outside
opens a log, one from the loop closes it. After algorithm 2 of Carbone et al., State Management in
Apache Flink, VLDB 2017, where a flag is toggled instead.
"""

from __future__ import annotations

from typing import NamedTuple, final

from ...errors import check


@final
class Range(NamedTuple):
    """Positions [start, end) of a queue."""

    start: int
    end: int


@final
class FeedbackLog:
    """The open logs of one loop head."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}
        self._last = 0

    @property
    def is_open(self) -> bool:
        """True while a barrier is in the loop."""
        return bool(self._starts)

    def on_barrier(self, checkpoint_id: int, position: int) -> None:
        """Open a log; `position` is the first that is sent after the barrier."""
        check(checkpoint_id > self._last, "barriers out of order", checkpoint_id=checkpoint_id)
        self._last = checkpoint_id
        self._starts[checkpoint_id] = position

    def on_return(self, checkpoint_id: int, position: int) -> Range | None:
        """Close a log; `position` is the first after the returned barrier. Return None if it was
        aborted."""
        start = self._starts.pop(checkpoint_id, None)
        return None if start is None else Range(start, position)

    def on_abort(self, checkpoint_id: int) -> None:
        """Forget the log of an aborted checkpoint; its barrier may still come back."""
        self._starts.pop(checkpoint_id, None)

    def floor(self, position: int) -> int:
        """Return the oldest position still needed, if `position` is the next to be sent."""
        return min(self._starts.values(), default=position)
