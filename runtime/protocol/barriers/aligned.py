"""Aligned barriers at a receiver: facts about channels in, decisions out.

    waiting for a first barrier ──barrier──> collecting ──last barrier──> TriggerSnapshot, UnblockAll
              ^                                 │ cancel marker, or a barrier of a newer checkpoint
              └────────────<────────────────────┘ UnblockAll, AbortCheckpoint, ForwardCancel

A channel that delivered its barrier is blocked until all the others have theirs: so the snapshot
holds the effects of the records before the barriers, and of none after them. `EndOfData` is not
handled here: a channel without data still delivers barriers. `EndOfPartition` closes a channel,
which is no longer waited for.
"""

from __future__ import annotations

from typing import final

from ....errors import check
from ....operators.elements import CheckpointBarrier
from ..failures import CheckpointFailure
from ..ids import NO_CHECKPOINT, ChannelPosition, CheckpointId
from .handler import (
    AbortCheckpoint,
    AlignmentDecision,
    BarriersInLine,
    BlockChannel,
    ForwardCancel,
    TriggerSnapshot,
    UnblockAll,
)


@final
class AlignedBarrierHandler(BarriersInLine):
    """Aligns the barriers of one subtask's input channels.

    Decisions are to be carried out in order, before anything else is read. With one open channel
    nothing is ever blocked.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self._current = NO_CHECKPOINT
        self._pending: CheckpointBarrier | None = None
        self._waiting: set[ChannelPosition] = set()
        self._blocked: set[ChannelPosition] = set()
        self._first_barrier_ms = 0

    @property
    def pending(self) -> bool:
        """True while some channels have delivered their barrier, and others have not."""
        return self._pending is not None

    def on_barrier(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a barrier read from a channel."""
        self._check_readable(position)
        checkpoint_id = CheckpointId(barrier.checkpoint_id)
        decisions: list[AlignmentDecision] = []
        if checkpoint_id > self._current:
            decisions += self._abort(CheckpointFailure.SUBSUMED)
            self._current = checkpoint_id
            self._pending = barrier
            self._waiting = set(self._open)
            self._first_barrier_ms = now_ms
        elif checkpoint_id < self._current or self._pending is None:
            return []  # obsolete: completed, cancelled, or superseded by a newer one
        self._waiting.discard(position)
        if self._waiting:
            self._blocked.add(position)
            decisions.append(BlockChannel(position))
        return decisions + self._complete_if_aligned(now_ms)

    def on_cancel(
        self, position: ChannelPosition, checkpoint_id: CheckpointId
    ) -> list[AlignmentDecision]:
        """Handle a cancel marker read from a channel: its sender will send no such barrier."""
        self._check_readable(position)
        if checkpoint_id < self._current:
            return []
        if checkpoint_id == self._current:
            return self._abort(CheckpointFailure.CANCEL_MARKER)
        # Markers keep the order of barriers: no barrier of the older checkpoint will follow on this
        # channel.
        decisions = self._abort(CheckpointFailure.SUBSUMED)
        self._current = checkpoint_id
        return [
            *decisions,
            AbortCheckpoint(checkpoint_id, CheckpointFailure.CANCEL_MARKER),
            ForwardCancel(checkpoint_id),
        ]

    def on_end_of_partition(
        self, position: ChannelPosition, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a channel that closed normally: it counts as aligned from now on."""
        self._check_readable(position)
        self._open.discard(position)
        self._waiting.discard(position)
        return self._complete_if_aligned(now_ms)

    def _complete_if_aligned(self, now_ms: int) -> list[AlignmentDecision]:
        if self._pending is None or self._waiting:
            return []
        barrier, self._pending = self._pending, None
        return [
            TriggerSnapshot(
                barrier,
                alignment_ms=max(0, now_ms - self._first_barrier_ms),
                start_delay_ms=max(0, self._first_barrier_ms - barrier.trigger_ms),
            ),
            *self._unblock(),
        ]

    def _abort(self, reason: CheckpointFailure) -> list[AlignmentDecision]:
        """Abort the pending alignment, if there is one."""
        if self._pending is None:
            return []
        self._pending = None
        self._waiting.clear()
        return [
            *self._unblock(),
            AbortCheckpoint(self._current, reason),
            ForwardCancel(self._current),
        ]

    def _unblock(self) -> list[AlignmentDecision]:
        if not self._blocked:
            return []
        self._blocked.clear()
        return [UnblockAll()]

    def _check_readable(self, position: ChannelPosition) -> None:
        check(
            position in self._open and position not in self._blocked,
            "an element was read from a channel that is closed or blocked",
            position=position,
            current=self._current,
        )

    def validate(self) -> None:
        """Check all invariants; for tests."""
        pending = self._pending is not None
        check(pending == bool(self._waiting), "pending without a missing barrier, or the reverse")
        check(not self._waiting & self._blocked, "a channel both waited for and blocked")
        if pending:
            check(self._waiting | self._blocked == self._open, "an open channel is unaccounted for")
        else:
            check(not self._blocked, "blocked channels without a pending checkpoint")
