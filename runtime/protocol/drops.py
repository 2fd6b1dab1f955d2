"""The ledger of a job's drops: totals over its subtasks, those due to be announced, and the last samples.

Subtasks count from 0 in each attempt. Drops of an attempt stay in the totals when it is over;
records that are read again after a failure, and dropped again, count again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final, NamedTuple, final

import msgspec

from ...operators.lost_records import LostRecord

REMIND_MS: Final = 60_000
"""A step that keeps dropping records of one kind is announced again after this time, ms."""

_Subtask = tuple[int, int]
_Key = tuple[str, str]


@final
class Dropped(msgspec.Struct, frozen=True):
    """The drops of one step, of one kind.

    Attributes:
        step: its name.
        kind: the reason: `late`, `unreadable`, `deleted`, `failed`, `timed_out`, `unread`, `timers`,
            `open_windows` or `feedback`.
        count: the number of records (or timers), in all subtasks.
    """

    step: str
    kind: str
    count: int


@final
class DropLedger:
    """Counts the drops of a job's steps since its coordinator began."""

    def __init__(self) -> None:
        self._earlier: Counter[_Key] = Counter()
        """The drops of attempts that are over."""
        self._now: dict[_Subtask, tuple[Dropped, ...]] = {}
        self._announced: dict[_Key, tuple[int, int]] = {}
        """The last announcement by step and kind: the count, and the time in ms."""

    def report(self, vertex: int, index: int, dropped: Iterable[Dropped]) -> None:
        """Take in a subtask's drops since its attempt began."""
        self._now[vertex, index] = tuple(dropped)

    def attempt_over(self, subtasks: Iterable[_Subtask] | None = None) -> None:
        """Reset the counts of these subtasks, which will count from 0; None: of all."""
        for subtask in list(self._now) if subtasks is None else subtasks:
            for each in self._now.pop(subtask, ()):
                self._earlier[each.step, each.kind] += each.count

    @property
    def totals(self) -> tuple[Dropped, ...]:
        """Return the totals by step and kind, in the order of their names."""
        found = Counter(self._earlier)
        for subtask in self._now.values():
            for each in subtask:
                found[each.step, each.kind] += each.count
        return tuple(Dropped(*key, count) for key, count in sorted(found.items()) if count)

    def due(self, now_ms: int, *, at_the_end: bool = False) -> list[Dropped]:
        """Return the drops to announce now: the first of a step and kind at once, more of it after a while.

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


class Found(NamedTuple):
    """A sample, with the subtask that dropped the record, and when the coordinator heard of it."""

    at_ms: int
    subtask: int
    record: LostRecord


@final
class LostRecords:
    """Keeps the newest samples of each step and reason, in all attempts of a job."""

    def __init__(self, records_max: int) -> None:
        """`records_max`: samples that are kept for each step and reason."""
        self._records_max = records_max
        self._kept: dict[tuple[str, str], deque[Found]] = {}

    def report(self, at_ms: int, subtask: int, records: Iterable[LostRecord]) -> None:
        """Take in the samples of a subtask."""
        for record in records:
            place = record.step, record.kind
            kept = self._kept.setdefault(place, deque(maxlen=self._records_max))
            kept.append(Found(at_ms, subtask, record))

    def all(self) -> list[Found]:
        """Return all samples: by step and reason, and the newest of them first."""
        return [found for _, kept in sorted(self._kept.items()) for found in reversed(kept)]
