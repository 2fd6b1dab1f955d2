"""The check of whole numbers that a user gives as arguments."""

from __future__ import annotations

from ..errors import PlanError
from .origin import Origin


def check_whole_number(
    name: str, value: object, origin: Origin, *, least: int = 1, fix: str = ""
) -> int:
    """Return the argument called `name`, if it is a whole number of at least `least`.

    Raises:
        PlanError: it is not. True and False do not count as numbers.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(
            f"{name} must be a whole number of at least {least} value=`{value!r}`",
            where=str(origin),
            fix=fix,
        )
    return value
