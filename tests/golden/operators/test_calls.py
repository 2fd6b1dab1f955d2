"""Calls of services, micro-batches, and what becomes of records that fail or take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from golden_input import ORDERS, ORDERS_EACH, Order, row

import headgate as hg


class Scored(msgspec.Struct, frozen=True):
    group: str
    id: int
    score: int


def portion_of(order: Order) -> str:
    """One subtask reads it, in order."""
    return f"portion {order.id // ORDERS_EACH}"


async def score(order: Order) -> Scored:
    """Takes up to 1.8 s of the clock: calls are under way at every barrier."""
    await asyncio.sleep(order.id % 7 * 0.3)
    return Scored(portion_of(order), order.id, order.amount * 2)


SCORES = [(portion_of(order), order.id, order.amount * 2) for order in ORDERS]


def test_calls_in_order(golden: Any) -> None:
    golden(
        'x: {from: orders, mapAsync: "HERE:score", timeout: 1h, into: "HERE:Scored"}',
        lambda orders, rates: orders.map_async(score, timeout="1h", into=Scored, name="x"),
        rows=SCORES,
        ordered=True,
    )


def test_calls_as_they_come(golden: Any) -> None:
    golden(
        'x: {from: orders, mapAsync: "HERE:score", ordered: false, timeout: 1h, '
        'into: "HERE:Scored"}',
        lambda orders, rates: orders.map_async(
            score, ordered=False, timeout="1h", into=Scored, name="x"
        ),
        rows=SCORES,
    )


async def score_of_ad(order: Order) -> Scored:
    await asyncio.sleep(order.id % 3 * 0.2)
    return Scored(order.ad, order.id, order.amount * 2)


def test_calls_of_a_key_in_order(golden: Any) -> None:
    golden(
        'x: {from: orders, keyBy: ad, mapAsync: "HERE:score_of_ad", timeout: 1h, '
        'into: "HERE:Scored"}',
        lambda orders, rates: orders.key_by("ad").map_async(
            score_of_ad, timeout="1h", into=Scored, name="x"
        ),
        rows=[(order.ad, order.id, order.amount * 2) for order in ORDERS],
        ordered=True,
    )


async def sometimes(order: Order) -> Scored:
    if order.id % 10 == 3:
        await asyncio.Event().wait()
    return await score(order)


def test_calls_that_take_too_long(golden: Any) -> None:
    slow = [order for order in ORDERS if order.id % 10 == 3]
    golden(
        'x: {from: orders, mapAsync: "HERE:sometimes", timeout: 2s, onTimeout: side_output, '
        'into: "HERE:Scored"}',
        lambda orders, rates: orders.map_async(
            sometimes, timeout="2s", on_timeout="side_output", into=Scored, name="x"
        ),
        rows=[row_ for order, row_ in zip(ORDERS, SCORES, strict=True) if order not in slow],
        sides={"timed_out": [row(order) for order in slow]},
    )


async def fails(order: Order) -> Scored:
    await asyncio.sleep(0.1)
    if order.id % 10 == 3:
        raise ValueError(f"no score of {order.id}")
    return await score(order)


def failure(letter: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a failure without its line, which differs by language; positions have tests of their own."""
    record, kind, text, operator, _origin, time, _source, _split, _offset = letter
    return (*record.values(), kind, text, operator, time)


def failed(text: str) -> list[Any]:
    bad = [order for order in ORDERS if order.id % 10 == 3]
    return [(*row(o), "ValueError", text.format(o.id), "x", o.at) for o in bad]


def test_calls_that_fail(golden: Any) -> None:
    golden(
        'x: {from: orders, mapAsync: "HERE:fails", timeout: 1h, ordered: false, '
        "retry: {attempts: 3, delay: 500ms, factor: 2}, onError: side_output, "
        'into: "HERE:Scored"}',
        lambda orders, rates: orders.map_async(
            fails,
            timeout="1h",
            ordered=False,
            retry=hg.Retry(attempts=3, delay="500ms", factor=2),
            on_error="side_output",
            into=Scored,
            name="x",
        ),
        rows=[each for each in SCORES if each[1] % 10 != 3],
        sides={"failed": failed("no score of {}")},
        of_side=failure,
    )


def plus_one(batch: pa.RecordBatch) -> pa.RecordBatch:
    at = batch.schema.get_field_index("amount")
    return batch.set_column(at, "amount", pc.add(batch.column(at), 1))


async def plus_one_later(batch: pa.RecordBatch) -> pa.RecordBatch:
    await asyncio.sleep(0.7)
    return plus_one(batch)


MORE = [row(msgspec.structs.replace(order, amount=order.amount + 1)) for order in ORDERS]


def test_micro_batches(golden: Any) -> None:
    golden(
        'x: {from: orders, python: "HERE:plus_one", rows: 7, within: 300ms}',
        lambda orders, rates: orders.map_batches(plus_one, rows=7, within="300ms", name="x"),
        rows=MORE,
    )


def test_micro_batches_of_a_service(golden: Any) -> None:
    golden(
        'x: {from: orders, python: "HERE:plus_one_later", rows: 7, within: 300ms, maxInFlight: 2}',
        lambda orders, rates: orders.map_batches(
            plus_one_later, rows=7, within="300ms", max_in_flight=2, name="x"
        ),
        rows=MORE,
    )


def strict(order: Order) -> Scored:
    if order.id % 10 == 3:
        raise ValueError(f"{order.id} is wrong")
    return Scored(portion_of(order), order.id, order.amount * 2)


def strictly(order: Order) -> Iterator[Scored]:
    yield strict(order)


GOOD = [each for each in SCORES if each[1] % 10 != 3]


def test_dead_letters_of_map(golden: Any) -> None:
    golden(
        'x: {from: orders, map: "HERE:strict", onError: {then: side_output, retries: 1}, '
        'into: "HERE:Scored"}',
        lambda orders, rates: orders.map(
            strict, on_error=hg.OnError("side_output", retries=1), into=Scored, name="x"
        ),
        rows=GOOD,
        sides={"failed": failed("{} is wrong")},
        of_side=failure,
        ordered=True,
    )


def test_dead_letters_of_flat_map(golden: Any) -> None:
    golden(
        'x: {from: orders, flatMap: "HERE:strictly", onError: side_output, into: "HERE:Scored"}',
        lambda orders, rates: orders.flat_map(
            strictly, on_error="side_output", into=Scored, name="x"
        ),
        rows=GOOD,
        sides={"failed": failed("{} is wrong")},
        of_side=failure,
        ordered=True,
    )


def strict_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    for id_ in batch.column("id").to_pylist():
        if id_ % 10 == 3:
            raise ValueError(f"{id_} is wrong")
    return plus_one(batch)


def test_dead_letters_of_batches(golden: Any) -> None:
    golden(
        'x: {from: orders, python: "HERE:strict_batch", onError: side_output}',
        lambda orders, rates: orders.map_batches(strict_batch, on_error="side_output", name="x"),
        rows=[each for each in MORE if each[0] % 10 != 3],
        sides={"failed": failed("{} is wrong")},
        of_side=failure,
    )


def is_cheap(order: Order) -> bool:
    return 10 // order.amount > 1


def test_dropped_failures(golden: Any) -> None:
    golden(
        'x: {from: orders, filter: "HERE:is_cheap", onError: drop}',
        lambda orders, rates: orders.filter(is_cheap, on_error="drop", name="x"),
        rows=[row(order) for order in ORDERS if order.amount and 10 // order.amount > 1],
    )
