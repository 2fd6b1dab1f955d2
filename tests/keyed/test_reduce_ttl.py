"""Values of `reduce` that expire, under both state backends, against a dict with times."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import PlanError, UserCodeError
from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]
Steps = Callable[..., Step]
TTL_MS = 1_000


SCHEMA = pa.schema(
    [
        pa.field("user", pa.string()),
        pa.field("n", pa.int64()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("paid", pa.decimal128(10, 2)),
    ]
)


def add(value: tuple[str, int], record: tuple[str, int]) -> tuple[str, int]:
    return value[0], value[1] + record[1]


def absorb(value: Any, record: Any) -> Any:
    """Changes its value in place."""
    value.numbers += record.numbers
    return value


class Numbers:
    def __init__(self, user: str, numbers: list[int]) -> None:
        self.user, self.numbers = user, numbers


def tuples(ttl: Any) -> Any:
    return streams()[0].key_with(lambda record: record[0]).reduce(add, name="sum", ttl=ttl)


def visits(ttl: Any) -> Any:
    columns = streams()[0].map(lambda record: record, into=SCHEMA)
    return columns.key_by("user").reduce(
        lambda a, b: type(b)(a.user, a.n + b.n, b.at, b.paid), name="sum", ttl=ttl
    )


class Model:
    """The value of each key, and when it was last used."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.values: dict[str, tuple[int, int]] = {}

    def add(self, key: str, n: int, now: int) -> int:
        value, used = self.values.get(key, (0, now))
        if used <= now - self.ttl_ms:
            value = 0
        self.values[key] = value + n, now
        return value + n


@pytest.mark.parametrize("seed", range(6))
def test_values_are_those_of_the_model(steps: Steps, seed: int) -> None:
    rng, model = random.Random(seed), Model(TTL_MS)
    step = steps(tuples("1s"), rng.randint(1, 3))
    for _ in range(60):
        records = [(f"k{rng.randrange(9)}", rng.randrange(10)) for _ in range(rng.randrange(6))]
        expected = sorted((k, model.add(k, n, step.clock.ms)) for k, n in records)
        step.push(records, key=lambda record: record[0])
        assert sorted(value for value, _ in step.take()) == expected
        step.clock.advance(rng.choice([0, 1, 300, 500, 999, 1_000]))
        if rng.random() < 0.15:
            step.restart(rng.randint(1, 3))


@pytest.mark.parametrize("ttl", [None, "1s"])
def test_columns_come_back_as_they_were(steps: Steps, ttl: str | None) -> None:
    """Also without a time to live, where the values lie on disk."""
    step = steps(visits(ttl), 2)
    at = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)

    def push(n: int) -> list[dict[str, Any]]:
        rows = [
            (f"u{i}", n, at, Decimal("1.50") * n) if i else ("u0", n, None, None) for i in range(5)
        ]
        columns = [
            pa.array(values, field.type)
            for values, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)
        ]
        step.push_columns(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), key="user")
        return sorted((row for row, _ in step.take()), key=lambda row: row["user"])

    push(1)
    step.restart(3)
    found = push(2)
    assert [row["n"] for row in found] == [3] * 5
    assert found[1] == {"user": "u1", "n": 3, "at": at, "paid": Decimal("3.00")}
    assert found[0] == {"user": "u0", "n": 3, "at": None, "paid": None}
    step.clock.advance(timedelta(seconds=1) // timedelta(milliseconds=1))
    assert [row["n"] for row in push(4)] == [4 if ttl else 7] * 5


def test_a_value_that_is_changed_in_place_stays_the_function_s_own(steps: Steps) -> None:
    stream = streams()[0].key_with(lambda record: record.user).reduce(absorb, name="r", ttl="1s")
    step = steps(stream)
    step.push([Numbers("a", [1])]).push([Numbers("a", [2])]).restart().push([Numbers("a", [3])])
    assert [value.numbers for value, _ in step.take()] == [[1], [1, 2], [1, 2, 3]]


def test_expired_values_are_removed_without_access(steps: Steps) -> None:
    """In the background, and from snapshots before that."""
    step = steps(tuples(hg.StateTtl("1s", cleanup_per_access=0)))
    step.push([(f"k{i}", 1) for i in range(50)], key=lambda record: record[0])
    stored = step.operators[0]._stored
    assert len(list(stored._backend.addresses("reduce"))) == 50
    step.clock.ms += 1_000
    cut = stored.snapshot()
    if cut.tables:
        assert cut.tables["reduce"].make(None).num_rows == 0
    else:
        assert sum(table.num_rows for table in cut.files["reduce"].tables()) == 0
        cut.files["reduce"].release()
    step.clock.advance(2_000)
    assert not list(stored._backend.addresses("reduce"))


def test_switched_on_what_is_there_counts_as_used_at_the_restore(steps: Steps) -> None:
    step = steps(tuples(None))
    step.push([("a", 1)])
    step.clock.advance(10_000)
    step.restart(stream=tuples("1s"))
    step.clock.advance(999)
    step.push([("a", 2)])
    step.clock.advance(1_000)
    step.push([("a", 4)])
    assert [value for value, _ in step.take()] == [("a", 1), ("a", 3), ("a", 4)]


def test_switched_off_what_is_there_stays(steps: Steps) -> None:
    step = steps(tuples("1s"))
    step.push([("a", 1)])
    step.restart(stream=tuples(None))
    step.clock.advance(10_000)
    step.push([("a", 2)])
    assert [value for value, _ in step.take()] == [("a", 1), ("a", 3)]


def test_the_duration_can_change(steps: Steps) -> None:
    step = steps(tuples("1s"))
    step.push([("a", 1), ("b", 1)], key=lambda record: record[0])
    step.clock.advance(900)
    step.restart(stream=tuples("2s"))
    step.clock.advance(900)
    step.push([("a", 2)])
    step.restart(stream=tuples("500ms"))
    step.push([("b", 2)])
    assert [value for value, _ in step.take()] == [("a", 1), ("b", 1), ("a", 3), ("b", 2)]


def test_what_the_function_raises_names_its_record(steps: Steps) -> None:
    def fail(value: Any, record: Any) -> Any:
        raise ValueError("no")

    stream = streams()[0].key_with(lambda record: record[0]).reduce(fail, name="r", ttl="1s")
    with pytest.raises(UserCodeError, match="no"):
        steps(stream).push([("a", 1)]).push([("a", 2)])


@pytest.mark.parametrize(
    ("ttl", "message"),
    [
        (hg.StateTtl("1s", time="event"), "time=`processing` only"),
        (hg.StateTtl("1s", expired="return_if_not_cleaned_up"), "expired=`never_return` only"),
        ("0s", "at least 1 ms"),
        ("soon", "ttl"),
        (5, "ttl must be a duration"),
    ],
)
def test_what_a_time_to_live_may_be(ttl: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        tuples(ttl)
