"""How far an event-time step had come at a checkpoint, to say it again after a restore.

A barrier may overtake the last watermark, and the watermark may be due only behind the barrier. Where no
record comes any more for a while, nobody would send it again: windows would stay open. So each subtask
notes what it had sent, and where its splits were. It is only a note: a step that has none, or cannot be
sure that it is its own, waits for records as if it had just begun, and one that no step wants is dropped.
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
    """The note of one subtask.

    Attributes:
        of: what the step reads; names that were not given by the user may mean another step tomorrow.
        subtask: its index.
        parallelism: of the step.
        sent: the last watermark, or the one that was due, ms.
        idle: nobody waited for this subtask.
        splits: the watermark of each split being read, ms.
        due: the watermark of each split being read that its records allow and that was not announced, ms.
            Only of data at rest: there the next watermark has its fixed place.
        rows: how many rows of data at rest were read since the last such place.
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
        """As state that every subtask gets back."""
        return ItemsCut([msgspec.msgpack.encode(self)], "union")


@final
class Floor(msgspec.Struct, frozen=True):
    """Where a subtask begins after a restore.

    Attributes:
        watermark: no record that is to come can hold it further back.
        splits: the same of splits that were being read.
        due: see `Reached`.
        rows: see `Reached`.
    """

    watermark: int = WATERMARK_MIN
    splits: Mapping[str, int] = {}
    due: Mapping[str, int] = {}
    rows: int = 0


def declared() -> Sequence[StateInfo]:
    """For `Operator.states`."""
    return (state_info(STATE, HINT),)


def restored(state: RestoredState, of: str, subtask: int, parallelism: int) -> Floor:
    """What is known for a subtask.

    At another parallelism splits may have moved: all go by the slowest that was waited for, or, if none
    was, by the furthest, as in the valve. What is behind the step went by that as well.
    """
    notes = [msgspec.msgpack.decode(i, type=Reached) for i in state.items.get(STATE, ())]
    notes = [note for note in notes if note.of == of and note.sent != WATERMARK_MAX]
    own = [n for n in notes if (n.subtask, n.parallelism) == (subtask, parallelism)]
    if own:
        return Floor(own[0].sent, own[0].splits, own[0].due, own[0].rows)
    if not notes or any(note.parallelism == parallelism for note in notes):
        return Floor()  # this one had ended
    active = [note.sent for note in notes if not note.idle]
    watermark = min(active) if active else max(note.sent for note in notes)
    splits = _least(note.splits for note in notes)
    if WHOLE in splits:
        splits[WHOLE] = watermark
    due = _least(note.due for note in notes)
    due.pop(WHOLE, None)  # its records went to several subtasks
    return Floor(watermark, splits, due)


def _least(maps: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """By split; one of the same name may be in several subtasks."""
    found: dict[str, int] = {}
    for splits in maps:
        for split, watermark in splits.items():
            found[split] = min(watermark, found.get(split, watermark))
    return found
