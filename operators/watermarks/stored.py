"""The progress of an event-time step at a checkpoint.

A barrier may overtake the last watermark, or the watermark may be due only after the barrier. If no
further record comes for a while, it would never be sent again, and windows would stay open. So each
subtask records the watermark it announced, and those of its splits. It is only a hint: a step that
has none, or cannot be sure that it is its own, waits for records as if it had just begun, and a hint
that no step wants is dropped.

A step that follows the clock while its input is silent also stores how far it had come, in order to
continue from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, final

import msgspec

from ...state.snapshot import HINT, ItemsCut, RestoredState, StateInfo, state_info
from ..elements import WATERMARK_MAX, WATERMARK_MIN
from ..splits import WHOLE

ANNOUNCED: Final = "reached"
"""The state with the records of `Announced`."""
CLOCK: Final = "watermark"
"""The state of steps that follow the clock."""


@final
class Announced(msgspec.Struct, frozen=True):
    """The watermarks that one subtask had announced at a checkpoint.

    Attributes:
        of: the input of the step; a name not given by the user may mean another step after a
            change.
        subtask: its index.
        parallelism: of the step.
        sent: the last watermark, or the one that was due, ms.
        idle: the subtask was idle.
        splits: the watermark of each split being read, ms.
        due: the watermark of each split being read that its records allow and that was not
            announced, ms. Only for data at rest, where the next watermark has a fixed place.
        rows: the rows of data at rest read since the last such place.
    """

    of: str
    subtask: int
    parallelism: int
    sent: int
    idle: bool
    splits: dict[str, int]
    due: dict[str, int] = {}
    rows: int = 0

    def cut(self) -> ItemsCut:
        """Return it as state that every subtask gets back."""
        return ItemsCut([msgspec.msgpack.encode(self)], "union")


@final
class Floor(msgspec.Struct, frozen=True):
    """The starting point of a subtask after a restore.

    Attributes:
        watermark: no record to come can hold it further back.
        splits: the watermarks of splits that were being read.
        due: see `Announced`.
        rows: see `Announced`.
    """

    watermark: int = WATERMARK_MIN
    splits: Mapping[str, int] = {}
    due: Mapping[str, int] = {}
    rows: int = 0


def announced_info() -> StateInfo:
    """Return the declaration of the records of `Announced`."""
    return state_info(ANNOUNCED, HINT)


def restored_floor(state: RestoredState, of: str, subtask: int, parallelism: int) -> Floor:
    """Return the starting point of a restored subtask.

    At another parallelism splits may have moved: all subtasks start from the slowest active one,
    or, if all were idle, from the furthest, as in the valve. So did the steps downstream.
    """
    notes = [msgspec.msgpack.decode(i, type=Announced) for i in state.items.get(ANNOUNCED, ())]
    notes = [note for note in notes if note.of == of and note.sent != WATERMARK_MAX]
    own = [n for n in notes if (n.subtask, n.parallelism) == (subtask, parallelism)]
    if own:
        return Floor(own[0].sent, own[0].splits, own[0].due, own[0].rows)
    if not notes or any(note.parallelism == parallelism for note in notes):
        return Floor()  # this subtask had ended
    active = [note.sent for note in notes if not note.idle]
    watermark = min(active) if active else max(note.sent for note in notes)
    splits = _least(note.splits for note in notes)
    if WHOLE in splits:
        splits[WHOLE] = watermark
    due = _least(note.due for note in notes)
    due.pop(WHOLE, None)  # its records went to several subtasks
    return Floor(watermark, splits, due)


def _least(maps: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the least watermark by split; several subtasks may have one of the same name."""
    found: dict[str, int] = {}
    for splits in maps:
        for split, watermark in splits.items():
            found[split] = min(watermark, found.get(split, watermark))
    return found


@final
class ClockState(msgspec.Struct, frozen=True):
    """The progress of one subtask that follows the clock, at a checkpoint.

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


def clock_info() -> StateInfo:
    """Return the declaration of the states of `ClockState`."""
    return state_info(CLOCK, "union")


def restored_clock(state: RestoredState) -> ClockState:
    """Merge what all subtasks had reached: the assignment of splits may have changed.

    As in the valve, the slowest active subtask decides; if all were idle, the furthest.
    """
    items = [msgspec.msgpack.decode(i, type=ClockState) for i in state.items.get(CLOCK, ())]
    unended = [each for each in items if each.sent != WATERMARK_MAX]
    active = [each for each in unended if not each.idle]
    if active:
        return min(active, key=lambda each: each.sent)
    return max(unended, key=lambda each: each.sent, default=ClockState())
