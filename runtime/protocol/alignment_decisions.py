"""The decisions of a barrier handler, as values: its subtask carries them out in order, at once.

`Block` to `ForwardCancel` are those of aligned barriers. `StartTimer` and the captures come with barriers
that overtake records: what was overtaken is *channel state*, a part of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

from ...operators.elements import CheckpointBarrier
from .failures import CheckpointFailure
from .ids import ChannelPosition, CheckpointId


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Read nothing more from this channel."""

    position: ChannelPosition


@final
@dataclass(frozen=True, slots=True)
class UnblockAll:
    """Read from all channels again: what was queued first comes first."""


@final
@dataclass(frozen=True, slots=True)
class TriggerSnapshot:
    """Pass the barrier on, and snapshot: all barriers are here, or a capture has just been started.

    Attributes:
        barrier: what to pass on; `options.unaligned` says that it is to overtake.
        alignment_ms: time from the first barrier to this snapshot.
        start_delay_ms: time from the trigger to the first barrier.
    """

    barrier: CheckpointBarrier
    alignment_ms: int
    start_delay_ms: int


@final
@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """This subtask will not take part in the checkpoint, or not to its end: decline it."""

    checkpoint_id: CheckpointId
    reason: CheckpointFailure


@final
@dataclass(frozen=True, slots=True)
class ForwardCancel:
    """Send a cancel marker to all outputs, or they would wait for our barrier for ever."""

    checkpoint_id: CheckpointId


@final
@dataclass(frozen=True, slots=True)
class StartTimer:
    """Call `on_timer` at this time or after it; replaces the timer before. None is ever stopped."""

    at_ms: int


@final
@dataclass(frozen=True, slots=True)
class StartCapture:
    """Records that the barriers of this checkpoint overtake are channel state from now on.

    Of a channel that still owes its barrier, and of one whose barrier has just overtaken: the records
    queued in front of the barrier; if it is not here yet, all that are queued and all that arrive until
    it does. Of a channel whose barrier was read in line: none. A barrier of this checkpoint that is
    queued, or arrives, is handed out before all records.
    """

    checkpoint_id: CheckpointId


@final
@dataclass(frozen=True, slots=True)
class FinishCapture:
    """No open channel owes its barrier any more: the channel state is complete.

    Attributes:
        alignment_ms: time from the first barrier to the last.
    """

    checkpoint_id: CheckpointId
    alignment_ms: int


@final
@dataclass(frozen=True, slots=True)
class DropCapture:
    """The checkpoint is given up behind its snapshot: forget its channel state, and the snapshot too."""

    checkpoint_id: CheckpointId


AlignmentDecision: TypeAlias = (
    Block
    | UnblockAll
    | TriggerSnapshot
    | AbortCheckpoint
    | ForwardCancel
    | StartTimer
    | StartCapture
    | FinishCapture
    | DropCapture
)
