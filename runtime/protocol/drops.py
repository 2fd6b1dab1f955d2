"""The ledger of what a job has dropped: totals over its subtasks, and which are due to be announced.

Subtasks count from 0 in each attempt. What an attempt had dropped stays in the totals when it is over, so
that nothing is forgotten; records that are read again after a failure, and dropped again, count again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, final

import msgspec

REMIND_MS: Final = 60_000
"""A step that goes on dropping records of one kind is announced again after this time."""

_Subtask = tuple[int, int]
_Key = tuple[str, str]


@final
class Dropped(msgspec.Struct, frozen=True):
    """What one step has dropped.

    Attributes:
        step: its name.
        kind: why: `late`, `unreadable`, `failed`, `timed_out`, `unread`, `timers`, `open_windows` or
            `feedback`.
        count: how many records (or timers), in all subtasks.
    """

    step: str
    kind: str
    count: int


@final
class DropLedger:
    """Counts what the steps of a job have dropped since its coordinator began."""

    def __init__(self) -> None:
        self._earlier: Counter[_Key] = Counter()
        """By attempts that are over."""
        self._now: dict[_Subtask, tuple[Dropped, ...]] = {}
        self._announced: dict[_Key, tuple[int, int]] = {}
        """By step and kind: how many there were, and when that was, in ms."""

    def report(self, vertex: int, index: int, dropped: Iterable[Dropped]) -> None:
        """Take in what a subtask has dropped since its attempt began."""
        self._now[vertex, index] = tuple(dropped)

    def attempt_over(self, subtasks: Iterable[_Subtask] | None = None) -> None:
        """These subtasks begin to count from 0; None: all of them do."""
        for subtask in list(self._now) if subtasks is None else subtasks:
            for each in self._now.pop(subtask, ()):
                self._earlier[each.step, each.kind] += each.count

    @property
    def totals(self) -> tuple[Dropped, ...]:
        """By step and kind, in the order of their names."""
        found = Counter(self._earlier)
        for subtask in self._now.values():
            for each in subtask:
                found[each.step, each.kind] += each.count
        return tuple(Dropped(*key, count) for key, count in sorted(found.items()) if count)

    def due(self, now_ms: int, *, at_the_end: bool = False) -> list[Dropped]:
        """What is to be announced now: the first of a kind of a step at once, more of it after a while.

        Args:
            now_ms: on any clock that does not go back.
            at_the_end: whatever is new is due, since nothing follows.
        """
        found = []
        for each in self.totals:
            count, at_ms = self._announced.get((each.step, each.kind), (0, 0))
            rests = count and not at_the_end and now_ms - at_ms < REMIND_MS
            if each.count > count and not rests:
                self._announced[each.step, each.kind] = each.count, now_ms
                found.append(each)
        return found
