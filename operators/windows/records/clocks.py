"""The clock that windows follow: event time or processing time."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ....errors import PlanError
from ...durations import Duration, parse_duration

WindowTime: TypeAlias = Literal["event", "processing"]


def is_processing(time: object, allowed_lateness: Duration, *others: object) -> bool:
    """Return True if the windows follow the machine's clock.

    Args:
        time: the value that the user gave.
        allowed_lateness: the value that the user gave; processing time has no lateness.
        others: options that exist in event time only, None where they were not given.

    Raises:
        PlanError: there is no such time, or it does not have these options.
    """
    if time not in ("event", "processing"):
        raise PlanError(f"the time of a window is event or processing value=`{time}`")
    if time == "event":
        return False
    late = parse_duration(allowed_lateness, "allowed lateness")
    if late or any(other is not None for other in others):
        raise PlanError(
            "windows in processing time have no lateness, zones and early results",
            fix="leave these options out; a trigger shows results early",
        )
    return True
