"""Process functions of each kind, with state of each kind, timers and side outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
from golden_input import MINUTE, ORDERS, STREAM, Order, Rate, planned, row

import headgate as hg

QUIET_MS = 15 * MINUTE
BOTH = ("orders", "rates")


class Said(msgspec.Struct, frozen=True):
    ad: str
    what: str
    n: int = 0
    more: str = ""


def ad_of(record: Any) -> str:
    return str(record.ad)


def added(left: int, right: int) -> int:
    return left * 2 % 10_007 + right


class Sum(hg.AggregateFunction[int, list[int], int]):
    def create(self) -> list[int]:
        return [0]

    def add(self, accumulator: list[int], value: int) -> list[int]:
        return [accumulator[0] + value]

    def result(self, accumulator: list[int]) -> int:
        return accumulator[0]


class Ledger(hg.KeyedProcess[str, Order, Said]):
    """Says all it has kept of a key with each record, and that it is quiet when none has come for long."""

    count = hg.ValueState[int](default=0)
    ids = hg.ListState[int]()
    by_amount = hg.MapState[int, int]()
    history = hg.ReducingState[int](added)
    total = hg.AggregatingState(Sum())
    small = hg.SideOutput[Order]()

    def on_record(self, record: Order, ctx: hg.Context[str]) -> Iterator[Said]:
        if record.amount < 2:
            ctx.emit(self.small, record)
        self.count.set(self.count.get() + 1)
        self.ids.add(record.id)
        self.by_amount.put(record.amount, record.id)
        self.history.add(record.amount)
        self.total.add(record.amount)
        ctx.event_time.at(planned(record) + QUIET_MS, tag="quiet")
        kept = [list(self.ids.get())[-3:], sorted(self.by_amount.items()), self.history.get()]
        yield Said(ctx.key, "record", self.count.get(), repr([*kept, self.total.get()]))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Said]:
        yield Said(ctx.key, timer.tag, self.count.get())
        self.by_amount.clear()


def ledger() -> list[Any]:
    """The same with plain dicts."""
    ids: dict[str, list[int]] = defaultdict(list)
    by_amount: dict[str, dict[int, int]] = defaultdict(dict)
    history: dict[str, int] = {}
    total: dict[str, int] = defaultdict(int)
    due: dict[str, int] = {}
    rows: list[Any] = []
    for portion in STREAM:
        for order in portion.orders:
            ad, amount = order.ad, order.amount
            ids[ad].append(order.id)
            by_amount[ad][amount] = order.id
            history[ad] = added(history[ad], amount) if ad in history else amount
            total[ad] += amount
            due[ad] = planned(order) + QUIET_MS
            kept = [ids[ad][-3:], sorted(by_amount[ad].items()), history[ad], total[ad]]
            rows.append((ad, "record", len(ids[ad]), repr(kept)))
        for ad, time in list(due.items()):
            if time <= portion.watermark or portion is STREAM[-1]:
                rows.append((ad, "quiet", len(ids[ad]), ""))
                by_amount[ad].clear()
                del due[ad]
    return rows


def test_keyed(golden: Any) -> None:
    rows = ledger()
    assert sum(what == "quiet" for _, what, *_ in rows) > 7  # not at the end only
    golden(
        'x: {from: orders, keyBy: ad, process: "HERE:Ledger", into: "HERE:Said"}',
        lambda orders, rates: orders.key_by("ad").process(Ledger(), into=Said, name="x"),
        rows=rows,
        ordered=True,
        sides={"small": [row(order) for order in ORDERS if order.amount < 2]},
    )


class Reminder(hg.KeyedProcess[str, Order, Said]):
    """Names each order once more, a second and a half later by the machine's clock."""

    def on_record(self, record: Order, ctx: hg.Context[str]) -> None:
        ctx.processing_time.after("1500ms", tag=str(record.id))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Said]:
        yield Said(ctx.key, timer.tag)


def test_timers_of_the_clock(golden: Any) -> None:
    golden(
        'x: {from: orders, keyWith: "HERE:ad_of", process: "HERE:Reminder", into: "HERE:Said"}',
        lambda orders, rates: orders.key_with(ad_of).process(Reminder(), into=Said, name="x"),
        rows=[(order.ad, str(order.id), 0, "") for order in ORDERS],
    )


def hour_of(ms: int) -> int:
    """Even for what is late an hour to come."""
    return ms // (60 * MINUTE) + 4


