"""The running value of each key, for each record."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
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


def joined(value: tuple[Any, ...], pair: tuple[Any, ...]) -> tuple[Any, ...]:
    """Join two numbers; the result depends on the order of arrival, since it is a history."""
    return value[0], (value[1] * 3 + pair[1]) % 1_000


def histories(pairs: list[tuple[Any, ...]]) -> list[Any]:
    values: dict[Any, tuple[Any, ...]] = {}
    rows = []
    for pair in pairs:
        values[pair[0]] = joined(values[pair[0]], pair) if pair[0] in values else pair
        rows.append(values[pair[0]])
    return rows


def read(order: Order) -> tuple[Any, ...]:
    """The function only reads, so it is not called."""
    return order.amount, order.id


def made(order: Order) -> tuple[Any, ...]:
    return order.amount % 7, order.id, order.id / 8, order.id % 2 == 0


def first(pair: tuple[Any, ...]) -> Any:
    return pair[0]


@pytest.mark.parametrize("function", [read, made], ids=lambda function: function.__name__)
def test_reduce_of_tuples(golden: Any, function: Any) -> None:
    """They are sent as arrays, which are made of columns or of objects."""
    golden(
        'x: {from: p, keyWith: "HERE:first", reduce: "HERE:joined"}\n'
        f'p: {{from: orders, map: "HERE:{function.__name__}"}}',
        lambda orders, rates: (
            orders.map(function, name="p").key_with(first).reduce(joined, name="x")
        ),
        rows=histories([function(order) for order in ORDERS]),
    )
