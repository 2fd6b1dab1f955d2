"""Barriers that may overtake records: aligned at first, unaligned after a while.

    idle ──first barrier, or its announcement──> aligning ──last barrier──> TriggerSnapshot, UnblockAll
                                                    │ the checkpoint is too old, or an unaligned barrier
                                                    v StartCapture, TriggerSnapshot, UnblockAll
                                                collecting ──last barrier──> FinishCapture

*Aligning* is what `AlignedBarrierHandler` does. At the *switch* the state is cut, whichever
barriers are missing: records that they overtake become channel state. After the cut no channel
needs to be blocked: one whose barrier was read in line continues with records of the next epoch,
the others with records that the capture has seen. A barrier that comes later is only counted.

With an `aligned_timeout_ms` the switch happens when a checkpoint is that old, counted from its
trigger (not from its first barrier: delays upstream count), unless all barriers arrive before. A
barrier that is already unaligned has overtaken records of its channel, so it causes the switch even
as the last one. A barrier with neither option (of a savepoint or a stop) is aligned, however long
that takes. Clock differences between machines shift the switch by as much; it is correct at any
time.

The events, where c is the newest checkpoint heard of. Rows apply in all states; an empty cell
means no change.

| event | idle, c is over | aligning c | collecting c |
|---|---|---|---|
| barrier or announcement older than c | | | |
| announcement of c | | the switch, if overdue | |
| barrier of c, not the last | | `BlockChannel`; the switch, if overdue or unaligned | counted |
| last barrier of c | | snapshot; the switch, if unaligned | `FinishCapture` |
| timer | | the switch; `StartTimer` again, if it is too early | |
| cancel marker of c | | c is aborted | c is aborted |
| end of a partition | | as its barrier; snapshot, if it was the last | as its barrier |
| abort notice of c | | `UnblockAll`, `ForwardCancel` | `DropCapture` |
| newer barrier or announcement | begin to align it | c is aborted; begin | c is aborted; begin |
| newer cancel marker | aborted at once | both are aborted | both are aborted |
| newer abort notice | remembered | remembered | remembered |

*Begin* means `StartTimer`, or `BlockChannel`, or both; or the switch at once; or, with one open channel,
the snapshot. If its abort notice is here it means `ForwardCancel`, and the checkpoint is over.
*Aborted* means `UnblockAll`, `AbortCheckpoint`, `ForwardCancel`; while collecting `DropCapture` and
`AbortCheckpoint`, since our barrier was already sent. An abort notice needs no `AbortCheckpoint`: the
coordinator knows.
"""

from __future__ import annotations

from typing import final

from ....errors import check
from ....operators.elements import CheckpointBarrier
from ..failures import CheckpointFailure
from ..ids import NO_CHECKPOINT, ChannelPosition, CheckpointId
from .handler import (
    AbortCheckpoint,
    AbortNotices,
    AlignmentDecision,
    BlockChannel,
    DropCapture,
    FinishCapture,
    ForwardCancel,
    StartCapture,
    StartTimer,
    TriggerSnapshot,
    UnblockAll,
)


