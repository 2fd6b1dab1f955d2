"""The state of a step that follows the clock: windows must close after a restart, too, without records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

from ...state.snapshot import ItemsCut, RestoredState, StateInfo, state_info
from ..elements import WATERMARK_MAX, WATERMARK_MIN

STATE: Final = "watermark"


@final
class ClockState(msgspec.Struct, frozen=True):
    """The progress of one subtask at a checkpoint.

    Attributes:
        sent: the last watermark, ms.
        earned: the watermark from records alone, without the clock, ms.
        idle: the subtask was idle.
    """

    sent: int = WATERMARK_MIN
    earned: int = WATERMARK_MIN
    idle: bool = False

    def cut(self) -> ItemsCut:
        """Return it as state that every subtask gets back."""
        return ItemsCut([msgspec.msgpack.encode(self)], "union")


def declared() -> Sequence[StateInfo]:
    """Return the declarations for `Operator.states`."""
    return (state_info(STATE, "union"),)


def restored(state: RestoredState) -> ClockState:
    """Merge what all subtasks had reached: the assignment of splits may have changed.

    As in the valve, the slowest active subtask decides; if all were idle, the furthest.
    """
    items = [msgspec.msgpack.decode(i, type=ClockState) for i in state.items.get(STATE, ())]
    unended = [each for each in items if each.sent != WATERMARK_MAX]
    active = [each for each in unended if not each.idle]
    if active:
        return min(active, key=lambda each: each.sent)
    return max(unended, key=lambda each: each.sent, default=ClockState())
