"""The one input of all golden jobs of operators: orders and rates, out of order, some of them late.

It comes in eight portions; behind each, event time is declared. `ARRIVALS` and `RATE_ARRIVALS` say of each
record how far event time was when it came: from them the tests compute what must come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

START: Final = datetime(2026, 3, 28, 20, tzinfo=UTC)
"""In Berlin clocks go forward five hours later."""
PORTIONS: Final = 8
ORDERS_EACH: Final = 20
RATES_EACH: Final = 8
LATE_ORDERS: Final = frozenset({47, 111, 133, 158})
LATE_RATES: Final = frozenset({29, 53})
MINUTE: Final = 60_000


class Order(msgspec.Struct, frozen=True):
    id: int
    ad: str
    amount: int
    tip: int | None
    at: datetime

    @property
    def ms(self) -> int:
        """Event time."""
        return to_ms(self.at)


class Rate(msgspec.Struct, frozen=True):
    ad: str
    rate: int
    at: datetime

    @property
    def ms(self) -> int:
        """Event time."""
        return to_ms(self.at)


@dataclass(frozen=True)
class Arrival:
    """A record, and the watermark when it came; None before the first."""

    record: Any
    watermark: int | None

    @property
    def behind(self) -> bool:
        """True if event time was past the record when it came."""
        return self.watermark is not None and self.record.ms <= self.watermark


@dataclass(frozen=True)
class Portion:
    """The order in which records arrive, and the event time that is declared then."""

    orders: list[Order]
    rates: list[Rate]
    watermark: int


def to_ms(when: datetime) -> int:
    """Milliseconds since 1970."""
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def to_time(ms: int) -> datetime:
    """The reverse of `to_ms`."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def order(number: int) -> Order:
    minute = 2 * number + number * 37 % 11 - 5 - 150 * (number in LATE_ORDERS)
    return Order(
        number,
        "abcdefg"[(number * number + number // 5) % 7],
        number * 7 % 11,
        None if number % 4 == 1 else number * 5 % 9 - 2,
        START + timedelta(minutes=minute, seconds=number),
    )


def rate(number: int) -> Rate:
    minute = 5 * number + number * 7 % 5 - 2 - 150 * (number in LATE_RATES)
    return Rate(
        "abcdef"[number * 5 % 6],
        number * number % 13,
        START + timedelta(minutes=minute, seconds=30),
    )


def planned(order: Order) -> int:
    """A time by the number of an order, near its own if it is not late: event time is never past it.

    A timer for a time that is over waits for the next watermark, and after a restore that may be one which
    had come before: when it fires, and what it finds, is not promised.
    """
    return to_ms(START) + 2 * order.id * MINUTE


def portion(number: int) -> Portion:
    end = to_ms(START + timedelta(minutes=2 * ORDERS_EACH * (number + 1)))
    return Portion(
        [order(n) for n in range(number * ORDERS_EACH, (number + 1) * ORDERS_EACH)],
        [rate(n) for n in range(number * RATES_EACH, (number + 1) * RATES_EACH)],
        end - 16 * MINUTE,  # what is not late is at most 6 minutes before the end
    )


STREAM: Final = [portion(number) for number in range(PORTIONS)]
_BEFORE: Final = [None, *(each.watermark for each in STREAM)]
ARRIVALS: Final = [
    Arrival(record, watermark)
    for each, watermark in zip(STREAM, _BEFORE, strict=False)
    for record in each.orders
]
RATE_ARRIVALS: Final = [
    Arrival(record, watermark)
    for each, watermark in zip(STREAM, _BEFORE, strict=False)
    for record in each.rates
]
ORDERS: Final[list[Order]] = [each.record for each in ARRIVALS]
RATES: Final[list[Rate]] = [each.record for each in RATE_ARRIVALS]


def row(record: Any) -> tuple[Any, ...]:
    """A record as lives show it."""
    return msgspec.structs.astuple(record)
