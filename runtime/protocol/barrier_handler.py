"""The base of all barrier handlers: facts about one subtask's channels in, decisions out."""

from __future__ import annotations

from typing import Protocol

from ...operators.elements import CheckpointBarrier
from .alignment_decisions import AlignmentDecision
from .ids import ChannelPosition, CheckpointId


class BarrierHandler(Protocol):
    """Decides when the subtask takes its snapshots, and what waits for them.

    There are three: `AlignedBarrierHandler`, `AlternatingBarrierHandler` (aligned, and unaligned after a
    while or at once) and `AtLeastOnceTracker`. Decisions are to be carried out in order, before anything
    else is read. `now_ms` is the subtask's clock; the trigger's time is the coordinator's.
    """

    @property
    def pending(self) -> bool:
        """True while a snapshot waits for barriers that are to be read in line, behind records."""
        ...

    def on_announced(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """A barrier that may overtake arrived in a channel's queue, where it stays for now."""
        ...

    def on_barrier(
        self, position: ChannelPosition, barrier: CheckpointBarrier, now_ms: int
    ) -> list[AlignmentDecision]:
        """A barrier was taken from a channel: in line, or ahead of the records in front of it."""
        ...

    def on_timer(self, now_ms: int) -> list[AlignmentDecision]:
        """A timer fired. Never wrong to call, also too early, or for a timer that was replaced."""
        ...

    def on_cancel(
        self, position: ChannelPosition, checkpoint_id: CheckpointId
    ) -> list[AlignmentDecision]:
        """A cancel marker was read from a channel: whoever sent it will send no such barrier."""
        ...

    def on_end_of_partition(
        self, position: ChannelPosition, now_ms: int
    ) -> list[AlignmentDecision]:
        """A channel closed in good order: nobody waits for it any more."""
        ...

    def on_abort_notice(self, checkpoint_id: CheckpointId) -> list[AlignmentDecision]:
        """The coordinator gave the checkpoint up; its barriers may be still to come, or be past."""
        ...

    def validate(self) -> None:
        """Check all invariants; for tests."""
        ...
