"""Schedules in the language of cron, such as `0 3 * * *`: their form, and when they were last due.

The library that reads them comes with the extra `k8s`. Only the operator acts on a schedule, and it has
that extra; elsewhere a schedule is left unchecked.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from ..errors import PlanError

FIELDS: Final = 5
"""Minute, hour, day of the month, month and day of the week. A sixth one, for seconds, is refused."""
_START: Final = datetime(2000, 1, 1, tzinfo=UTC)


def check_cron(schedule: str) -> None:
    """See whether a schedule is understood.

    Raises:
        PlanError: it is not, or there is no such time.
    """
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        return
    fix = "minute, hour, day of the month, month, day of the week: `30 3 * * MON`"
    if len(schedule.split()) != FIELDS:
        raise PlanError(f"a schedule has {FIELDS} fields schedule=`{schedule}`", fix=fix)
    try:
        found = next(CronSim(schedule, _START), None)
    except CronSimError as error:
        raise PlanError(
            f"{error} schedule=`{schedule}`", fix=f"{str(error).lower()}; {fix}"
        ) from None
    if found is None:
        raise PlanError(f"there is no such time schedule=`{schedule}`", fix=f"no such time; {fix}")


def last_due_ms(schedule: str, zone: str, now_ms: int, within_ms: int) -> int | None:
    """When a schedule was last due, in ms since 1970; None if not within the last `within_ms`.

    A time that does not exist, because the clocks of the zone go forward over it, is due when they have. A
    time that is there twice is due at the first of the two, unless the schedule is for every hour.
    """
    from cronsim import CronSim

    now = datetime.fromtimestamp(now_ms // 1000, ZoneInfo(zone))
    begin = (now.astimezone(UTC) - timedelta(milliseconds=within_ms)).astimezone(now.tzinfo)
    found = None
    for due in CronSim(schedule, begin):
        due_ms = int(due.timestamp()) * 1000
        if due_ms > now_ms:
            break
        found = due_ms
    return found
