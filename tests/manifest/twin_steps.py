"""Functions and classes that the jobs of test_manifest_forms.py name as `twin_steps:...`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa

import headgate as hg

START = datetime(2026, 3, 28, 20, tzinfo=UTC)


class Order(msgspec.Struct, frozen=True):
    id: int
    ad: str
    amount: int
    at: datetime


class Rate(msgspec.Struct, frozen=True):
    ad: str
    rate: int
    at: datetime


class Result(msgspec.Struct, frozen=True):
    ad: str
    n: int
    what: str = ""


def order(number: int) -> Order:
    at = START + timedelta(minutes=number * 3 + number // 20 * 30)
    return Order(number, "abc"[number * number % 3], number * 7 % 11, at)


def rate(number: int) -> Rate:
    return Rate("ab"[number % 2], number * number % 13, START + timedelta(minutes=number * 8))


def at_ms(record: Any) -> int:
    return round(record.at.timestamp() * 1000)


def ad_of(record: Any) -> str:
    return str(record.ad)


def larger(left: Order, right: Order) -> Order:
    return left if left.amount >= right.amount else right


def gap(record: Order) -> timedelta:
    return timedelta(minutes=5 + record.amount)


def is_odd(record: Order) -> bool:
    return record.id % 2 == 1


def named(record: Any) -> Result:
    of = getattr(record, "record", record)  # a dead letter has it inside
    ad = of["ad"] if isinstance(of, dict) else of.ad
    return Result(ad, 0, "side")


class Behind(hg.WatermarkGenerator):
    """An hour behind the latest time."""

    def __init__(self) -> None:
        self._latest: int | None = None

    def on_batch(self, times: Any) -> int:
        self._latest = max(int(times.max()), self._latest or 0)
        return self._latest - 3_600_000


strategy = hg.WatermarkStrategy.bounded("1h")


class Hours(hg.WindowAssigner[Order]):
    """Windows of an hour."""

    def assign(self, record: Order, timestamp: int) -> list[hg.Window]:
        start = timestamp - timestamp % 3_600_000
        return [hg.Window(start, start + 3_600_000)]


every_second = hg.triggers.Count(2)
last_one = hg.evictors.Count(1)


class Mean(hg.AggregateFunction[Order, tuple[int, int], Result]):
    def create(self) -> tuple[int, int]:
        return 0, 0

    def add(self, accumulator: tuple[int, int], value: Order) -> tuple[int, int]:
        return accumulator[0] + value.amount, accumulator[1] + 1

    def result(self, accumulator: tuple[int, int]) -> Result:
        return Result("?", accumulator[0], str(accumulator[1]))


class Guard(hg.KeyedProcess[str, Order, Result]):
    """Counts, and says the count an hour after the last order."""

    count = hg.ValueState[int](default=0)
    small = hg.SideOutput[Order]()

    def on_record(self, record: Order, ctx: hg.Context[str]) -> None:
        if record.amount < 3:
            ctx.emit(self.small, record)
            return
        self.count.set(self.count.get() + record.amount)
        ctx.event_time.at(record.at + timedelta(minutes=20), tag="quiet")

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Result]:
        yield Result(ctx.key, self.count.get(), timer.tag)


class Refusing(Guard):
    """Raises for small orders."""

    def on_record(self, record: Order, ctx: hg.Context[str]) -> None:
        super().on_record(record, ctx)
        if record.amount < 3:
            raise ValueError("small")
        self.count.clear()


class Both(hg.CoProcess[str, Order, Rate, Result]):
    """Sums both until the end."""

    total = hg.ValueState[int](default=0)

    def on_first(self, record: Order, ctx: hg.Context[str]) -> None:
        self._add(record.amount, ctx)

    def on_second(self, record: Rate, ctx: hg.Context[str]) -> None:
        self._add(record.rate, ctx)

    def _add(self, amount: int, ctx: hg.Context[str]) -> None:
        self.total.set(self.total.get() + amount)
        ctx.event_time.at(START + timedelta(days=365))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Result]:
        yield Result(ctx.key, self.total.get())


class Known(hg.BroadcastProcess[str, Order, Rate, Result]):
    """At the end, the orders of each key, and the broadcast records there were."""

    rates = hg.BroadcastState[int, Rate]()
    count = hg.ValueState[int](default=0)

    def on_record(self, record: Order, ctx: hg.Context[str]) -> None:
        self.count.set(self.count.get() + 1)
        ctx.event_time.at(START + timedelta(days=365))

    def on_broadcast(self, record: Rate, ctx: hg.Context[None]) -> None:
        self.rates.put(record.rate, record)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Result]:
        yield Result(ctx.key, self.count.get(), str(len(list(self.rates.keys()))))


class First(hg.KeyedBatchProcess[str, Order, Order]):
    """The first order of each key."""

    seen = hg.ValueState[bool](default=False)

    def on_batch(self, groups: hg.Groups[str], ctx: hg.Context[str]) -> Iterator[pa.RecordBatch]:
        for _key, rows in groups:
            if not self.seen.get():
                self.seen.set(True)
                yield rows.slice(0, 1)


class Count(hg.WindowProcess[str, Order, Result]):
    """Counts the records of a window."""

    def on_window(
        self, key: str, window: hg.Window, records: list[Order], ctx: hg.WindowContext[str]
    ) -> list[Result]:
        return [Result(key, len(records), str(window.start))]


def together(key: str, left: list[Order], right: list[Rate]) -> Iterator[Result]:
    yield Result(key, len(left), str(len(right)))


async def score(record: Order) -> Result:
    """Raises a ValueError for every tenth record."""
    await asyncio.sleep(0)
    if record.id % 10 == 0:
        raise ValueError(f"no score for {record.id}")
    return Result(record.ad, record.amount * 2)


async def owner_of(ad: str) -> dict[str, Any] | None:
    """Knows nothing of the ad c."""
    await asyncio.sleep(0)
    return None if ad == "c" else {"owner": ad * 2, "amount": len(ad)}


async def owner_of_order(key: tuple[str, int]) -> dict[str, str]:
    return {"owner": f"{key[0]}{key[1] % 2}"}


async def endless(record: Order) -> Result:
    """Never ends."""
    await asyncio.Event().wait()
    raise AssertionError


def fallback(record: Order) -> Result:
    return Result(record.ad, -1, "fallback")


def half(record: Order) -> Result:
    return Result(record.ad, 10 // record.amount)


def plus_one(batch: pa.RecordBatch) -> pa.RecordBatch:
    at = batch.schema.get_field_index("amount")
    more = pa.array([amount + 1 for amount in batch.column(at).to_pylist()], pa.int64())
    return batch.set_column(at, "amount", more)


def countdown(stream: Any) -> tuple[Any, Any]:
    """Goes round until the amount is 0."""
    less = stream.select("id", "ad", "amount - 1 AS amount", "at", name="less")
    return less.filter("amount > 0", name="more"), less.filter("amount <= 0", name="done")


class Needy(Guard):
    """Cannot be made without arguments."""

    def __init__(self, limit: int, names: list[str] | None = None) -> None:
        self.limit, self.names = limit, names

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Result]:
        yield Result(ctx.key, self.limit, str(self.names))


class FarBehind(Behind):
    """A watermark that stays behind by a given time."""

    def __init__(self, hours: int) -> None:
        super().__init__()
        self._far = (hours - 1) * 3_600_000

    def on_batch(self, times: Any) -> int:
        return super().on_batch(times) - self._far


class Long(Hours):
    """Windows of this number of hours."""

    def __init__(self, hours: int) -> None:
        self.size = hours * 3_600_000

    def assign(self, record: Order, timestamp: int) -> list[hg.Window]:
        start = timestamp - timestamp % self.size
        return [hg.Window(start, start + self.size)]


def every(count: int) -> hg.triggers.Count:
    return hg.triggers.Count(count)


async def later(record: Any) -> Any:
    await asyncio.sleep(0)
    return record


def same(record: Any) -> Any:
    return record


def shrink(stream: Any) -> tuple[Any, Any]:
    """Goes round until the quantity is 0."""
    less = stream.select("*", "qty - 1 AS rest", name="less").select(
        "id", "price", "rest AS qty", "at"
    )
    return less.filter("qty > 0"), less.filter("qty <= 0", name="gone")


risen = hg.cep.begin("low").where("amount < 4").followed_by("high").where("amount > 6").within("2h")


def rising(low: int, high: int, **options: Any) -> hg.cep.Pattern[Any]:
    begun = hg.cep.begin("low", **options).where(f"amount < {low}").one_or_more()
    return begun.followed_by("high").where(f"amount > {high}").within("2h")


def often(times: int) -> hg.cep.Pattern[Any]:
    return hg.cep.begin("low").times(times)


decided = hg.cep.begin("low", after_match=hg.cep.skip_to_next())


def highest(match: Any) -> Result:
    """Return the key of a match and its last record."""
    return Result(match.key, match["high"][0].id, str(match["low"][0].id))
