"""Barriers without exactly-once: they are counted, and no channel is ever blocked.

A snapshot is taken at the last barrier. By then records from after the other barriers were
processed: they are in the snapshot, and a restore reads them again.

Several checkpoints may be in progress at once, so there is an entry for each: the channels whose
barrier is missing, and whether it was cancelled. A cancelled one is still counted, so that its late
barriers start nothing. In this table *drop* means `AbortCheckpoint` and `ForwardCancel`, but
nothing for one that was cancelled before.

| event | no entry, newer than all | no entry, older | an entry |
|---|---|---|---|
| barrier | an entry; if it is one too many, drop the oldest | | count it |
| last barrier | `TriggerSnapshot` | | drop all older ones; `TriggerSnapshot` |
| last barrier of a cancelled one | | | drop all older ones |
| cancel marker | drop all and this one; a cancelled entry | | drop all older and this one; count it |
| end of a partition | | | its barrier is no longer missing, for any entry |
| announcement, timer, abort notice | | | |

`SnapshotGuard` turns the snapshot of a checkpoint that the coordinator aborted into a cancel
marker.
"""

from __future__ import annotations

from typing import final

import msgspec

from ....errors import check
from ....operators.elements import CheckpointBarrier
from ..failures import CheckpointFailure
from ..ids import NO_CHECKPOINT, ChannelPosition, CheckpointId
from .handler import (
    AbortCheckpoint,
    AlignmentDecision,
    BarriersInLine,
    ForwardCancel,
    TriggerSnapshot,
)

PENDING_MAX = 50
"""The number of checkpoints counted at once; the oldest is dropped first, and declined."""


class _Entry(msgspec.Struct):
    waiting: set[ChannelPosition]
    barrier: CheckpointBarrier | None
    """The first barrier; None: the checkpoint was cancelled."""
    first_barrier_ms: int


@final
class AtLeastOnceTracker(BarriersInLine):
    """Counts the barriers of one subtask's input channels."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self._newest = NO_CHECKPOINT
        self._entries: dict[CheckpointId, _Entry] = {}
        """The checkpoints in order of their ids."""

    @property
    def pending(self) -> bool:
        """True while some channels have delivered their barrier, and others have not."""
        return any(entry.barrier is not None for entry in self._entries.values())

    def on_barrier(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a barrier read from a channel."""
        self._check_readable(position)
        checkpoint_id = CheckpointId(barrier.checkpoint_id)
        decisions: list[AlignmentDecision] = []
        if checkpoint_id > self._newest:
            self._newest = checkpoint_id
            self._entries[checkpoint_id] = _Entry(set(self._open), barrier, now_ms)
        entry = self._entries.get(checkpoint_id)
        if entry is not None:
            entry.waiting.discard(position)
            decisions += self._complete(now_ms)
        if len(self._entries) > PENDING_MAX:
            decisions += self._drop(next(iter(self._entries)), CheckpointFailure.SUBSUMED)
        return decisions

    def on_cancel(
        self, position: ChannelPosition, checkpoint_id: CheckpointId
    ) -> list[AlignmentDecision]:
        """Handle a cancel marker read from a channel: its sender will send no such barrier."""
        self._check_readable(position)
        if checkpoint_id <= self._newest and checkpoint_id not in self._entries:
            return []
        decisions = self._drop_older_than(checkpoint_id)
        entry = self._entries.get(checkpoint_id)
        if entry is None:
            self._newest = checkpoint_id
            entry = self._entries[checkpoint_id] = _Entry(set(self._open), None, 0)
            decisions += _given_up(checkpoint_id, CheckpointFailure.CANCEL_MARKER)
        elif entry.barrier is not None:
            entry.barrier = None
            decisions += _given_up(checkpoint_id, CheckpointFailure.CANCEL_MARKER)
        entry.waiting.discard(position)
        if not entry.waiting:
            del self._entries[checkpoint_id]
        return decisions

    def on_end_of_partition(
        self, position: ChannelPosition, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a channel that closed normally: its barrier is no longer missing."""
        self._check_readable(position)
        self._open.discard(position)
        for entry in self._entries.values():
            entry.waiting.discard(position)
        return self._complete(now_ms)

    def _complete(self, now_ms: int) -> list[AlignmentDecision]:
        """Take the snapshots of all checkpoints whose barriers are all here, in order of their ids."""
        decisions: list[AlignmentDecision] = []
        for checkpoint_id in [id_ for id_, entry in self._entries.items() if not entry.waiting]:
            decisions += self._drop_older_than(checkpoint_id)
            entry = self._entries.pop(checkpoint_id)
            if entry.barrier is not None:
                decisions.append(
                    TriggerSnapshot(
                        entry.barrier,
                        alignment_ms=max(0, now_ms - entry.first_barrier_ms),
                        start_delay_ms=max(0, entry.first_barrier_ms - entry.barrier.trigger_ms),
                    )
                )
        return decisions

    def _drop_older_than(self, checkpoint_id: CheckpointId) -> list[AlignmentDecision]:
        """Drop incomplete checkpoints, which cannot be taken after a newer one."""
        older = [id_ for id_ in self._entries if id_ < checkpoint_id]
        return [item for id_ in older for item in self._drop(id_, CheckpointFailure.SUBSUMED)]

    def _drop(
        self, checkpoint_id: CheckpointId, reason: CheckpointFailure
    ) -> list[AlignmentDecision]:
        entry = self._entries.pop(checkpoint_id)
        return [] if entry.barrier is None else _given_up(checkpoint_id, reason)

    def _check_readable(self, position: ChannelPosition) -> None:
        check(
            position in self._open, "an element was read from a closed channel", position=position
        )

    def validate(self) -> None:
        """Check all invariants; for tests."""
        check(len(self._entries) <= PENDING_MAX, "too many entries", entries=len(self._entries))
        check(list(self._entries) == sorted(self._entries), "entries out of order")
        check(max(self._entries, default=NO_CHECKPOINT) <= self._newest, "an entry is too new")
        for checkpoint_id, entry in self._entries.items():
            check(entry.waiting, "an entry without a missing barrier", checkpoint_id=checkpoint_id)
            check(entry.waiting <= self._open, "a closed channel is waited for")


def _given_up(checkpoint_id: CheckpointId, reason: CheckpointFailure) -> list[AlignmentDecision]:
    return [AbortCheckpoint(checkpoint_id, reason), ForwardCancel(checkpoint_id)]
