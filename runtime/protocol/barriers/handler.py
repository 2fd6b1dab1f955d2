"""The interface of barrier handlers, their decisions, the simplest handler, and the guard of snapshots.

A subtask carries the decisions out in order, at once. `BlockChannel` to `ForwardCancel` are those of
aligned barriers. `StartTimer` and the captures belong to barriers that overtake records: the
overtaken records are *channel state*, a part of the checkpoint.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import Protocol, TypeAlias, final

import msgspec

from ....errors import check
from ....operators.elements import CheckpointBarrier
from ..failures import CheckpointFailure
from ..ids import NO_CHECKPOINT, ChannelPosition, CheckpointId

ABORTED_IDS_MAX = 128
"""The number of abort notices remembered ahead of their barrier; the oldest is forgotten first."""


@final
class BlockChannel(msgspec.Struct, frozen=True):
    """Read no more from this channel."""

    position: ChannelPosition


@final
class UnblockAll(msgspec.Struct, frozen=True):
    """Read from all channels again: what was queued first comes first."""


@final
class TriggerSnapshot(msgspec.Struct, frozen=True):
    """Forward the barrier, and snapshot: all barriers are here, or a capture has just been started.

    Attributes:
        barrier: the barrier to forward; `options.unaligned` means that it overtakes.
        alignment_ms: time from the first barrier to this snapshot.
        start_delay_ms: time from the trigger to the first barrier.
    """

    barrier: CheckpointBarrier
    alignment_ms: int
    start_delay_ms: int


@final
class AbortCheckpoint(msgspec.Struct, frozen=True):
    """Decline the checkpoint: this subtask will not take part in it, or not to its end."""

    checkpoint_id: CheckpointId
    reason: CheckpointFailure


@final
class ForwardCancel(msgspec.Struct, frozen=True):
    """Send a cancel marker to all outputs, which would otherwise wait for our barrier for ever."""

    checkpoint_id: CheckpointId


@final
class StartTimer(msgspec.Struct, frozen=True):
    """Call `on_timer` at this time or later; replaces the previous timer.

    Timers are never cancelled.
    """

    at_ms: int


@final
class StartCapture(msgspec.Struct, frozen=True):
    """From now on, records that the barriers of this checkpoint overtake are channel state.

    For a channel whose barrier is missing, or has just overtaken: the records queued before the
    barrier; if it has not arrived, all queued records and those that arrive until it does. For a
    channel whose barrier was read in line: none. A barrier of this checkpoint that is queued, or
    arrives, is delivered before all records.
    """

    checkpoint_id: CheckpointId


@final
class FinishCapture(msgspec.Struct, frozen=True):
    """The channel state is complete: no open channel's barrier is missing any more.

    Attributes:
        alignment_ms: time from the first barrier to the last.
    """

    checkpoint_id: CheckpointId
    alignment_ms: int


@final
class DropCapture(msgspec.Struct, frozen=True):
    """The checkpoint is aborted after its snapshot: drop its channel state, and the snapshot too."""

    checkpoint_id: CheckpointId


AlignmentDecision: TypeAlias = (
    BlockChannel
    | UnblockAll
    | TriggerSnapshot
    | AbortCheckpoint
    | ForwardCancel
    | StartTimer
    | StartCapture
    | FinishCapture
    | DropCapture
)


class BarrierHandler(Protocol):
    """Decides when the subtask takes its snapshots, and which channels wait for them.

    There are three: `AlignedBarrierHandler`, `AlternatingBarrierHandler` (aligned, and unaligned
    after a timeout or at once) and `AtLeastOnceTracker`. Decisions must be carried out in order,
    before anything else is read. `now_ms` is the subtask's clock; the trigger's time is the
    coordinator's.
    """

    @property
    def pending(self) -> bool:
        """True while a snapshot waits for barriers that must be read in line, after records."""
        ...

    def on_announced(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a barrier that may overtake and arrived in a channel's queue, where it stays for now."""
        ...

    def on_barrier(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a barrier taken from a channel: in line, or ahead of the records before it."""
        ...

    def on_timer(self, now_ms: int) -> list[AlignmentDecision]:
        """Handle a timer. Always safe to call, also too early, or for a timer that was replaced."""
        ...

    def on_cancel(
        self, position: ChannelPosition, checkpoint_id: CheckpointId
    ) -> list[AlignmentDecision]:
        """Handle a cancel marker read from a channel: its sender will send no such barrier."""
        ...

    def on_end_of_partition(
        self, position: ChannelPosition, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a channel that closed normally: it is no longer waited for."""
        ...

    def on_abort_notice(self, checkpoint_id: CheckpointId) -> list[AlignmentDecision]:
        """Handle an abort by the coordinator; its barriers may have yet to come, or be past."""
        ...

    def validate(self) -> None:
        """Check all invariants; for tests."""
        ...


class BarriersInLine:
    """The common part of handlers whose barriers wait in line, behind the records before them."""

    def __init__(self, channels: int) -> None:
        check(channels > 0, "a barrier handler without channels", channels=channels)
        self._open = {ChannelPosition(position) for position in range(channels)}

    def on_announced(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """Do nothing: barriers do not overtake here, but are waited for in line."""
        return []

    def on_timer(self, now_ms: int) -> list[AlignmentDecision]:
        """Do nothing: no timer is ever set."""
        return []

    def on_abort_notice(self, checkpoint_id: CheckpointId) -> list[AlignmentDecision]:
        """Do nothing: `SnapshotGuard` turns the snapshot of the checkpoint into a cancel marker."""
        return []


@final
class AlignedBarrierHandler(BarriersInLine):
    """Aligns the barriers of one subtask's input channels: facts about channels in, decisions out.

        waiting for a first barrier ──barrier──> collecting ──last barrier──> TriggerSnapshot, UnblockAll
                  ^                                 │ cancel marker, or a barrier of a newer checkpoint
                  └────────────<────────────────────┘ UnblockAll, AbortCheckpoint, ForwardCancel

    A channel that delivered its barrier is blocked until all the others have theirs: so the snapshot
    holds the effects of the records before the barriers, and of none after them. `EndOfData` is not
    handled here: a channel without data still delivers barriers. `EndOfPartition` closes a channel,
    which is no longer waited for.

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


@final
class AbortNotices:
    """The checkpoints that the coordinator aborted and whose barriers may still come."""

    def __init__(self) -> None:
        self._ids: set[CheckpointId] = set()

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._ids

    def add(self, checkpoint_id: CheckpointId) -> None:
        """Remember a notice."""
        self._ids.add(checkpoint_id)
        if len(self._ids) > ABORTED_IDS_MAX:
            self._ids.remove(min(self._ids))

    def forget_to(self, checkpoint_id: CheckpointId) -> None:
        """Forget the notices up to this checkpoint: the barriers of all of them have been handled."""
        self._ids = {aborted for aborted in self._ids if aborted > checkpoint_id}


@unique
class SnapshotVerdict(Enum):
    """The decision about a checkpoint whose barriers are all here."""

    TAKE = "take"
    CANCEL = "cancel"
    """It was already aborted: send a cancel marker instead of the barrier."""
    IGNORE = "ignore"
    """It is out of order: this or a newer one was handled before."""


@final
class SnapshotGuard:
    """The guard in front of every snapshot of a subtask: keeps them in order, and drops the aborted ones.

    Barriers travel with the records, abort notices beside them: a notice can arrive before the barrier.
    """

    def __init__(self) -> None:
        self._last = NO_CHECKPOINT
        self._aborted = AbortNotices()

    def on_trigger(self, checkpoint_id: CheckpointId) -> SnapshotVerdict:
        """Decide about a checkpoint whose barriers are all here (at a source: that was triggered)."""
        if checkpoint_id <= self._last:
            return SnapshotVerdict.IGNORE
        aborted = checkpoint_id in self._aborted
        self._advance(checkpoint_id)
        return SnapshotVerdict.CANCEL if aborted else SnapshotVerdict.TAKE

    def on_declined(self, checkpoint_id: CheckpointId) -> None:
        """Note that the alignment was aborted: never take this snapshot, nor an older one."""
        self._advance(max(self._last, checkpoint_id))

    def on_abort_notice(self, checkpoint_id: CheckpointId) -> None:
        """Note that the coordinator aborted a checkpoint."""
        if checkpoint_id > self._last:
            self._aborted.add(checkpoint_id)

    def _advance(self, checkpoint_id: CheckpointId) -> None:
        self._last = checkpoint_id
        self._aborted.forget_to(checkpoint_id)
