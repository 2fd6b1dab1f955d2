"""All built-in aggregates, running and in windows of each kind."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from golden_input import ARRIVALS, MINUTE, ORDERS, Order

import headgate as hg

Make = Callable[[list[Order]], Any]
"""Makes the expected value from orders in event time."""


def tips(orders: list[Order]) -> list[int]:
    return [order.tip for order in orders if order.tip is not None]


def amounts(orders: list[Order]) -> list[int]:
    return [order.amount for order in orders]


def median(orders: list[Order]) -> float | None:
    """Return the median as `quantile` defines it: the number with this many others before it."""
    found = sorted(tips(orders))
    return float(found[math.floor(0.5 * (len(found) - 1))]) if found else None


def variance(orders: list[Order]) -> float | None:
    return round(statistics.variance(amounts(orders)), 6) if len(orders) > 1 else None


def stddev(orders: list[Order]) -> float:
    return round(statistics.pstdev(amounts(orders)), 6)


AGGREGATES: dict[str, tuple[str, Any, Make]] = {
    "n": ("count()", hg.count(), len),
    "tipped": ("count(tip)", hg.count("tip"), lambda o: len(tips(o))),
    "total": ("sum(tip)", hg.sum("tip"), lambda o: sum(tips(o)) if tips(o) else None),
    "low": ("min(tip)", hg.min("tip"), lambda o: min(tips(o), default=None)),
    "high": ("max(tip)", hg.max("tip"), lambda o: max(tips(o), default=None)),
    "mean": ("avg(amount)", hg.avg("amount"), lambda o: round(statistics.mean(amounts(o)), 6)),
    "spread": ("variance(amount)", hg.variance("amount"), variance),
    "width": ("stddev_pop(amount)", hg.stddev("amount", population=True), stddev),
    "opening": ("first(amount)", hg.first("amount"), lambda o: o[0].amount),
    "closing": ("last(tip)", hg.last("tip"), lambda o: (tips(o) or [None])[-1]),
    "of_least": (
        "min_by(amount, by=id)",
        hg.min_by("amount", "id"),
        lambda o: min(o, key=lambda each: each.id).amount,
    ),
    "of_most": (
        "max_by(amount, by=id)",
        hg.max_by("amount", "id"),
        lambda o: max(o, key=lambda each: each.id).amount,
    ),
    "kinds": ("count_distinct(amount)", hg.count_distinct("amount"), lambda o: len({*amounts(o)})),
    "about": (
        "approx_count_distinct(amount)",
        hg.approx_count_distinct("amount"),
        lambda o: len({*amounts(o)}),
    ),
    "middle": ("quantile(tip, 0.5)", hg.quantile("tip", 0.5), median),
    "best": (
        "top_n(id, 3, by=id)",
        hg.top_n("id", 3, by="id"),
        lambda o: sorted((each.id for each in o), reverse=True)[:3],
    ),
    "each": ("collect(id, 500)", hg.collect("id", limit=500), lambda o: [each.id for each in o]),
}
TEXT = ", ".join(f'{name}: "{text}"' for name, (text, _, _) in AGGREGATES.items())
ROUNDED = ["ad", *(f"ROUND(middle) AS {name}" if name == "middle" else name for name in AGGREGATES)]
"""A quantile is right to one in a hundred; these are whole numbers below ten."""


def made_of(orders: list[Order]) -> tuple[Any, ...]:
    timely = sorted(orders, key=lambda order: order.ms)
    return tuple(make(timely) for _, _, make in AGGREGATES.values())


def aggregated(grouped: Any) -> Any:
    found = grouped.agg(**{name: made for name, (_, made, _) in AGGREGATES.items()}, name="made")
    return found.select(*ROUNDED, name="x")


def in_windows(size: int, every: int) -> list[Any]:
    windows: dict[Any, list[Order]] = defaultdict(list)
    for each in ARRIVALS:
        ms = each.record.ms
        for start in range(ms - ms % every, ms - size, -every):
            if each.watermark is None or start + size - 1 > each.watermark:
                windows[each.record.ad, start].append(each.record)
    return [(ad, *made_of(held)) for (ad, _), held in windows.items()]


def running() -> list[Any]:
    keys: dict[str, list[Order]] = defaultdict(list)
    for order in ORDERS:
        keys[order.ad].append(order)
    return [(ad, *made_of(held)) for ad, held in keys.items()]


OVER = {
    "running": ("", lambda keyed: keyed, running),
    "tumbling": (
        "window: {tumbling: 40m}, ",
        lambda keyed: keyed.window(hg.tumbling("40m")),
        lambda: in_windows(40 * MINUTE, 40 * MINUTE),
    ),
    "sliding": (
        "window: {sliding: 40m, every: 20m}, ",
        lambda keyed: keyed.window(hg.sliding("40m", "20m")),
        lambda: in_windows(40 * MINUTE, 20 * MINUTE),
    ),
    "session": (
        "window: {session: 20h}, ",
        lambda keyed: keyed.window(hg.session("20h")),
        running,
    ),
}


@pytest.mark.parametrize(("text", "grouped", "rows"), OVER.values(), ids=OVER)
def test_all_aggregates(golden: Any, text: str, grouped: Any, rows: Any) -> None:
    columns = ", ".join(f'"{column}"' for column in ROUNDED)
    golden(
        f"made: {{from: orders, keyBy: ad, {text}aggregate: {{{TEXT}}}}}\n"
        f"x: {{from: made, select: [{columns}]}}",
        lambda orders, rates: aggregated(grouped(orders.key_by("ad"))),
        rows=rows(),
        last_of=0 if text else 1,
    )
