"""Jobs to put into a harness."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, from_list

T0 = datetime(2026, 3, 1, tzinfo=UTC)


class Click(msgspec.Struct, frozen=True):
    user: str
    amount: int
    at: datetime


class Count(msgspec.Struct, frozen=True):
    user: str
    n: int
    total: int


class Spending(hg.KeyedProcess):
    """(user, sum so far, number so far) for each record."""

    total = hg.ValueState[int](default=0)
    seen = hg.ListState[int]()

    def on_record(self, record: Any, ctx: Any) -> Any:
        self.total.set(self.total.get() + record[1])
        self.seen.add(record[1])
        yield (ctx.key, self.total.get(), len(self.seen.get()))


def windows(guarantee: str = "exactly_once", **event_time: Any) -> hg.Job:
    """Counts per user and minute."""
    job = hg.Job("windows")
    job.checkpoint(every="1h", storage="never-made")
    clicks = job.read(from_list([], schema=Click), name="clicks").event_time("at", **event_time)
    counts = (
        clicks.key_by("user")
        .window(hg.tumbling("1m"))
        .agg(n=hg.count(), total=hg.sum("amount"), name="counts")
    )
    counts.map(lambda row: Count(row.user, row.n, row.total), into=Count).write(
        collect(guarantee=guarantee), name="out"
    )
    return job


def spending(guarantee: str = "exactly_once") -> hg.Job:
    """A process function with state, on Python objects."""
    job = hg.Job("spending")
    job.checkpoint(every="1h", storage="never-made")
    (
        job.read(from_list([]), name="payments")
        .key_with(lambda pair: pair[0])
        .process(Spending(), name="spending")
        .write(collect(guarantee=guarantee), name="out")
    )
    return job


@pytest.fixture
def t0() -> datetime:
    return T0


@pytest.fixture
def click() -> type[Click]:
    return Click


@pytest.fixture
def count() -> type[Count]:
    return Count


@pytest.fixture
def windows_job() -> Callable[..., hg.Job]:
    return windows


@pytest.fixture
def spending_job() -> Callable[..., hg.Job]:
    return spending
