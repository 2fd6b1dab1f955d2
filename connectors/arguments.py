"""Checks of arguments that several connectors have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from numbers import Integral, Real
from typing import Final, Literal, TypeAlias

from ..errors import UsageError
from ..operators.sizes import parse_size
from ..operators.suggestions import suggest

OnLost: TypeAlias = Literal["fail", "skip"]
ON_LOST: Final[tuple[OnLost, ...]] = ("fail", "skip")
"""The policies of a source or a sink for records that it needs and that were deleted."""


def check_count(name: str, value: object, least: int) -> None:
    """Raise UsageError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"must be a whole number of at least {least} {name}=`{value!r}`")


def check_rate(rate: object, fix: str = "") -> None:
    """Raise UsageError unless `rate` is a number of records/s: above 0, and finite."""
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < float(rate) < math.inf:
        raise UsageError(f"the rate must be above 0 records/s, and finite rate=`{rate!r}`", fix=fix)


def check_choice(
    name: str, given: str, known: Sequence[str], what: str = "choice", several: str = "choices"
) -> None:
    """Raise UsageError unless `given` is one of the choices that there are."""
    if given not in known:
        raise UsageError(f"no such {what} {name}=`{given}`", fix=suggest(given, known, several))


def check_policy(name: str, given: str, known: Sequence[str]) -> None:
    """Raise UsageError unless `given` is one of the policies that there are."""
    check_choice(name, given, known, "policy", "policies")


def check_position(
    name: str,
    given: object,
    words: Sequence[str],
    others: str,
    *,
    place: str = "a stream",
    least: int | None = None,
) -> None:
    """Check where reading starts or stops: a word, a time, or a number.

    Args:
        name: of the argument.
        given: the argument.
        words: those that mean a position.
        others: the other forms of a position, for the error.
        place: has the positions, for the error.
        least: the lowest number; None: numbers are no positions.

    Raises:
        UsageError: it is no position.
    """
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise UsageError(
                f"the time has no time zone {name}=`{given}`", fix="datetime(..., tzinfo=UTC)"
            )
    elif least is not None and isinstance(given, int) and not isinstance(given, bool):
        check_count(name, given, least)
    elif given not in words:
        raise UsageError(
            f"not a position in {place} {name}=`{given}`",
            fix=f"one of {', '.join(words)}, {others}",
        )


def check_positions(
    start: object,
    stop: object,
    words: Sequence[str],
    others: str,
    *,
    least: int | None = None,
    least_stop: int | None = None,
) -> None:
    """Check where reading a stream starts and stops, as `check_position` does.

    Args:
        start: the argument of this name.
        stop: likewise; None: reading never stops.
        words: those that mean a start; a stop may be `latest`.
        others: the other forms of a position, for the error.
        least: the lowest number to start at; None: numbers are no positions.
        least_stop: the lowest number to stop at, likewise.

    Raises:
        UsageError: one of them is no position.
    """
    check_position("start", start, words, others, least=least)
    if stop is not None:
        check_position("stop", stop, ("latest",), others, least=least_stop)


def parse_time(name: str, text: str) -> datetime:
    """Return a time that is written as in ISO 8601; raise UsageError if it is not."""
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"not a time {name}=`{text}`: {error}", fix="2026-01-31T12:00:00Z"
        ) from None


def parse_bytes(name: str, given: str | int) -> int:
    """Return a number of bytes, at least 1, that is given as a number or as a size with a unit.

    Raises:
        UsageError: it is neither.
    """
    size_bytes = parse_size(given, name) if isinstance(given, str) else given
    check_count(name, size_bytes, 1)
    return size_bytes
