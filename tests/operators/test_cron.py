"""Schedules in the language of cron: what is refused, and when they are due as clocks change."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest

from headgate.api.cron import check_cron, last_due_ms
from headgate.errors import PlanError

BERLIN = "Europe/Berlin"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("@daily", "5 fields"),
        ("0 3 * *", "5 fields"),
        ("0 0 3 * * *", "5 fields"),
        ("60 3 * * *", "Bad minute"),
        ("0 3 * * MONDAY", "Bad day-of-week"),
        ("0 3 31 2 *", "Bad day-of-month"),
        ("0 3 * 2 1#x", "Bad day-of-week"),
    ],
)
def test_mistakes(schedule: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as error:
        check_cron(schedule)
    assert "`30 3 * * MON`" in error.value.fix


@pytest.mark.parametrize("schedule", ["0 3 * * *", "*/5 * * * *", "0 0 1 JAN SUN", "0 0 29 2 *"])
def test_schedules(schedule: str) -> None:
    check_cron(schedule)


def test_a_schedule_is_not_checked_where_nothing_can_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    check_cron("nonsense")


def due(schedule: str, now: str, zone: str = BERLIN, within_ms: int = DAY_MS) -> str:
    """When it was last due, as the text of a time in UTC; empty: not within that time."""
    now_ms = int(datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp()) * 1000
    found = last_due_ms(schedule, zone, now_ms, within_ms)
    return "" if found is None else f"{datetime.fromtimestamp(found / 1000, UTC):%m-%d %H:%M}"


@pytest.mark.parametrize(
    ("schedule", "now", "said"),
    [
        ("0 3 * * *", "2026-01-15 02:00:00", "01-15 02:00"),
        ("0 3 * * *", "2026-01-15 01:59:59", "01-14 02:00"),
        ("0 3 * * *", "2026-07-15 02:00:00", "07-15 01:00"),
        ("*/7 * * * *", "2026-01-15 12:20:00", "01-15 12:14"),
        # On this day 02:30 does not exist, and 03:00 comes instead.
        ("30 2 * * *", "2026-03-29 00:59:00", "03-28 01:30"),
        ("30 2 * * *", "2026-03-29 01:10:00", "03-29 01:00"),
        # On this day 02:30 is there twice; the first one counts.
        ("30 2 * * *", "2026-10-25 00:40:00", "10-25 00:30"),
        ("30 2 * * *", "2026-10-25 01:40:00", "10-25 00:30"),
        ("30 * * * *", "2026-10-25 01:40:00", "10-25 01:30"),
    ],
)
def test_when_it_was_due(schedule: str, now: str, said: str) -> None:
    assert due(schedule, now) == said


def test_what_was_due_long_ago_is_left_out() -> None:
    assert due("0 3 * * *", "2026-01-15 03:00:00", within_ms=HOUR_MS - 60_000) == ""
    assert due("0 3 * * *", "2026-01-15 02:59:00", within_ms=HOUR_MS) == "01-15 02:00"
    assert due("0 3 1 * *", "2026-01-15 03:00:00") == ""
