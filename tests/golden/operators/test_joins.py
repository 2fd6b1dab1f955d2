"""Joins: expected rows are comprehensions over all pairs of records that were in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from golden_input import ARRIVALS, MINUTE, ORDERS, RATE_ARRIVALS, Arrival, Order, Rate, row

import headgate as hg
from headgate.connectors import json_source

BOTH = ("orders", "rates")


class Met(msgspec.Struct, frozen=True):
    ad: str
    orders: int
    rates: int
    sum: int


def together(key: str, orders: list[Order], rates: list[Rate]) -> Iterator[Met]:
    yield Met(key, len(orders), len(rates), sum(rate.rate for rate in rates))


def in_time(arrivals: list[Arrival]) -> list[Any]:
    return [each.record for each in arrivals if not each.behind]


def behind(arrivals: list[Arrival]) -> list[Any]:
    return [row(each.record) for each in arrivals if each.behind]


def joined(order: Order | None, rate: Rate | None) -> tuple[Any, ...]:
    """A row of a join: the columns of both, the key once."""
    left = (None, None if rate is None else rate.ad, *[None] * 3) if order is None else row(order)
    return *left, *((None, None) if rate is None else row(rate)[1:])


def test_interval(golden: Any) -> None:
    orders, rates = in_time(ARRIVALS), in_time(RATE_ARRIVALS)
    pairs = [
        (order, rate)
        for order in orders
        for rate in rates
        if order.ad == rate.ad and -20 * MINUTE <= rate.ms - order.ms <= 10 * MINUTE
    ]
    met = {id(each) for pair in pairs for each in pair}
    golden(
        "x: {from: orders, keyBy: ad, "
        "join: {with: rates, keyBy: ad, within: [-20m, 10m], how: full, suffix: _rate}}",
        lambda orders, rates: orders.key_by("ad").join(
            rates.key_by("ad"), within=("-20m", "10m"), how="full", suffix="_rate", name="x"
        ),
        rows=[
            *(joined(*pair) for pair in pairs),
            *(joined(order, None) for order in orders if id(order) not in met),
            *(joined(None, rate) for rate in rates if id(rate) not in met),
        ],
        reads=BOTH,
        sides={"late": behind(ARRIVALS), "late_other": behind(RATE_ARRIVALS)},
    )


def window_of(record: Any, size: int) -> int:
    return record.ms // size


def alive(arrivals: list[Arrival], size: int) -> tuple[list[Any], list[Any]]:
    """Records whose window was there when they came, and the others."""
    there, gone = [], []
    for each in arrivals:
        end = (window_of(each.record, size) + 1) * size
        late = each.watermark is not None and end - 1 <= each.watermark
        (gone if late else there).append(each.record)
    return there, [row(record) for record in gone]


def test_window(golden: Any) -> None:
    size = 30 * MINUTE
    (orders, late), (rates, late_other) = alive(ARRIVALS, size), alive(RATE_ARRIVALS, size)
    pairs = [
        (order, rate)
        for order in orders
        for rate in rates
        if order.ad == rate.ad and window_of(order, size) == window_of(rate, size)
    ]
    met = {id(order) for order, _ in pairs}
    golden(
        "x: {from: orders, keyBy: ad, window: {tumbling: 30m}, "
        "join: {with: rates, keyBy: ad, how: left, suffix: _rate}}",
        lambda orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("30m"))
            .join(rates.key_by("ad"), how="left", suffix="_rate", name="x")
        ),
        rows=[
            *(joined(*pair) for pair in pairs),
            *(joined(order, None) for order in orders if id(order) not in met),
        ],
        reads=BOTH,
        sides={"late": late, "late_other": late_other},
    )


def test_co_group(golden: Any) -> None:
    size = 30 * MINUTE
    (orders, late), (rates, late_other) = alive(ARRIVALS, size), alive(RATE_ARRIVALS, size)
    groups = sorted({(window_of(each, size), each.ad) for each in (*orders, *rates)})
    rows = []
    for at in groups:
        left = [each for each in orders if (window_of(each, size), each.ad) == at]
        right = [each for each in rates if (window_of(each, size), each.ad) == at]
        rows.append((at[1], len(left), len(right), sum(rate.rate for rate in right)))
    golden(
        "x: {from: orders, keyBy: ad, window: {tumbling: 30m}, "
        'coGroup: {with: rates, keyBy: ad, python: "HERE:together"}, into: "HERE:Met"}',
        lambda orders, rates: (
            orders.key_by("ad")
            .window(hg.tumbling("30m"))
            .co_group(rates.key_by("ad"), together, into=Met, name="x")
        ),
        rows=rows,
        reads=BOTH,
        sides={"late": late, "late_other": late_other},
        ordered=True,
    )


def test_as_of(golden: Any) -> None:
    orders, rates = in_time(ARRIVALS), in_time(RATE_ARRIVALS)

    def valid(order: Order) -> Rate | None:
        versions = [rate for rate in rates if rate.ad == order.ad and rate.ms <= order.ms]
        return max(versions, key=lambda rate: rate.ms, default=None)

    rows = [joined(order, valid(order)) for order in orders]
    assert {rate is None for *_, rate in rows} == {False, True}
    golden(
        "x: {from: orders, keyBy: ad, "
        "joinAsOf: {with: rates, keyBy: ad, how: left, suffix: _rate}}",
        lambda orders, rates: orders.key_by("ad").join_as_of(
            rates.key_by("ad"), how="left", suffix="_rate", name="x"
        ),
        rows=rows,
        reads=BOTH,
        sides={"late": behind(ARRIVALS), "late_other": behind(RATE_ARRIVALS)},
    )


async def owner_of(ad: str) -> dict[str, str] | None:
    return None if ad > "e" else {"owner": ad * 2}


def test_lookup(golden: Any) -> None:
    golden(
        "x: {from: orders, lookup: {key: ad, python: 'HERE:owner_of'}, into: {owner: string}}",
        lambda orders, rates: orders.lookup("ad", owner_of, into={"owner": "string"}, name="x"),
        rows=[(*row(order), None if order.ad > "e" else order.ad * 2) for order in ORDERS],
    )


def test_lookup_in_a_table(golden: Any, tmp_path: Path) -> None:
    ads = sorted({order.ad for order in ORDERS if order.ad <= "e"})
    assert len(ads) < len({order.ad for order in ORDERS})
    path = tmp_path / "owners.json"
    path.write_text("".join(f'{{"ad": "{ad}", "owner": "{ad * 2}"}}\n' for ad in ads))
    schema = {"ad": "string", "owner": "string"}
    golden(
        f"x: {{from: orders, lookup: {{key: ad, table: {{json: {{path: {path}}}, key: ad, "
        "schema: {ad: string, owner: string}}}}",
        lambda orders, rates: orders.lookup(
            "ad", hg.static_table(json_source(str(path), schema), key="ad"), name="x"
        ),
        rows=[(*row(order), order.ad * 2 if order.ad in ads else None) for order in ORDERS],
    )
