"""Steps without state, streams that meet, and ways between subtasks."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from golden_input import ORDERS, RATES, Order, row

import headgate as hg


def doubled(order: Order) -> list[Order]:
    return [order] * (order.id % 3)


async def doubled_later(order: Order) -> list[Order]:
    return doubled(order)


def same(order: Order) -> Order:
    return order


def reversed_(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array(range(batch.num_rows)[::-1]))


def test_steps_of_one_record(golden: Any) -> None:
    golden(
        'some: {from: orders, filter: "amount > 4"}\n'
        'named: {from: some, select: [id, "UPPER(ad) AS ad", amount, tip, at]}\n'
        'twice: {from: named, flatMap: "HERE:doubled", into: "golden_input:Order"}\n'
        'x: {from: twice, map: "HERE:same", into: "golden_input:Order"}',
        lambda orders, rates: (
            orders.filter("amount > 4", name="some")
            .select("id", "UPPER(ad) AS ad", "amount", "tip", "at", name="named")
            .flat_map(doubled, into=Order, name="twice")
            .map(same, into=Order, name="x")
        ),
        rows=[
            (order.id, order.ad.upper(), *row(order)[2:])
            for order in ORDERS
            if order.amount > 4
            for _ in range(order.id % 3)
        ],
        ordered=True,
    )


def test_coroutines(golden: Any) -> None:
    golden(
        'x: {from: orders, flatMap: "HERE:doubled_later", into: "golden_input:Order"}',
        lambda orders, rates: orders.flat_map(doubled_later, into=Order, name="x"),
        rows=[row(order) for order in ORDERS for _ in range(order.id % 3)],
        ordered=True,
    )


def test_batches(golden: Any) -> None:
    golden(
        'x: {from: orders, python: "HERE:reversed_"}',
        lambda orders, rates: orders.map_batches(reversed_, name="x"),
        rows=[row(order) for order in ORDERS],
    )


def test_union(golden: Any) -> None:
    golden(
        "left: {from: orders, select: [ad, amount, at]}\n"
        'right: {from: rates, select: [ad, "rate AS amount", at]}\n'
        "both: {union: [left, right]}\n"
        "x: {from: both, keyBy: ad, aggregate: {n: count(), s: sum(amount)}}",
        lambda orders, rates: (
            orders.select("ad", "amount", "at", name="left")
            .union(rates.select("ad", "rate AS amount", "at", name="right"), name="both")
            .key_by("ad")
            .agg(n=hg.count(), s=hg.sum("amount"), name="x")
        ),
        rows=[
            (ad, len(amounts), sum(amounts))
            for ad in "abcdefg"
            for amounts in [
                [order.amount for order in ORDERS if order.ad == ad]
                + [rate.rate for rate in RATES if rate.ad == ad]
            ]
        ],
        reads=("orders", "rates"),
        last_of=1,
    )


WAYS = {
    "rebalance": lambda stream: stream.rebalance(),
    "rescale": lambda stream: stream.rescale(),
    "shuffle": lambda stream: stream.shuffle(),
    "global": lambda stream: stream.to_one(),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_between_subtasks(golden: Any, way: str) -> None:
    golden(
        f'x: {{from: orders, partition: {way}, map: "HERE:same", into: "golden_input:Order"}}',
        lambda orders, rates: WAYS[way](orders).map(same, into=Order, name="x"),
        rows=[row(order) for order in ORDERS],
    )


def by_number(order: Order, parallelism: int) -> int:
    return order.id % parallelism


def test_a_way_of_ones_own(golden: Any) -> None:
    golden(
        "",  # it has no form in YAML
        lambda orders, rates: orders.partition_with(by_number).map(same, into=Order, name="x"),
        rows=[row(order) for order in ORDERS],
    )
