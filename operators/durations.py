"""Durations as users write them: "30s", "1h 30m", "200 ms", or a timedelta. Internally whole ms."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final, TypeAlias

from ..errors import UsageError
from .time_range import DURATION_MAX_MS

Duration: TypeAlias = str | timedelta

_UNIT_MS: Final[dict[str, int]] = {
    "ms": 1,
    "milli": 1,
    "millis": 1,
    "millisecond": 1,
    "milliseconds": 1,
    "s": 1_000,
    "sec": 1_000,
    "secs": 1_000,
    "second": 1_000,
    "seconds": 1_000,
    "m": 60_000,
    "min": 60_000,
    "mins": 60_000,
    "minute": 60_000,
    "minutes": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "hours": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "days": 86_400_000,
}
_PARTS: Final = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
_PART = re.compile(r"\s*(\d+)\s*([a-zA-Z]+)\s*")
_DIGITS_MAX: Final = 20
"""The digits of a number that are read: one with more digits is beyond `_COUNTABLE_MS`."""
_COUNTABLE_MS: Final = 2**63 - 1
_SHOWN_MAX: Final = 60
_FIX = 'write a number with a unit, such as "30s", "5m", "1h 30m" or "100ms"'


def parse_duration(
    value: object,
    what: str = "duration",
    where: str = "",
    longest_ms: int | None = DURATION_MAX_MS,
) -> int:
    """Return the milliseconds of a duration.

    `what` names the argument in the error, `where` the user's line.

    Raises:
        UsageError: not a duration, or longer than `longest_ms` (None: it may have any length). Bare
            numbers are refused, because their unit would be a guess.
    """
    milliseconds = _milliseconds(value, what, where)
    if milliseconds > (_COUNTABLE_MS if longest_ms is None else longest_ms):
        raise UsageError(
            f"{what} is too long value=`{str(value)[:_SHOWN_MAX]}`",
            where=where,
            fix=f"give at most {format_duration(longest_ms or DURATION_MAX_MS)}",
        )
    return milliseconds


def _milliseconds(value: object, what: str, where: str) -> int:
    if isinstance(value, timedelta):
        return _timedelta_ms(value, what, where)
    if isinstance(value, bool | int | float):
        raise UsageError(f"{what} needs a unit value=`{value}`", where=where, fix=_FIX)
    if not isinstance(value, str):
        raise UsageError(
            f"{what} is not a duration type=`{type(value).__name__}`", where=where, fix=_FIX
        )
    total, position, text = 0, 0, value
    while position < len(text):
        part = _PART.match(text, position)
        unit_ms = None if part is None else _UNIT_MS.get(part[2].lower())
        if part is None or unit_ms is None:
            break
        # Python refuses to read thousands of digits; that many are too long in any unit.
        total += int(part[1].lstrip("0")[:_DIGITS_MAX] or "0") * unit_ms
        position = part.end()
    if not text.strip() or position < len(text):
        if text.strip().isdigit():
            raise UsageError(f"{what} needs a unit value=`{value}`", where=where, fix=_FIX)
        raise UsageError(f"{what} is not a duration value=`{value}`", where=where, fix=_FIX)
    return total


def _timedelta_ms(value: timedelta, what: str, where: str) -> int:
    whole, rest = divmod(value, timedelta(milliseconds=1))
    if whole < 0:
        raise UsageError(f"{what} must not be negative value=`{value}`", where=where)
    if rest:
        raise UsageError(f"{what} is finer than a millisecond value=`{value}`", where=where)
    return whole


def format_duration(milliseconds: int) -> str:
    """Return the shortest text that `parse_duration` reads back: 5400000 is "1h 30m"."""
    if milliseconds <= 0:
        return "0s" if milliseconds == 0 else f"-{format_duration(-milliseconds)}"
    parts = []
    for unit, size in _PARTS:
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts)
