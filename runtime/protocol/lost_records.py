"""The last samples of the records that each step has dropped, by reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, final

from ...operators.lost_records import LostRecord


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