@final
class AlternatingBarrierHandler:
    """Handles the barriers of one subtask, all of whose input channels let barriers overtake records."""

    def __init__(self, channels: int) -> None:
        check(channels > 0, "a barrier handler without channels", channels=channels)
        self._open = {ChannelPosition(position) for position in range(channels)}
        self._current = NO_CHECKPOINT
        self._barrier: CheckpointBarrier | None = None
        self._collecting = False
        self._waiting: set[ChannelPosition] = set()
        self._blocked: set[ChannelPosition] = set()
        self._first_barrier_ms: int | None = None
        self._notices = AbortNotices()

    @property
    def pending(self) -> bool:
        """True while aligning; not while collecting, since those barriers need no record to be read."""
        return self._barrier is not None and not self._collecting

    # -- events -------------------------------------------------------------------------------------

    def on_announced(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a barrier that may overtake and arrived in a channel's queue; the channel may be
        blocked."""
        decisions, begun = self._begin_if_newer(barrier)
        if not self.pending or barrier.checkpoint_id != self._current:
            return decisions
        if self._overdue(barrier, now_ms):
            return decisions + self._switch(now_ms)
        return decisions + self._timer() if begun else decisions

    def on_barrier(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a barrier taken from a channel; an unaligned one comes from a blocked channel too."""
        self._check_readable(position, in_line=not barrier.options.unaligned)
        decisions, begun = self._begin_if_newer(barrier)
        if barrier.checkpoint_id != self._current or position not in self._waiting:
            # obsolete: completed, aborted, or superseded by a newer one; or a duplicate
            return decisions
        if self._first_barrier_ms is None:
            self._first_barrier_ms = now_ms
        self._waiting.remove(position)
        if self._collecting:
            return decisions + self._finish_if_collected(now_ms)
        if barrier.options.unaligned:
            return decisions + self._switch(now_ms)
        if not self._waiting:
            return decisions + self._complete(now_ms)
        if self._overdue(barrier, now_ms):
            return decisions + self._switch(now_ms)
        self._blocked.add(position)
        decisions.append(BlockChannel(position))
        return decisions + self._timer() if begun else decisions

    def on_timer(self, now_ms: int) -> list[AlignmentDecision]:
        """Check whether the pending checkpoint is old enough by now to overtake."""
        if self._barrier is None or self._collecting or _deadline_ms(self._barrier) is None:
            return []
        return self._switch(now_ms) if self._overdue(self._barrier, now_ms) else self._timer()

    def on_cancel(
        self, position: ChannelPosition, checkpoint_id: CheckpointId
    ) -> list[AlignmentDecision]:
        """Handle a cancel marker read from a channel: its sender will send no such barrier."""
        self._check_readable(position, in_line=True)
        if checkpoint_id < self._current:
            return []
        if checkpoint_id == self._current:
            return self._give_up(CheckpointFailure.CANCEL_MARKER)
        decisions = self._give_up(CheckpointFailure.SUBSUMED)
        self._advance(checkpoint_id)
        return [
            *decisions,
            AbortCheckpoint(checkpoint_id, CheckpointFailure.CANCEL_MARKER),
            ForwardCancel(checkpoint_id),
        ]

    def on_end_of_partition(
        self, position: ChannelPosition, now_ms: int
    ) -> list[AlignmentDecision]:
        """Handle a channel that closed normally: its barrier is no longer missing."""
        self._check_readable(position, in_line=True)
        self._open.discard(position)
        self._waiting.discard(position)
        if self._collecting:
            return self._finish_if_collected(now_ms)
        return self._complete(now_ms) if self.pending and not self._waiting else []

    def on_abort_notice(self, checkpoint_id: CheckpointId) -> list[AlignmentDecision]:
        """Handle an abort by the coordinator: its barriers are no longer waited for."""
        if checkpoint_id > self._current:
            self._notices.add(checkpoint_id)
            return []
        if checkpoint_id < self._current or self._barrier is None:
            return []
        decisions = self._give_up(CheckpointFailure.SUBSUMED)
        return [item for item in decisions if not isinstance(item, AbortCheckpoint)]

    # -- transitions --------------------------------------------------------------------------------

    def _begin_if_newer(self, barrier: CheckpointBarrier) -> tuple[list[AlignmentDecision], bool]:
        """Begin a checkpoint not heard of before; return False if it is none, or is over already."""
        checkpoint_id = CheckpointId(barrier.checkpoint_id)
        if checkpoint_id <= self._current:
            return [], False
        decisions = self._give_up(CheckpointFailure.SUBSUMED)
        aborted = checkpoint_id in self._notices
        self._advance(checkpoint_id)
        if aborted:
            return [*decisions, ForwardCancel(checkpoint_id)], False
        self._barrier = barrier
        self._waiting = set(self._open)
        self._first_barrier_ms = None
        return decisions, True

    def _advance(self, checkpoint_id: CheckpointId) -> None:
        self._current = checkpoint_id
        self._notices.forget_to(checkpoint_id)

    def _switch(self, now_ms: int) -> list[AlignmentDecision]:
        """Cut the state now, and capture the records that the missing barriers overtake."""
        assert self._barrier is not None
        self._collecting = True
        return [
            StartCapture(self._current),
            self._snapshot(self._barrier.overtaking(), now_ms),
            *self._unblock(),
            *self._finish_if_collected(now_ms),
        ]

    def _complete(self, now_ms: int) -> list[AlignmentDecision]:
        """Snapshot an aligned checkpoint: all barriers were read in line."""
        assert self._barrier is not None
        snapshot = self._snapshot(self._barrier, now_ms)
        self._barrier = None
        return [snapshot, *self._unblock()]

    def _finish_if_collected(self, now_ms: int) -> list[AlignmentDecision]:
        if self._waiting:
            return []
        self._barrier = None
        self._collecting = False
        return [FinishCapture(self._current, self._aligned_for_ms(now_ms))]

    def _give_up(self, reason: CheckpointFailure) -> list[AlignmentDecision]:
        """Abort the pending checkpoint, if there is one."""
        if self._barrier is None:
            return []
        was_collecting, self._collecting = self._collecting, False
        self._barrier = None
        self._waiting.clear()
        if was_collecting:
            return [DropCapture(self._current), AbortCheckpoint(self._current, reason)]
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

    # -- times --------------------------------------------------------------------------------------

    def _overdue(self, barrier: CheckpointBarrier, now_ms: int) -> bool:
        deadline_ms = _deadline_ms(barrier)
        return barrier.options.unaligned or (deadline_ms is not None and now_ms >= deadline_ms)

    def _timer(self) -> list[AlignmentDecision]:
        deadline_ms = None if self._barrier is None else _deadline_ms(self._barrier)
        return [] if deadline_ms is None else [StartTimer(deadline_ms)]

    def _snapshot(self, barrier: CheckpointBarrier, now_ms: int) -> TriggerSnapshot:
        alignment_ms = self._aligned_for_ms(now_ms)
        start_delay_ms = max(0, now_ms - alignment_ms - barrier.trigger_ms)
        return TriggerSnapshot(barrier, alignment_ms, start_delay_ms)

    def _aligned_for_ms(self, now_ms: int) -> int:
        """Return the time since the first barrier, for which an earlier switch stands in."""
        if self._first_barrier_ms is None:
            self._first_barrier_ms = now_ms
        return max(0, now_ms - self._first_barrier_ms)

    # -- checks -------------------------------------------------------------------------------------

    def _check_readable(self, position: ChannelPosition, *, in_line: bool) -> None:
        check(
            position in self._open and not (in_line and position in self._blocked),
            "an element was read from a channel that is closed or blocked",
            position=position,
            current=self._current,
        )

    def validate(self) -> None:
        """Check all invariants; for tests."""
        under_way = self._barrier is not None
        check(
            under_way == bool(self._waiting),
            "in progress without a missing barrier, or the reverse",
        )
        check(under_way or not self._collecting, "a capture of nothing")
        check(not self._waiting & self._blocked, "a channel both waited for and blocked")
        check(self._waiting <= self._open, "a closed channel is waited for")
        if self.pending:
            check(self._waiting | self._blocked == self._open, "an open channel is unaccounted for")
        else:
            check(not self._blocked, "blocked channels without an alignment")


def _deadline_ms(barrier: CheckpointBarrier) -> int | None:
    """Return when the barrier starts to overtake; None: it stays in line."""
    timeout_ms = barrier.options.aligned_timeout_ms
    return None if timeout_ms is None else barrier.trigger_ms + timeout_ms
