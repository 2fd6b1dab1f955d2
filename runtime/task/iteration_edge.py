"""The edge that closes a loop: from a tail to the head in the same slot, without a channel.

A channel has room for some buffers. A loop whose every channel is full would stand still for ever, each
subtask waiting for the next; so this edge takes everything at once, into the head's queue. It is also
where barriers and probes come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from ...errors import InternalError
from ...operators.elements import Batch, CheckpointBarrier, Control, LoopProbe
from ..exchange.partition import PartitionStats


class LoopHead(Protocol):
    """What a tail wants of its head. Calls come from the tail's mailbox, in the order of the stream."""

    def come_back(self, batch: Batch) -> None:
        """Take a batch; never blocks."""
        ...

    def barrier_came_back(self, checkpoint_id: int) -> None:
        """All that was in front of the barrier has come back."""
        ...

    def probe_came_back(self, number: int) -> None:
        """All that was in front of the probe has come back."""
        ...


@final
class FeedbackPorts:
    """The heads on one worker, by loop and subtask. Heads and tails meet here."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, int], LoopHead] = {}

    def attach(self, loop: str, index: int, head: LoopHead) -> None:
        """Make `head` known to its tail."""
        self._heads[loop, index] = head

    def head(self, loop: str, index: int) -> LoopHead:
        """The head of a loop in slot `index`."""
        head = self._heads.get((loop, index))
        if head is None:
            raise InternalError(f"head and tail of a loop are apart loop=`{loop}` slot=`{index}`")
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
        """Give a batch to the head."""
        if len(batch) == 0:
            return
        self._stats.records_out += len(batch)
        self._stats.buffers_out += 1
        self._head.come_back(batch)

    def broadcast(self, element: Control) -> None:
        """Barriers and probes are what a head waits for; it knows of time and ends better than we do."""
        if self._closed:
            return
        if isinstance(element, CheckpointBarrier):
            self._head.barrier_came_back(element.checkpoint_id)
        elif isinstance(element, LoopProbe) and element.loop == self._loop:
            self._head.probe_came_back(element.number)

    def outlet(self, checkpoint_id: int) -> None:
        """No barrier overtakes anything here."""

    @property
    def _head(self) -> LoopHead:
        return self._ports.head(self._loop, self._index)

    def set_listener(self, wake: Callable[[], None]) -> None:
        """There is never a backlog, so nobody is woken."""

    def flush(self) -> None:
        """Nothing is held back."""

    def next_flush(self) -> float | None:
        """Nothing is held back."""
        return None

    def flush_due(self, now: float) -> bool:
        """Nothing is held back."""
        return False

    def stats(self) -> PartitionStats:
        """What went back so far."""
        return self._stats

    def close(self) -> None:
        """The subtask is gone."""
        self._closed = True
