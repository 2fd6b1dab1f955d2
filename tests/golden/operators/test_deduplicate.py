"""The first record of each key."""

from __future__ import annotations

from typing import Any

from golden_input import ORDERS, Order, row


def by_ad(order: Order) -> str:
    return order.ad


def firsts() -> list[Any]:
    seen: dict[str, Order] = {}
    for order in ORDERS:
        seen.setdefault(order.ad, order)
    return [row(order) for order in seen.values()]


def test_deduplicate_by_columns(golden: Any) -> None:
    golden(
        "x: {from: orders, keyBy: ad, deduplicate: {}}",
        lambda orders, rates: orders.key_by("ad").deduplicate(name="x"),
        rows=firsts(),
    )


def test_deduplicate_by_a_function(golden: Any) -> None:
    golden(
        'x: {from: orders, keyWith: "HERE:by_ad", deduplicate: {ttl: 1d}}',
        lambda orders, rates: orders.key_with(by_ad).deduplicate(name="x", ttl="1d"),
        rows=firsts(),
    )
