"""Readers of queues, which acknowledge a message when a checkpoint is complete that has it.

A queue gives every message again that was not acknowledged, so no position is needed, and nothing is lost.
Messages that were read behind the last complete checkpoint come again after a failure: at least once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from .bad_records import OnBadRecord
from .fetched_splits import FetchedSplitsReader, Piece

Handle = TypeVar("Handle")
"""What a message is acknowledged by."""


class QueueSplit(msgspec.Struct):
    """A split: one of the consumers of a queue.

    Attributes:
        number: of the consumer.
    """

    number: int

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics."""
        return f"consumer-{self.number}"


class AcknowledgingReader(FetchedSplitsReader[QueueSplit], Generic[Handle]):
    """Acknowledges messages when a checkpoint is complete that has them.

    The marks of a piece are the handles of its good messages, and its bad ones are pairs of a handle and a
    reason. A subclass fetches messages, asks `due` which of them to acknowledge, and has a bound of the
    messages that were fetched and are not acknowledged.
    """

    def __init__(self, buffer_bytes: int, policy: OnBadRecord, culprit: str) -> None:
        """Make a reader.

        Args:
            buffer_bytes: while messages of this size wait, no more should be fetched.
            policy: for bad records.
            culprit: the thing to correct if there are some, for the error.
        """
        super().__init__(buffer_bytes, policy, culprit)
        self._taken: list[Handle] = []
        """The messages that the subtask has, and no complete checkpoint."""
        self._cuts: dict[int, int] = {}
        """The number of messages that a checkpoint has of them, by its number."""
        self._due: list[Handle] = []
        """The messages to acknowledge; `_shared.changed` guards them."""

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self.begin([msgspec.msgpack.decode(each, type=QueueSplit) for each in splits], "queue")

    def taken(self, piece: Piece[QueueSplit]) -> None:
        self._taken += piece.marks
        self._taken += [handle for handle, _ in piece.bad]

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        self._cuts[checkpoint_id] = len(self._taken)

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        cuts = [self._cuts.pop(id_) for id_ in list(self._cuts) if id_ <= checkpoint_id]
        if cuts:
            self._acknowledge(max(cuts))

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._cuts.pop(checkpoint_id, None)

    def _acknowledge(self, count: int) -> None:
        """Let the thread acknowledge the first of the messages that were taken."""
        due, self._taken = self._taken[:count], self._taken[count:]
        self._cuts = {id_: max(0, cut - count) for id_, cut in self._cuts.items()}
        with self._shared.changed:
            self._due += due
            self._shared.changed.notify_all()
        self.wake_thread()

    def cut(self, piece: Piece[QueueSplit], rows: int) -> QueueSplit:
        return piece.position

    # -- the thread ---------------------------------------------------------------------------------

    def due(self) -> list[Any]:
        """Return the messages to acknowledge now, each of them once."""
        with self._shared.changed:
            due, self._due = self._due, []
        return due
