"""Windows of columns: what is in them is counted by hand, record by record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from golden_input import ARRIVALS, MINUTE, ORDERS, Order, row, to_ms, to_time

import headgate as hg

HOUR = 60 * MINUTE
Bounds = tuple[int, int]
Assign = Callable[[int], Iterable[Bounds]]
AGGREGATES = "aggregate: {n: count(), s: sum(amount)}"


def agg(windowed: Any) -> Any:
    return windowed.agg(n=hg.count(), s=hg.sum("amount"), name="x")


def totals(orders: Iterable[Order]) -> tuple[int, int]:
    amounts = [order.amount for order in orders]
    return len(amounts), sum(amounts)


def totals_of(amounts: list[int]) -> tuple[int, int, int, int, float]:
    mean = round(sum(amounts) / len(amounts), 6)
    return len(amounts), sum(amounts), min(amounts), max(amounts), mean


def counted(assign: Assign, lateness: int = 0) -> tuple[list[Any], list[Any]]:
    """The totals of each key and window, and the records all whose windows were gone."""
    windows: dict[Any, list[Order]] = defaultdict(list)
    late = []
    for each in ARRIVALS:
        now = -(10**15) if each.watermark is None else each.watermark - lateness
        there = [bounds for bounds in assign(each.record.ms) if bounds[1] - 1 > now]
        for bounds in there:
            windows[each.record.ad, *bounds].append(each.record)
        if not there:
            late.append(row(each.record))
    rows = [
        (ad, to_time(start), to_time(end), *totals(held))
        for (ad, start, end), held in windows.items()
    ]
    return sorted(rows, key=lambda row: row[2]), late


def sliding(size: int, every: int, offset: int = 0) -> Assign:
    def assign(ms: int) -> list[Bounds]:
        last = ms - (ms - offset) % every
        return [(start, start + size) for start in range(last, ms - size, -every)]

    return assign


def cumulative(size: int, step: int) -> Assign:
    def assign(ms: int) -> list[Bounds]:
        start = ms - ms % size
        return [(start, end) for end in range(start + step, start + size + 1, step) if ms < end]

    return assign


def day_in_berlin(ms: int) -> list[Bounds]:
    """From one o'clock to one o'clock; the clocks go forward in the night at two."""
    berlin = ZoneInfo("Europe/Berlin")
    day = (to_time(ms).astimezone(berlin) - timedelta(hours=1)).date()
    start, end = (
        datetime(at.year, at.month, at.day, 1, tzinfo=berlin).astimezone(UTC)
        for at in (day, day + timedelta(days=1))
    )
    return [(to_ms(start), to_ms(end))]


HALF_HOURS = sliding(HOUR // 2, HOUR // 2)
OF_EVENT_TIME = {
    "tumbling": ("{tumbling: 30m}", lambda: hg.tumbling("30m"), HALF_HOURS),
    "sliding": (
        "{sliding: 20m, every: 8m, offset: 3m}",
        lambda: hg.sliding("20m", "8m", offset="3m"),
        sliding(20 * MINUTE, 8 * MINUTE, 3 * MINUTE),
    ),
    "cumulative": (
        "{cumulative: 1h, step: 10m}",
        lambda: hg.cumulative("1h", "10m"),
        cumulative(HOUR, 10 * MINUTE),
    ),
}


@pytest.mark.parametrize(("text", "made", "assign"), OF_EVENT_TIME.values(), ids=OF_EVENT_TIME)
def test_windows_of_event_time(golden: Any, text: str, made: Any, assign: Assign) -> None:
    rows, late = counted(assign)
    golden(
        f"x: {{from: orders, keyBy: ad, window: {text}, {AGGREGATES}}}",
        lambda orders, rates: agg(orders.key_by("ad").window(made())),
        rows=rows,
        sides={"late": late},
        ordered=True,
    )


@pytest.mark.parametrize(("text", "made", "assign"), OF_EVENT_TIME.values(), ids=OF_EVENT_TIME)
def test_windows_that_are_aggregated_in_front_of_the_exchange(
    golden: Any, text: str, made: Any, assign: Assign
) -> None:
    """Nothing reads late records, so subtasks send partial results to each other."""
    windows: dict[Any, list[int]] = defaultdict(list)
    for each in ARRIVALS:
        for start, end in assign(each.record.ms):
            if each.watermark is None or end - 1 > each.watermark:
                windows[each.record.ad, start, end].append(each.record.amount)
    golden(
        f"x: {{from: orders, keyBy: ad, window: {text}, aggregate: {{n: count(), s: sum(amount), "
        "low: min(amount), high: max(amount), mean: avg(amount)}}",
        lambda orders, rates: (
            orders.key_by("ad")
            .window(made())
            .agg(
                n=hg.count(),
                s=hg.sum("amount"),
                low=hg.min("amount"),
                high=hg.max("amount"),
                mean=hg.avg("amount"),
                name="x",
            )
        ),
        rows=[
            (ad, to_time(start), to_time(end), *totals_of(held))
            for (ad, start, end), held in windows.items()
        ],
    )


def test_days_of_a_time_zone(golden: Any) -> None:
    rows, late = counted(day_in_berlin)
    assert {row[2] - row[1] for row in rows} == {timedelta(hours=24), timedelta(hours=23)}
    golden(
        "x: {from: orders, keyBy: ad, window: {tumbling: 1d, zone: Europe/Berlin, offset: 1h}, "
        f"{AGGREGATES}}}",
        lambda orders, rates: agg(
            orders.key_by("ad").window(hg.tumbling("1d", zone="Europe/Berlin", offset="1h"))
        ),
        rows=rows,
        sides={"late": late},
        ordered=True,
    )


def test_windows_without_keys(golden: Any) -> None:
    windows: dict[int, list[Order]] = defaultdict(list)
    for each in ARRIVALS:
        ((_, end),) = HALF_HOURS(each.record.ms)
        if each.watermark is None or end - 1 > each.watermark:
            windows[end].append(each.record)
    golden(
        f"x: {{from: orders, window: {{tumbling: 30m}}, {AGGREGATES}}}",
        lambda orders, rates: agg(orders.window(hg.tumbling("30m"))),
        rows=[
            (to_time(end - HOUR // 2), to_time(end), *totals(held)) for end, held in windows.items()
        ],
    )


def test_allowed_lateness_gives_results_again(golden: Any) -> None:
    rows, late = counted(HALF_HOURS, lateness=100 * MINUTE)
    assert 0 < len(late) < len(counted(HALF_HOURS)[1])
    golden(
        "x: {from: orders, keyBy: ad, window: {tumbling: 30m, allowedLateness: 100m}, "
        f"{AGGREGATES}}}",
        lambda orders, rates: agg(
            orders.key_by("ad").window(hg.tumbling("30m", allowed_lateness="100m"))
        ),
        rows=rows,
        sides={"late": late},
        last_of=3,
    )


@pytest.mark.parametrize(("text", "given"), [("emitRows: 3", {"emit_rows": 3}),
                                             ("emitEvery: 500ms", {"emit_every": "500ms"})])  # fmt: skip
def test_early_results_come_to_the_same(golden: Any, text: str, given: Any) -> None:
    rows, late = counted(sliding(HOUR, HOUR))
    golden(
        f"x: {{from: orders, keyBy: ad, window: {{tumbling: 1h, {text}}}, {AGGREGATES}}}",
        lambda orders, rates: agg(orders.key_by("ad").window(hg.tumbling("1h", **given))),
        rows=rows,
        sides={"late": late},
        last_of=3,
    )


def by_ad() -> dict[str, list[Order]]:
    """All orders of each key, as they come."""
    found: dict[str, list[Order]] = defaultdict(list)
    for order in ORDERS:
        found[order.ad].append(order)
    return found


def test_count_windows(golden: Any) -> None:
    golden(
        f"x: {{from: orders, keyBy: ad, window: {{count: 5, every: 2}}, {AGGREGATES}}}",
        lambda orders, rates: agg(orders.key_by("ad").window(hg.count_window(5, 2))),
        rows=[
            (ad, *totals(orders[max(0, end - 5) : end]))
            for ad, orders in by_ad().items()
            for end in range(2, len(orders) + 1, 2)
        ],
        ordered=True,
    )


def test_global_windows(golden: Any) -> None:
    golden(
        f"x: {{from: orders, keyBy: ad, window: {{global: all}}, {AGGREGATES}}}",
        lambda orders, rates: agg(orders.key_by("ad").window(hg.global_window())),
        rows=[(ad, *totals(orders)) for ad, orders in by_ad().items()],
    )
