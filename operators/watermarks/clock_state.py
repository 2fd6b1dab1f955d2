"""What a step that follows the clock remembers: quiet windows must close after a restart, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

from ...state.snapshot import ItemsCut, RestoredState, StateInfo, state_info
from ..elements import WATERMARK_MAX, WATERMARK_MIN

STATE: Final = "watermark"


@final
class ClockState(msgspec.Struct, frozen=True):
    """How far one subtask was at a checkpoint.

    Attributes:
        sent: the last watermark, ms.
        earned: how far it would have been without the clock, ms.
        idle: nobody waited for this subtask.
    """

    sent: int = WATERMARK_MIN
    earned: int = WATERMARK_MIN
    idle: bool = False

    def cut(self) -> ItemsCut:
        """As state that every subtask gets back."""
        return ItemsCut([msgspec.msgpack.encode(self)], "union")


def declared() -> Sequence[StateInfo]:
    """For `Operator.states`."""
    return (state_info(STATE, "union"),)


def restored(state: RestoredState) -> ClockState:
    """What all subtasks together had reached: which splits are whose may have changed.

    As in the valve: the slowest that was waited for decides; the furthest if none was.
    """
    items = [msgspec.msgpack.decode(i, type=ClockState) for i in state.items.get(STATE, ())]
    unended = [each for each in items if each.sent != WATERMARK_MAX]
    active = [each for each in unended if not each.idle]
    if active:
        return min(active, key=lambda each: each.sent)
    return max(unended, key=lambda each: each.sent, default=ClockState())
