"""Functions of windows, with triggers, evictors and assigners: each is a short loop over the input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
from golden_input import ARRIVALS, MINUTE, ORDERS, STREAM, Arrival, Order, row

import headgate as hg

HALF_HOUR = 30 * MINUTE


class Total(msgspec.Struct, frozen=True):
    ad: str
    start: int
    n: int
    s: int
    of_window: int = 0
    of_key: int = 0


def total(orders: list[Order]) -> tuple[int, int]:
    return len(orders), sum(order.amount for order in orders)


def larger(left: Order, right: Order) -> Order:
    return left if (left.amount, left.id) >= (right.amount, right.id) else right


class Sum(hg.AggregateFunction[Order, tuple[int, int], tuple[int, int]]):
    def create(self) -> tuple[int, int]:
        return 0, 0

    def add(self, accumulator: tuple[int, int], value: Order) -> tuple[int, int]:
        return accumulator[0] + 1, accumulator[1] + value.amount

    def result(self, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator


class Named(hg.WindowProcess[str, tuple[int, int], Total]):
    """Emits the results of `Sum` with key and start."""

    def on_window(
        self,
        key: str,
        window: hg.Window,
        records: list[tuple[int, int]],
        ctx: hg.WindowContext[str],
    ) -> Iterator[Total]:
        yield Total(key, window.start, *records[0])


class All(hg.WindowProcess[str, Order, Total]):
    """Counts the records of a window, the results of that window so far, and those of the key."""

    of_window = hg.per_window(hg.ValueState[int](default=0))
    of_key = hg.ValueState[int](default=0)

    def on_window(
        self, key: str, window: hg.Window, records: list[Order], ctx: hg.WindowContext[str]
    ) -> Iterator[Total]:
        for state in (self.of_window, self.of_key):
            state.set(state.get() + 1)
        yield Total(key, window.start, *total(records), self.of_window.get(), self.of_key.get())


class Urgent(hg.Trigger[Order]):
    """Fires with the first large order of a window, and at its end."""

    def on_element(
        self, record: Order, timestamp: int, window: hg.Window, ctx: hg.TriggerContext
    ) -> hg.TriggerResult:
        ctx.event_time.at(window.last)
        if record.amount > 7 and not ctx.get("fired"):
            ctx.set("fired", True)
            return hg.TriggerResult.FIRE
        return hg.TriggerResult.CONTINUE

    def on_event_time(
        self, time: int, window: hg.Window, ctx: hg.TriggerContext
    ) -> hg.TriggerResult:
        return hg.TriggerResult.FIRE


class Halves(hg.WindowAssigner[Order]):
    """Half hours, and what is in the last ten minutes belongs to the next one, too."""

    def assign(self, record: Order, timestamp: int) -> list[hg.Window]:
        start = timestamp - timestamp % HALF_HOUR
        windows = [hg.Window(start, start + HALF_HOUR)]
        if timestamp >= start + HALF_HOUR - 10 * MINUTE:
            windows.append(hg.Window(start + HALF_HOUR, start + 2 * HALF_HOUR))
        return windows


every_third = hg.triggers.Purging(hg.triggers.Count(3))
each_one = hg.triggers.Count(1)
so_far = hg.triggers.ContinuousEventTime("10m")
recent = hg.evictors.Time("20m")


def windows_of(each: Arrival, assign: Any) -> list[hg.Window]:
    windows = assign(each.record, each.record.ms)
    return [one for one in windows if each.watermark is None or one.last > each.watermark]


def half_hour(order: Order, ms: int) -> list[hg.Window]:
    return Halves().assign(order, ms)[:1]


def contents(assign: Any) -> tuple[dict[tuple[str, int], list[Order]], list[Any]]:
    """The records of each key and window in the order of their ends, and the late ones."""
    held: dict[tuple[str, int], list[Order]] = defaultdict(list)
    for each in ARRIVALS:
        for window in windows_of(each, assign):
            held[each.record.ad, window.start].append(each.record)
    late = [row(each.record) for each in ARRIVALS if not windows_of(each, assign)]
    return dict(sorted(held.items(), key=lambda item: item[0][1])), late


def numbered(rows: list[Any]) -> list[Any]:
    """With the number of each among those of its key."""
    numbers: dict[str, int] = defaultdict(int)
    found = []
    for ad, *others in rows:
        numbers[ad] += 1
        found.append((ad, *others, numbers[ad]))
    return found


HALF_HOURS, LATE = contents(half_hour)
TOTALS = [(ad, start, *total(held), 0, 0) for (ad, start), held in HALF_HOURS.items()]
EVER = -(2**63)
"""When the global window begins."""


def test_reduce(golden: Any) -> None:
    golden(
        'x: {from: orders, keyBy: ad, window: {tumbling: 30m}, reduce: "HERE:larger"}',
        lambda orders, rates: (
            orders.key_by("ad").window(hg.tumbling("30m")).reduce(larger, name="x")
        ),
        rows=[
            row(max(held, key=lambda order: (order.amount, order.id)))
            for held in HALF_HOURS.values()
        ],
        sides={"late": LATE},
    )


def test_aggregate_and_window_process(golden: Any) -> None:
    golden(
        "x: {from: orders, keyBy: ad, window: {tumbling: 30m}, "
        'aggregate: "HERE:Sum", windowProcess: "HERE:Named", into: "HERE:Total"}',
        lambda orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("30m"))
            .aggregate(Sum(), Named(), into=Total, name="x")
        ),
        rows=TOTALS,
        sides={"late": LATE},
        ordered=True,
    )


def test_an_assigner(golden: Any) -> None:
    held, late = contents(Halves().assign)
    golden(
        'x: {from: orders, keyBy: ad, window: {python: "HERE:Halves"}, process: "HERE:All", '
        'into: "HERE:Total"}',
        lambda orders, rates: (
            orders.key_by("ad").window(Halves()).process(All(), into=Total, name="x")
        ),
        rows=numbered([(ad, start, *total(orders), 1) for (ad, start), orders in held.items()]),
        sides={"late": late},
        ordered=True,
    )


def test_a_trigger_of_ones_own(golden: Any) -> None:
    rows = []
    fired: dict[tuple[str, int], int] = defaultdict(int)
    held: dict[tuple[str, int], list[Order]] = defaultdict(list)
    arrivals = iter(ARRIVALS)
    for portion in STREAM:
        for _ in portion.orders:
            each = next(arrivals)
            for window in windows_of(each, half_hour):
                at = each.record.ad, window.start
                held[at].append(each.record)
                if each.record.amount > 7 and not fired[at]:
                    fired[at] += 1
                    rows.append((*at, *total(held[at]), fired[at]))
        for at in sorted(held, key=lambda at: at[1]):
            if at[1] + HALF_HOUR - 1 <= portion.watermark or portion is STREAM[-1]:
                rows.append((*at, *total(held.pop(at)), fired[at] + 1))
    assert 2 in {number for *_, number in rows}
    golden(
        'x: {from: orders, keyBy: ad, window: {tumbling: 30m, trigger: "HERE:Urgent"}, '
        'process: "HERE:All", into: "HERE:Total"}',
        lambda orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("30m"), trigger=Urgent())
            .process(All(), into=Total, name="x")
        ),
        rows=numbered(rows),
        sides={"late": LATE},
        ordered=True,
    )


def test_results_so_far_come_to_the_same(golden: Any) -> None:
    golden(
        'x: {from: orders, keyBy: ad, window: {tumbling: 30m, trigger: "HERE:so_far"}, '
        'aggregate: "HERE:Sum", windowProcess: "HERE:Named", into: "HERE:Total"}',
        lambda orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("30m"), trigger=so_far)
            .aggregate(Sum(), Named(), into=Total, name="x")
        ),
        rows=TOTALS,
        sides={"late": LATE},
        last_of=2,
    )


def test_a_global_window_that_fires_and_forgets(golden: Any) -> None:
    rows = []
    held: dict[str, list[Order]] = defaultdict(list)
    for order in ORDERS:
        held[order.ad].append(order)
        if len(held[order.ad]) == 3:
            rows.append((order.ad, EVER, *total(held.pop(order.ad)), 0, 0))
    golden(
        'x: {from: orders, keyBy: ad, window: {global: all, trigger: "HERE:every_third"}, '
        'aggregate: "HERE:Sum", windowProcess: "HERE:Named", into: "HERE:Total"}',
        lambda orders, rates: (
            orders.key_by("ad")
            .window(hg.global_window(), trigger=every_third)
            .aggregate(Sum(), Named(), into=Total, name="x")
        ),
        rows=rows,
        ordered=True,
    )


def test_an_evictor(golden: Any) -> None:
    rows = []
    held: dict[str, list[Order]] = defaultdict(list)
    for order in ORDERS:
        held[order.ad].append(order)
        newest = max(each.ms for each in held[order.ad])
        held[order.ad] = [each for each in held[order.ad] if each.ms > newest - 20 * MINUTE]
        rows.append((order.ad, EVER, *total(held[order.ad]), 0, 0))
    golden(
        "x: {from: orders, keyBy: ad, "
        'window: {global: all, trigger: "HERE:each_one", evictor: "HERE:recent"}, '
        'aggregate: "HERE:Sum", windowProcess: "HERE:Named", into: "HERE:Total"}',
        lambda orders, rates: (
            orders.key_by("ad")
            .window(hg.global_window(), trigger=each_one, evictor=recent)
            .aggregate(Sum(), Named(), into=Total, name="x")
        ),
        rows=rows,
        ordered=True,
    )
