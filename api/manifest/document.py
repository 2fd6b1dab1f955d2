"""A parsed manifest: values that know their line, and the list of problems found in them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ...errors import HeadgateError, ManifestErrors, UsageError


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value.

    Attributes:
        text: as written, after substitution of `${ENV}`.
        value: the text as YAML understands it.
        substituted: a variable was substituted; `value` may then have an unintended type.
        broken: a problem was already reported for it.
    """

    line: int
    text: str
    value: str | int | float | bool | None
    substituted: bool = False
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in a mapping, and the line of its key."""

    line: int
    value: Value


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys and values, in the order of the file."""

    line: int
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    line: int
    items: tuple[Value, ...]


Value: TypeAlias = Scalar | Mapping | Sequence


def size_of(value: Value) -> int:
    """Return the number of values with aliases expanded; each value is visited once."""
    known: dict[int, int] = {}

    def size(part: Value) -> int:
        if id(part) not in known:
            match part:
                case Mapping():
                    inside = [entry.value for entry in part.entries.values()]
                case Sequence():
                    inside = list(part.items)
                case Scalar():
                    inside = []
            known[id(part)] = 1 + sum(map(size, inside))
        return known[id(part)]

    return size(value)


def kind_of(value: Value) -> str:
    """Describe a value for an error message."""
    match value:
        case Mapping() if not value.entries:
            return "an empty mapping"
        case Mapping():
            return "a mapping"
        case Sequence(items=()):
            return "an empty list"
        case Sequence():
            return "a list"
        case Scalar(value=bool()):
            return f"the boolean `{value.text}`"
        case Scalar(value=int() | float()):
            return f"the number `{value.text}`"
        case Scalar(value=None):
            return "nothing"
        case _:
            return f"the text `{value.text}`"


@dataclass(slots=True)
class Problems:
    """Collects problems, so that all of them can be reported at once."""

    file: str
    field: str = "the manifest"
    """The name of the field being read, for messages."""
    found: list[tuple[int, HeadgateError]] = dataclasses.field(default_factory=list)

    def where(self, line: int) -> str:
        """Return the printed form of `line`, as a place."""
        return f"{self.file}:{line}"

    def add(self, line: int, message: str, fix: str = "") -> None:
        """Report a problem at `line`; reporting the same one again has no effect."""
        problem = UsageError(message, where=self.where(line), fix=fix)
        if not any(at == line and str(other) == str(problem) for at, other in self.found):
            self.found.append((line, problem))

    def raise_if_any(self) -> None:
        """Raise ManifestErrors with all problems, in the order of the file."""
        if self.found:
            raise ManifestErrors([problem for _, problem in sorted(self.found, key=_line)])


def _line(found: tuple[int, HeadgateError]) -> int:
    return found[0]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` was most likely meant to be."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None
