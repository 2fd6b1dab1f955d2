"""The base of all barrier handlers: facts about one subtask's channels in, decisions out."""

from __future__ import annotations

from typing import Protocol

from ...operators.elements import CheckpointBarrier
from .alignment_decisions import AlignmentDecision
from .ids import ChannelPosition, CheckpointId


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
