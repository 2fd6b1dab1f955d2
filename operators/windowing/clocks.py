"""Which clock windows are of."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ...errors import PlanError
from ..durations import Duration, parse_duration

WindowTime: TypeAlias = Literal["event", "processing"]


def is_processing(time: object, allowed_lateness: Duration, *others: object) -> bool:
    """True if windows are of the machine's clock.

    Args:
        time: as the user gave it.
        allowed_lateness: likewise; there is none in processing time.
        others: options of event time, None if they were not given.

    Raises:
        PlanError: no such time, or options that it does not have.
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
