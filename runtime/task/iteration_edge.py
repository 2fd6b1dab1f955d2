"""The edge that closes a loop: from a tail to the head in the same slot, without a channel.

A channel has room for some buffers. A loop whose channels are all full would deadlock, each subtask
waiting for the next; so this edge accepts everything at once, into the head's queue. Barriers and
probes come back here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from ...errors import InternalError
from ...operators.elements import Batch, CheckpointBarrier, Control, LoopProbe
from ..exchange.partition import PartitionStats


class LoopHead(Protocol):
    """The head as its tail sees it. Calls come from the tail's mailbox, in the order of the stream."""

    def come_back(self, batch: Batch) -> None:
        """Accept a batch; never blocks."""
        ...

    def barrier_came_back(self, checkpoint_id: int) -> None:
        """Handle a barrier: everything before it has come back."""
        ...

    def probe_came_back(self, number: int) -> None:
        """Handle a probe: everything before it has come back."""
        ...


@final
class FeedbackPorts:
    """The heads on one worker, by loop and subtask, for their tails."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, int], LoopHead] = {}

    def attach(self, loop: str, index: int, head: LoopHead) -> None:
        """Register `head` for its tail."""
        self._heads[loop, index] = head

    def head(self, loop: str, index: int) -> LoopHead:
        """Return the head of a loop in slot `index`."""
        head = self._heads.get((loop, index))
        if head is None:
            raise InternalError(
                f"head and tail of a loop are on different workers loop=`{loop}` slot=`{index}`"
            )
        return head


@final
class FeedbackPartition:
    """The result partition of a tail."""

    backlogged = False
    debloated_bytes: int | None = None
    emitted_bytes = 0

    def __init__(self, ports: FeedbackPorts, loop: str, index: int) -> None:
        self._ports, self._loop, self._index = ports, loop, index
        self._stats = PartitionStats()
        self._closed = False

    def emit(self, batch: Batch) -> None:
        """Pass a batch to the head."""
        if len(batch) == 0:
            return
        self._stats.records_out += len(batch)
        self._stats.buffers_out += 1
        self._head.come_back(batch)

    def broadcast(self, element: Control) -> None:
        """Pass barriers and probes to the head, and ignore the rest: the head knows time and ends
        better."""
        if self._closed:
            return
        if isinstance(element, CheckpointBarrier):
            self._head.barrier_came_back(element.checkpoint_id)
        elif isinstance(element, LoopProbe) and element.loop == self._loop:
            self._head.probe_came_back(element.number)

    def outlet(self, checkpoint_id: int) -> None:
        """Return None: no barrier overtakes anything here."""

    @property
    def _head(self) -> LoopHead:
        return self._ports.head(self._loop, self._index)

    def set_listener(self, wake: Callable[[], None]) -> None:
        """Do nothing: there is never a backlog."""

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def next_flush(self) -> float | None:
        """Return None: nothing is held back."""
        return None

    def flush_due(self, now: float) -> bool:
        """Return False: nothing is held back."""
        return False

    def stats(self) -> PartitionStats:
        """Return the statistics of the feedback so far."""
        return self._stats

    def close(self) -> None:
        """Close the partition at the end of the subtask."""
        self._closed = True
