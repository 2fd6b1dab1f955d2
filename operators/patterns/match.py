"""The user's view of matches, complete and partial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Match(Generic[T]):
    """The records of a match, or of a partial match that timed out.

    Attributes:
        key: of all its records.
        records: the records that each stage took, in order of event time; empty for optional stages
            that took none. Stages that must not come are left out.
        start: event time of the first record, ms since 1970 UTC.
        end: event time of the last record, ms.
    """

    key: Any
    records: dict[str, list[T]]
    start: int
    end: int

    def __getitem__(self, stage: str) -> list[T]:
        """Return the records that a stage took.

        Raises:
            KeyError: no stage has this name.
        """
        return self.records[stage]


class Earlier(Generic[T]):
    """The records that a match took before the current one: the second argument of a condition.

    Attributes:
        timestamp: event time of the current record, ms since 1970 UTC.
    """

    __slots__ = ("_load", "_records", "timestamp")

    def __init__(self, load: Callable[[], dict[str, list[T]]], timestamp: int) -> None:
        self._load = load
        self._records: dict[str, list[T]] | None = None
        self.timestamp = timestamp

    def __getitem__(self, stage: str) -> list[T]:
        """Return the records that a stage has taken so far, in order.

        Raises:
            KeyError: no stage has this name.
        """
        if self._records is None:
            self._records = self._load()
        return self._records[stage]
