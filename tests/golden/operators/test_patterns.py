"""Patterns: what they find is what a loop over the records of a key finds, in the order of event time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
from golden_input import ARRIVALS, MINUTE, Order, row

import headgate as hg


class Found(msgspec.Struct, frozen=True):
    ad: str
    ids: list[int]


def found(match: hg.cep.Match[Order]) -> Found:
    return Found(match.key, ids_of(match)[1])


def ids_of(match: Any) -> Any:
    """Return the key and the records of a match; a late record as it is."""
    if not isinstance(match, hg.cep.Match):
        return match
    return match.key, [order.id for taken in match.records.values() for order in taken]


def in_event_time() -> dict[str, list[Order]]:
    keys: dict[str, list[Order]] = defaultdict(list)
    for each in sorted(ARRIVALS, key=lambda each: each.record.ms):
        if not each.behind:
            keys[each.record.ad].append(each.record)
    return keys


LATE = [row(each.record) for each in ARRIVALS if each.behind]
KEYS = in_event_time()

risen = (
    hg.cep.begin("low").where("amount < 3").followed_by("high").where("amount > 6").within("40m")
)


def test_a_sequence_in_time(golden: Any) -> None:
    rows, timed_out = [], []
    for ad, orders in KEYS.items():
        for at, low in enumerate(orders):
            if low.amount < 3:
                high = next((order for order in orders[at:] if order.amount > 6), None)
                in_time = high is not None and high.ms - low.ms < 40 * MINUTE
                (rows if in_time else timed_out).append((ad, [low, high] if in_time else [low]))
    golden(
        'x: {from: orders, keyBy: ad, match: {pattern: "HERE:risen", select: "HERE:found"}, '
        'into: "HERE:Found"}',
        lambda orders, rates: orders.key_by("ad").match(risen, select=found, into=Found, name="x"),
        rows=[(ad, [order.id for order in held]) for ad, held in rows],
        sides={
            "timed_out": [(ad, [order.id for order in held]) for ad, held in timed_out],
            "late": LATE,
        },
        of_side=ids_of,
    )


def rises(order: Order, earlier: hg.cep.Earlier[Order]) -> bool:
    """Conditions may look at what was taken before."""
    taken = earlier["rising"]
    return not taken or order.amount > taken[-1].amount


rising = (
    hg.cep.begin("rising", after_match=hg.cep.skip_past_last_event())
    .where(rises)
    .times(3)
    .consecutive()
    .within("2h")
)


def test_a_row_of_three_without_overlaps(golden: Any) -> None:
    rows = []
    for ad, orders in KEYS.items():
        at = 0
        while at + 3 <= len(orders):
            three = orders[at : at + 3]
            up = three[0].amount < three[1].amount < three[2].amount
            if up and three[2].ms - three[0].ms < 120 * MINUTE:
                rows.append((ad, [order.id for order in three]))
            at += 3 if up else 1
    golden(
        'x: {from: orders, keyBy: ad, match: {pattern: "HERE:rising", select: "HERE:found"}, '
        'into: "HERE:Found"}',
        lambda orders, rates: orders.key_by("ad").match(rising, select=found, into=Found, name="x"),
        rows=rows,
        ordered=True,
        sides={"late": LATE},
    )


alone = (
    hg.cep.begin("large")
    .where("amount > 8")
    .not_followed_by("small")
    .where("amount < 3")
    .within("25m")
)


def test_what_must_not_come(golden: Any) -> None:
    rows = [
        (ad, [large.id])
        for ad, orders in KEYS.items()
        for large in orders
        if large.amount > 8
        and not any(
            order.amount < 3 and large.ms < order.ms < large.ms + 25 * MINUTE for order in orders
        )
    ]
    golden(
        'x: {from: orders, keyBy: ad, match: {pattern: "HERE:alone", select: "HERE:found"}, '
        'into: "HERE:Found"}',
        lambda orders, rates: orders.key_by("ad").match(alone, select=found, into=Found, name="x"),
        rows=rows,
        ordered=True,
    )
