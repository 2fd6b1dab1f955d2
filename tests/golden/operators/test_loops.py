"""Loops, with records under way in them at every barrier."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from golden_input import ORDERS, Order, row

import headgate as hg


class Turns(hg.KeyedProcess[str, Order, Order]):
    """Counts in each record's place how many records of its key came before: `tip` is the number."""

    turns = hg.MapState[int, int]()

    def on_record(self, record: Order, ctx: hg.Context[str]) -> Iterator[Order]:
        turn = (self.turns.get(record.id) or 0) + 1
        self.turns.put(record.id, turn)
        yield msgspec.structs.replace(record, amount=record.amount - 1, tip=turn)


async def slowly(order: Order) -> Order:
    await asyncio.sleep(0.4)
    return order


def countdown(stream: Any) -> tuple[Any, Any]:
    """Every way round takes four tenths of a second, an order up to four seconds."""
    asked = stream.map_async(slowly, into=Order, timeout="1h", name="slowly")
    less = asked.key_by("ad").process(Turns(), into=Order, name="turns")
    return less.filter("amount > 0", name="more"), less


def test_records_that_go_round(golden: Any) -> None:
    golden(
        'x: {from: orders, iterate: {body: "HERE:countdown"}}',
        lambda orders, rates: orders.iterate(countdown, name="x"),
        rows=[
            row(msgspec.structs.replace(order, amount=order.amount - turn, tip=turn))
            for order in ORDERS
            for turn in range(1, max(1, order.amount) + 1)
        ],
    )


def quickly(stream: Any) -> tuple[Any, Any]:
    less = stream.select("id", "ad", "amount - 1 AS amount", "tip", "at", name="less")
    return less.filter("amount > 0", name="more"), less


QUICK = {
    "each its own way": ("", lambda orders: orders.iterate(quickly, name="x")),
    "in rounds": (
        ", maxRounds: 99",
        lambda orders: orders.iterate_rounds(quickly, name="x", max_rounds=99),
    ),
}


@pytest.mark.parametrize(("text", "twin"), QUICK.values(), ids=QUICK)
def test_what_comes_back_waits_in_the_head(golden: Any, text: str, twin: Any) -> None:
    """While a barrier is in the loop, or until the first round is over: until the input ends."""
    golden(
        f'x: {{from: orders, iterate: {{body: "HERE:quickly"{text}}}}}',
        lambda orders, rates: twin(orders),
        rows=[
            row(msgspec.structs.replace(order, amount=order.amount - turn))
            for order in ORDERS
            for turn in range(1, max(1, order.amount) + 1)
        ],
    )


class Share(msgspec.Struct, frozen=True):
    ad: str
    amount: int
    round: int = 0


class Sums(hg.KeyedProcess[str, Share, Share]):
    """Sends the sum of a key's records of a round when the round is over."""

    sums = hg.MapState[int, int]()

    def on_record(self, record: Share, ctx: hg.Context[str]) -> None:
        number = ctx.timestamp
        assert number is not None
        self.sums.put(number, (self.sums.get(number) or 0) + record.amount)
        ctx.event_time.at(number, tag=str(number))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Share]:
        number = int(timer.tag)
        total = self.sums.get(number)
        assert total is not None
        self.sums.remove(number)
        yield Share(ctx.key, total, number)


def shared(record: Share) -> list[Share]:
    """Two thirds go on to the next two letters."""
    third = record.amount // 3
    following = [chr((ord(record.ad) - ord("a") + step) % 7 + ord("a")) for step in (1, 2)]
    return [Share(ad, third) for ad in following if third]


def sums(stream: Any) -> tuple[Any, Any]:
    made = stream.key_by("ad").process(Sums(), into=Share, name="sums")
    return made.flat_map(shared, into=Share, name="shared"), made


def begun(order: Order) -> Share:
    return Share(order.ad, order.amount * 50)


def all_rounds() -> list[Any]:
    records = [begun(order) for order in ORDERS]
    rows: list[Any] = []
    number = 0
    while records:
        totals: Counter[str] = Counter()
        for record in records:
            totals[record.ad] += record.amount
        done = [Share(ad, amount, number) for ad, amount in totals.items()]
        rows += map(row, done)
        records = [share for each in done for share in shared(each)]
        number += 1
    return rows


def test_rounds(golden: Any) -> None:
    """The first round lasts as long as the input: what comes after it comes at the end."""
    rows = all_rounds()
    assert max(number for *_, number in rows) > 10
    golden(
        'begun: {from: orders, map: "HERE:begun", into: "HERE:Share"}\n'
        'x: {from: begun, iterate: {body: "HERE:sums", maxRounds: 1000}}',
        lambda orders, rates: orders.map(begun, into=Share, name="begun").iterate_rounds(
            sums, name="x", max_rounds=1000
        ),
        rows=rows,
        ordered=True,
    )
