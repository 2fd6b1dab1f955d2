"""A job whose steps are all queryable, and what its states have to be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

import headgate as hg
from headgate.connectors import blackhole, from_list

USERS = 11
"""The number of keys; a prime, so that batches begin with different ones."""
ROWS = [{"user": f"u{n % USERS}", "n": n} for n in range(1_000)]
BATCH = 50


def as_of(name: str) -> hg.Queryable:
    return hg.Queryable(name, committed=True)


class Totals(msgspec.Struct):
    """The aggregate of an AggregatingState: the sum, and how many there were."""

    total: int = 0
    count: int = 0


class Mean:
    """The mean of whole numbers, and their number."""

    def create(self) -> Totals:
        return Totals()

    def add(self, accumulator: Totals, value: int) -> Totals:
        accumulator.total += value
        accumulator.count += 1
        return accumulator

    def result(self, accumulator: Totals) -> dict[str, float]:
        return {"mean": accumulator.total / accumulator.count, "count": accumulator.count}


def plus(one: int, other: int) -> int:
    return one + other


class Remember(hg.KeyedProcess[Any, Any, Any]):
    """Keeps what it sees of a user in a state of each kind."""

    latest = hg.ValueState[int](queryable="latest")
    first = hg.ListState[int](queryable=as_of("first"), ttl="1d")
    parity = hg.MapState[str, int](queryable=as_of("parity"))
    total = hg.ReducingState[int](plus, queryable=as_of("total"), ttl="1d")
    mean = hg.AggregatingState[int, Totals, dict[str, float]](Mean, queryable=as_of("mean"))
    hidden = hg.ValueState[int]()

    def on_record(self, record: Any, ctx: Any) -> None:
        self.latest.set(record.n)
        if record.n < 5 * USERS:
            self.first.add(record.n)
        name = "odd" if record.n % 2 else "even"
        self.parity.put(name, (self.parity.get(name) or 0) + 1)
        self.total.add(record.n)
        self.mean.add(record.n)
        self.hidden.set(record.n)


def largest(one: Any, other: Any) -> Any:
    return other if other.n > one.n else one


def model(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what each state has for each user once these rows are through."""
    found: dict[str, dict[str, Any]] = {}
    for user in sorted({row["user"] for row in rows}):
        numbers = [row["n"] for row in rows if row["user"] == user]
        sums = {"count": len(numbers), "total": sum(numbers)}
        parity = Counter("odd" if n % 2 else "even" for n in numbers)
        found[user] = {
            "sums": sums,
            "fading-sums": sums,
            "largest": {"user": user, "n": max(numbers)},
            "fading-largest": {"user": user, "n": max(numbers)},
            "latest": numbers[-1],
            "first": [n for n in numbers if n < 5 * USERS],
            "parity": dict(parity),
            "total": sum(numbers),
            "mean": {"mean": sum(numbers) / len(numbers), "count": len(numbers)},
        }
    return found


def shown(answer: dict[str, Any]) -> Any:
    """Return the value of an answer, with maps as dicts."""
    value = answer["value"]
    if answer["kind"] == "map" and value is not None:
        return {each["key"]: each["value"] for each in value}
    return value


def queryable_job(lab: Any, parallelism: int = 2, **options: str) -> hg.Job:
    job = hg.Job("clicks", parallelism=parallelism, max_parallelism=32, options=options)
    job.checkpoint(every="20ms", storage=lab.storage)
    job.restart(hg.fixed_delay(attempts=10, delay="1ms"))
    source = from_list(ROWS, schema={"user": "string", "n": "int64"}, batch_rows=BATCH)
    by_user = job.read(source, name="in").key_by("user")
    aggregates: dict[str, Any] = {"count": hg.count(), "total": hg.sum("n")}
    by_user.agg(**aggregates, name="sums", queryable=as_of("sums")).write(blackhole(), name="out-1")
    fading = by_user.agg(**aggregates, name="fading-sums", queryable=as_of("fading-sums"), ttl="1d")
    fading.write(blackhole(), name="out-2")
    reduced = by_user.reduce(largest, name="largest", queryable=as_of("largest"))
    reduced.write(blackhole(), name="out-3")
    kept = by_user.reduce(
        largest, name="fading-largest", queryable=as_of("fading-largest"), ttl="1d"
    )
    kept.write(blackhole(), name="out-4")
    by_user.process(Remember(), name="remember").write(blackhole(), name="out-5")
    return job
