"""Sessions with a gap of all, of each record, and by a function."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from golden_input import ARRIVALS, MINUTE, STREAM, Order, row, to_time

import headgate as hg

Session = tuple[int, int, list[Order]]
Gap = Callable[[Order], int]


def sessions(gap: Gap) -> tuple[dict[str, list[Session]], list[Order]]:
    """The sessions of each key in the order of their ends, and the records that come too late."""
    ended: dict[str, list[Session]] = {}
    late: list[Order] = []
    open_: dict[str, list[Session]] = {}
    arrivals = iter(ARRIVALS)
    for portion in STREAM:
        for _ in portion.orders:
            each = next(arrivals)
            order = each.record
            there = open_.setdefault(order.ad, [])
            start, end, held = order.ms, order.ms + gap(order), [order]
            met = [one for one in there if one[0] <= end and start <= one[1]]
            if not met and each.watermark is not None and end - 1 <= each.watermark:
                late.append(order)
                continue
            for one in met:
                there.remove(one)
                start, end, held = min(start, one[0]), max(end, one[1]), one[2] + held
            there.append((start, end, held))
        last = portion is STREAM[-1]
        for ad, there in open_.items():
            over = [one for one in there if last or one[1] - 1 <= portion.watermark]
            ended.setdefault(ad, []).extend(sorted(over, key=lambda one: one[1]))
            open_[ad] = [one for one in there if one not in over]
    return ended, late


def seven_minutes(order: Order) -> int:
    return 7 * MINUTE


def by_amount(order: Order) -> int:
    return (order.amount + 3) * MINUTE


def patience(order: Order) -> timedelta:
    return timedelta(minutes=order.amount + 3)


def larger(left: Order, right: Order) -> Order:
    return left if (left.amount, left.id) >= (right.amount, right.id) else right


GAPS = {
    "static": ("7m", "7m", seven_minutes),
    "dynamic": ("(amount + 3) * 60000", "(amount + 3) * 60000", by_amount),
}


@pytest.mark.parametrize(("text", "made", "gap"), GAPS.values(), ids=GAPS)
def test_sessions_of_columns(golden: Any, text: str, made: str, gap: Gap) -> None:
    ended, late = sessions(gap)
    assert max(len(held) for found in ended.values() for _, _, held in found) > 2
    golden(
        f'x: {{from: orders, keyBy: ad, window: {{session: "{text}"}}, '
        "aggregate: {n: count(), s: sum(amount)}}",
        lambda orders, rates: (
            orders.key_by("ad")
            .window(hg.session(made))
            .agg(n=hg.count(), s=hg.sum("amount"), name="x")
        ),
        rows=[
            (ad, to_time(start), to_time(end), len(held), sum(order.amount for order in held))
            for ad, found in ended.items()
            for start, end, held in found
        ],
        sides={"late": [row(order) for order in late]},
        ordered=True,
    )


def test_sessions_by_a_function(golden: Any) -> None:
    ended, late = sessions(by_amount)
    golden(
        'x: {from: orders, keyBy: ad, window: {session: "HERE:patience"}, reduce: "HERE:larger"}',
        lambda orders, rates: (
            orders.key_by("ad").window(hg.session(patience)).reduce(larger, name="x")
        ),
        rows=[
            row(max(held, key=lambda order: (order.amount, order.id)))
            for found in ended.values()
            for _, _, held in found
        ],
        sides={"late": [row(order) for order in late]},
    )
