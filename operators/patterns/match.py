"""The user's view of matches, complete and partial, and the strategies that drop overlapping ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

Kind: TypeAlias = Literal["none", "next", "past_last", "first", "last"]
PATTERN: Final = r"no_skip|skip_to_next|skip_past_last_event|skip_to_(?:first|last)\([^()]+\)"
"""The texts that `parse_after_match` reads."""


@dataclass(frozen=True)
class AfterMatch:
    """A strategy that drops other matches once one is found; made by the functions of this module."""

    kind: Kind
    stage: str = ""

    def __str__(self) -> str:
        return {
            "none": "no_skip",
            "next": "skip_to_next",
            "past_last": "skip_past_last_event",
            "first": f"skip_to_first({self.stage})",
            "last": f"skip_to_last({self.stage})",
        }[self.kind]

    def first_to_keep(self, taken: Mapping[str, Sequence[int]]) -> int | None:
        """Return the first record at which another match may begin; None: any.

        Args:
            taken: the numbers of the match's records by stage, in order; later records have greater
                ones.
        """
        if self.kind in ("first", "last"):
            numbers = taken.get(self.stage)
            if not numbers:
                return None
            return numbers[0] if self.kind == "first" else numbers[-1]
        if self.kind == "none":
            return None
        numbers = [number for several in taken.values() for number in several]
        return 1 + (min(numbers) if self.kind == "next" else max(numbers))


def parse_after_match(text: str) -> AfterMatch:
    """Parse a strategy from its text, as `str` gives it and `PATTERN` matches it."""
    name, _, stage = text.removesuffix(")").partition("(")
    if stage:
        return {"skip_to_first": skip_to_first, "skip_to_last": skip_to_last}[name](stage)
    plain = (no_skip(), skip_to_next(), skip_past_last_event())
    return {str(strategy): strategy for strategy in plain}[name]


def no_skip() -> AfterMatch:
    """Keep every match."""
    return AfterMatch("none")


def skip_to_next() -> AfterMatch:
    """If several matches begin with one record, keep only the first to complete."""
    return AfterMatch("next")


def skip_past_last_event() -> AfterMatch:
    """Drop matches that begin with a record up to the last one of a match."""
    return AfterMatch("past_last")


def skip_to_first(stage: str) -> AfterMatch:
    """Drop matches that begin before the first record of a stage; if it took none, as `no_skip`."""
    return AfterMatch("first", stage)


def skip_to_last(stage: str) -> AfterMatch:
    """Drop matches that begin before the last record of a stage; if it took none, as `no_skip`."""
    return AfterMatch("last", stage)


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
