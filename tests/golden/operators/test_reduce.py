"""The running value of each key, for each record."""

from __future__ import annotations

from typing import Any

import msgspec
from golden_input import ORDERS, Order, row


def added(value: Order, order: Order) -> Order:
    """Add an order; the result depends on the order of arrival, since it is a history."""
    return msgspec.structs.replace(order, amount=value.amount * 3 % 1_000 + order.amount)


def by_ad(order: Order) -> str:
    return order.ad


def history() -> list[Any]:
    values: dict[str, Order] = {}
    rows = []
    for order in ORDERS:
        values[order.ad] = added(values[order.ad], order) if order.ad in values else order
        rows.append(values[order.ad])
    return [row(value) for value in rows]


def test_reduce_by_columns(golden: Any) -> None:
    golden(
        'x: {from: orders, keyBy: ad, reduce: "HERE:added"}',
        lambda orders, rates: orders.key_by("ad").reduce(added, name="x"),
        rows=history(),
    )


def test_reduce_by_a_function(golden: Any) -> None:
    golden(
        'x: {from: orders, keyWith: "HERE:by_ad", reduce: "HERE:added"}',
        lambda orders, rates: orders.key_with(by_ad).reduce(added, name="x"),
        rows=history(),
    )
