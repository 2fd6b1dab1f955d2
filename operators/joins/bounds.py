"""The bounds of an interval join: signed durations relative to the left row."""

from __future__ import annotations

from datetime import timedelta

from ...errors import PlanError
from ..durations import Duration, format_duration, parse_duration
from ..origin import Origin
from .interval import Interval

_FIX = 'such as within=("-10m", "0s"): the other row is up to ten minutes older'


def parse_interval(within: object, origin: Origin) -> Interval:
    """Parse the bounds given with `within=`.

    Raises:
        PlanError: not a pair, or the first is above the second.
        UsageError: a bound is no duration.
    """
    if not isinstance(within, tuple | list) or len(within) != 2:
        raise PlanError(
            f"within= needs a pair of durations value=`{within!r}`", where=str(origin), fix=_FIX
        )
    lower, upper = (_signed(bound, origin) for bound in within)
    if lower > upper:
        raise PlanError(
            f"within= ends before it begins value=`{within!r}`", where=str(origin), fix=_FIX
        )
    return Interval(lower, upper)


def show_interval(interval: Interval) -> str:
    """Format an interval, such as `-10m to 0s`."""
    return f"{format_duration(interval.lower_ms)} to {format_duration(interval.upper_ms)}"


def _signed(bound: Duration, origin: Origin) -> int:
    if isinstance(bound, timedelta) and bound < timedelta(0):
        return -parse_duration(-bound, "within", str(origin))
    if isinstance(bound, str) and bound.lstrip()[:1] in ("-", "+"):
        text = bound.lstrip()
        sign = -1 if text[0] == "-" else 1
        return sign * parse_duration(text[1:], "within", str(origin))
    return parse_duration(bound, "within", str(origin))
