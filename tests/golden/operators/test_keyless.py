"""Process functions without keys, whose state is dealt out again, and what functions make at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
from golden_input import ORDERS, RATES, Order, Rate, row

import headgate as hg

BOTH = ("orders", "rates")


class Said(msgspec.Struct, frozen=True):
    ad: str
    what: str
    n: int = 0


class Keeps(hg.Process[Order, Said]):
    """Says each order, and again at the end if it has kept it; very small ones go aside."""

    kept = hg.OperatorListState[Order]()
    small = hg.SideOutput[Order]()

    def on_record(self, record: Order, ctx: hg.Context[None]) -> Iterator[Said]:
        if record.amount < 2:
            ctx.emit(self.small, record)
        if record.id % 3 == 0:
            self.kept.add(record)
        yield Said(record.ad, "record", record.id)

    def finish(self, ctx: hg.BroadcastContext[None]) -> Iterator[Said]:
        for order in self.kept.get():
            yield Said(order.ad, "end", order.id)


def test_without_a_key(golden: Any) -> None:
    golden(
        'x: {from: orders, partition: rebalance, process: "HERE:Keeps", into: "HERE:Said"}',
        lambda orders, rates: orders.rebalance().process(Keeps(), into=Said, name="x"),
        rows=[(order.ad, "record", order.id) for order in ORDERS]
        + [(order.ad, "end", order.id) for order in ORDERS if order.id % 3 == 0],
        sides={"small": [row(order) for order in ORDERS if order.amount < 2]},
    )


class KeepsBoth(hg.CoProcess[None, Order, Rate, Said]):
    orders = hg.OperatorListState[Order]()
    rates = hg.OperatorListState[Rate]()

    def on_first(self, record: Order, ctx: hg.Context[None]) -> None:
        self.orders.add(record)

    def on_second(self, record: Rate, ctx: hg.Context[None]) -> list[Said]:
        self.rates.add(record)
        return [Said(record.ad, "rate", record.rate)]

    def finish(self, ctx: hg.BroadcastContext[None]) -> list[Said]:
        orders = [Said(order.ad, "order at the end", order.id) for order in self.orders.get()]
        return orders + [Said(rate.ad, "rate at the end", rate.rate) for rate in self.rates.get()]


def test_two_streams_without_keys(golden: Any) -> None:
    golden(
        'x: {from: orders, connect: {with: rates}, process: "HERE:KeepsBoth", into: "HERE:Said"}',
        lambda orders, rates: orders.connect(rates).process(KeepsBoth(), into=Said, name="x"),
        reads=BOTH,
        rows=[(rate.ad, "rate", rate.rate) for rate in RATES]
        + [(order.ad, "order at the end", order.id) for order in ORDERS]
        + [(rate.ad, "rate at the end", rate.rate) for rate in RATES],
    )


class Priced(hg.BroadcastProcess[None, Order, Rate, Said]):
    """Prices the orders at the end by the highest rate of all, which every subtask knows."""

    highest = hg.BroadcastState[str, int]()
    orders = hg.OperatorListState[Order]()

    def on_record(self, record: Order, ctx: hg.Context[None]) -> None:
        self.orders.add(record)

    def on_broadcast(self, record: Rate, ctx: hg.BroadcastContext[None]) -> None:
        self.highest.put(record.ad, max(record.rate, self.highest.get(record.ad) or 0))

    def finish(self, ctx: hg.BroadcastContext[None]) -> list[Said]:
        return [
            Said(order.ad, "priced", order.amount * (self.highest.get(order.ad) or 0))
            for order in self.orders.get()
        ]


def test_a_broadcast_stream_beside_one_without_keys(golden: Any) -> None:
    highest: dict[str, int] = defaultdict(int)
    for rate in RATES:
        highest[rate.ad] = max(highest[rate.ad], rate.rate)
    golden(
        'x: {from: orders, connect: {broadcast: rates}, process: "HERE:Priced", into: "HERE:Said"}',
        lambda orders, rates: orders.connect(rates.broadcast()).process(
            Priced(), into=Said, name="x"
        ),
        reads=BOTH,
        rows=[(order.ad, "priced", order.amount * highest[order.ad]) for order in ORDERS],
    )


class Totals(hg.KeyedProcess[str, Order, Said]):
    total = hg.ValueState[int](default=0)

    def on_record(self, record: Order, ctx: hg.Context[str]) -> None:
        self.total.set(self.total.get() + record.amount)

    def finish(self, ctx: hg.BroadcastContext[str]) -> list[Said]:
        found: list[Said] = []
        ctx.for_each_key(
            self.total, lambda key, total: found.append(Said(key, "total", total.get()))
        )
        return found


def test_all_keys_at_the_end(golden: Any) -> None:
    totals: dict[str, int] = defaultdict(int)
    for order in ORDERS:
        totals[order.ad] += order.amount
    golden(
        'x: {from: orders, keyBy: ad, process: "HERE:Totals", into: "HERE:Said"}',
        lambda orders, rates: orders.key_by("ad").process(Totals(), into=Said, name="x"),
        rows=[(ad, "total", total) for ad, total in totals.items()],
    )


class Last:
    """A function object without state: what it makes at the end is the same whatever it has seen."""

    def __call__(self, order: Any) -> Said:
        return Said(order.ad, "record", order.id)

    def finish(self) -> Iterator[Said]:
        yield Said("", "end")


LAST = Last()


def test_a_function_object_makes_a_last_record(golden: Any) -> None:
    golden(
        'x: {from: orders, partition: global, map: "HERE:LAST", into: "HERE:Said"}',
        lambda orders, rates: orders.to_one().map(LAST, into=Said, name="x"),
        rows=[(order.ad, "record", order.id) for order in ORDERS] + [("", "end", 0)],
    )
