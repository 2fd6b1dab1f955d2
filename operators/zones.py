"""Time zones by their names in the IANA database."""

from __future__ import annotations

from difflib import get_close_matches
from zoneinfo import ZoneInfo, available_timezones

from ..errors import PlanError


def check_zone(zone: str) -> None:
    """See whether there is such a zone.

    Raises:
        PlanError: there is not.
    """
    try:
        ZoneInfo(zone)
    except (ValueError, TypeError, OSError, KeyError) as error:
        near = get_close_matches(str(zone), available_timezones(), n=1)
        fix = f"did you mean `{near[0]}`?" if near else 'an IANA name such as "Europe/Berlin"'
        raise PlanError(f"unknown time zone `{zone}`", fix=fix) from error