class Pairs(hg.CoProcess[str, Order, Rate, Said]):
    """Tells the sums of both streams per key three to four hours later."""

    orders = hg.ValueState[int](default=0)
    rates = hg.ValueState[int](default=0)

    def on_first(self, record: Order, ctx: hg.Context[str]) -> None:
        self.orders.set(self.orders.get() + record.amount)
        self._later(record.ms, ctx)

    def on_second(self, record: Rate, ctx: hg.Context[str]) -> None:
        self.rates.set(self.rates.get() + record.rate)
        self._later(record.ms, ctx)

    def _later(self, ms: int, ctx: hg.Context[str]) -> None:
        hour = hour_of(ms)
        ctx.event_time.at(hour * 60 * MINUTE, tag=str(hour))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Said]:
        yield Said(ctx.key, timer.tag, self.orders.get(), str(self.rates.get()))


def pairs() -> list[Any]:
    orders: dict[str, int] = defaultdict(int)
    rates: dict[str, int] = defaultdict(int)
    due: set[tuple[int, str]] = set()
    rows = []
    for portion in STREAM:
        for order in portion.orders:
            orders[order.ad] += order.amount
        for rate in portion.rates:
            rates[rate.ad] += rate.rate
        due |= {(hour_of(each.ms), each.ad) for each in (*portion.orders, *portion.rates)}
        for hour, ad in sorted(due):
            if hour * 60 * MINUTE <= portion.watermark or portion is STREAM[-1]:
                rows.append((ad, str(hour), orders[ad], str(rates[ad])))
                due.remove((hour, ad))
    return rows


def test_connected(golden: Any) -> None:
    golden(
        'x: {from: orders, keyBy: ad, connect: {with: rates, keyBy: ad}, process: "HERE:Pairs", '
        'into: "HERE:Said"}',
        lambda orders, rates: (
            orders.key_by("ad").connect(rates.key_by("ad")).process(Pairs(), into=Said, name="x")
        ),
        rows=pairs(),
        reads=BOTH,
        ordered=True,
    )


class Limits(hg.BroadcastProcess[str, Order, Rate, Said]):
    """Tells, once event time is there, what is known of rates: the newest of each other ad."""

    newest = hg.BroadcastState[str, int]()
    count = hg.ValueState[int](default=0)

    def on_record(self, record: Order, ctx: hg.Context[str]) -> None:
        self.count.set(self.count.get() + 1)
        ctx.event_time.at(planned(record), tag=str(record.id))

    def on_broadcast(self, record: Rate, ctx: hg.BroadcastContext[str]) -> None:
        self.newest.put(record.ad, record.rate)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Said]:
        known = sorted(self.newest.items())
        yield Said(ctx.key, timer.tag, self.count.get(), repr(known))


def limits() -> list[Any]:
    newest: dict[str, int] = {}
    count: dict[str, int] = defaultdict(int)
    waiting: list[Order] = []
    rows = []
    for portion in STREAM:
        for order in portion.orders:
            count[order.ad] += 1
        newest |= {rate.ad: rate.rate for rate in portion.rates}
        waiting += portion.orders
        last = portion is STREAM[-1]
        for order in list(waiting):
            if planned(order) <= portion.watermark or last:
                rows.append(
                    (order.ad, str(order.id), count[order.ad], repr(sorted(newest.items())))
                )
                waiting.remove(order)
    return rows


def test_broadcast(golden: Any) -> None:
    golden(
        'x: {from: orders, keyWith: "HERE:ad_of", connect: {broadcast: rates}, '
        'process: "HERE:Limits", into: "HERE:Said"}',
        lambda orders, rates: (
            orders.key_with(ad_of).connect(rates.broadcast()).process(Limits(), into=Said, name="x")
        ),
        rows=limits(),
        reads=BOTH,
        ordered=True,
    )


class Rising(hg.KeyedBatchProcess[str, Order, Order]):
    """Lets the orders through that have a larger number than all before of their key."""

    largest = hg.ValueState[int](default=-1)

    def on_batch(self, groups: hg.Groups[str], ctx: hg.Context[str]) -> Iterator[pa.RecordBatch]:
        for _, rows in groups:
            kept = []
            for amount in rows.column("amount").to_pylist():
                kept.append(amount > self.largest.get())
                self.largest.set(max(amount, self.largest.get()))
            yield rows.filter(pa.array(kept))


def test_batches(golden: Any) -> None:
    largest: dict[str, int] = {}
    rows = []
    for order in ORDERS:
        if order.amount > largest.get(order.ad, -1):
            largest[order.ad] = order.amount
            rows.append(row(order))
    assert len(rows) > 14
    golden(
        'x: {from: orders, keyBy: ad, process: "HERE:Rising"}',
        lambda orders, rates: orders.key_by("ad").process(Rising(), name="x"),
        rows=rows,
    )
