"""The progress of an event-time step at a checkpoint, so that it is announced again after a restore.

A barrier may overtake the last watermark, or the watermark may be due only after the barrier. If no
further record comes for a while, it would never be sent again, and windows would stay open. So each
subtask records the watermark it sent, and those of its splits. It is only a hint: a step that has
none, or cannot be sure that it is its own, waits for records as if it had just begun, and a hint
that no step wants is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

import msgspec

from ...state.snapshot import HINT, ItemsCut, RestoredState, StateInfo, state_info
from ..elements import WATERMARK_MAX, WATERMARK_MIN
from ..splits import WHOLE

STATE: Final = "reached"


@final
class Reached(msgspec.Struct, frozen=True):
    """The record of one subtask.

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
        due: see `Reached`.
        rows: see `Reached`.
    """

    watermark: int = WATERMARK_MIN
    splits: Mapping[str, int] = {}
    due: Mapping[str, int] = {}
    rows: int = 0


def declared() -> Sequence[StateInfo]:
    """Return the declarations for `Operator.states`."""
    return (state_info(STATE, HINT),)


def restored(state: RestoredState, of: str, subtask: int, parallelism: int) -> Floor:
    """Return the restored progress of a subtask.

    At another parallelism splits may have moved: all subtasks start from the slowest active one,
    or, if all were idle, from the furthest, as in the valve. So did the steps downstream.
    """
    notes = [msgspec.msgpack.decode(i, type=Reached) for i in state.items.get(STATE, ())]
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
