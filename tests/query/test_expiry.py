"""Queries of values that expire: a query neither shows them after their time, nor lets them live longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.operators.queries import QueriedEntries
from headgate.state.keyed.base import ABSENT
from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]
Steps = Callable[..., Step]
SCHEMA = pa.schema([pa.field("user", pa.string()), pa.field("n", pa.int64())])
LIFE = hg.StateTtl("1s", update="read_and_write", cleanup_per_access=0, cleanup_per_second=0)


class Remember(hg.KeyedProcess[str, Any, Any]):
    """Keeps the last number and all numbers of a user, and when it was last seen in event time."""

    last = hg.ValueState[int](ttl=LIFE, queryable="last")
    each = hg.MapState[int, int](ttl=LIFE, queryable="each")
    seen = hg.ValueState[int](ttl=hg.StateTtl("1s", time="event"), queryable="seen")

    def on_record(self, record: Any, ctx: Any) -> None:
        self.last.set(record.n)
        self.each.put(record.n, record.n * 10)
        self.seen.set(record.n)


def by_user() -> Any:
    (stream,) = streams()
    return stream.map(lambda record: record, into=SCHEMA).key_by("user")


def push(step: Step, *rows: tuple[str, int], at: int | None = None) -> None:
    names = ["user", "n"]
    data = pa.RecordBatch.from_pylist([dict(zip(names, row, strict=True)) for row in rows], SCHEMA)
    step.push_columns(data, None if at is None else [at] * len(rows), key="user")


def query(step: Step, state: str, key: Any) -> Any:
    (operator,) = step.operators
    found = operator.query(state, key)
    return sorted(found.entries) if isinstance(found, QueriedEntries) else found


def checkpoint(step: Step) -> None:
    """Begin a checkpoint, for which state on disk leaves the memory."""
    (operator,) = step.operators
    operator.snapshot(1)


def check_life(step: Step, state: str, one: Any, three: Any, checkpoints: bool = False) -> None:
    """A value lives for a second after its last record, however often it is asked for."""
    push(step, ("a", 1), ("b", 2))
    if checkpoints:
        checkpoint(step)
    for _ in range(9):
        step.clock.advance(100)
        assert query(step, state, "a") == one
        assert query(step, state, "c") is ABSENT
    push(step, ("b", 3))
    if checkpoints:
        checkpoint(step)
    step.clock.advance(100)
    assert query(step, state, "a") is ABSENT
    assert query(step, state, "b") == three
    step.clock.advance(900)
    assert query(step, state, "b") is ABSENT


@pytest.mark.parametrize("checkpoints", [False, True])
def test_running_aggregates(steps: Steps, checkpoints: bool) -> None:
    made = by_user().agg(n=hg.count(), top=hg.max("n"), name="agg", ttl="1s", queryable="agg")
    check_life(steps(made), "running", {"n": 1, "top": 1}, {"n": 2, "top": 3}, checkpoints)


def test_reduce(steps: Steps) -> None:
    made = by_user().reduce(lambda _, record: record, name="last", ttl="1s", queryable="last")
    step = steps(made)
    check_life(step, "reduce", {"user": "a", "n": 1}, {"user": "b", "n": 3})


def test_process_functions(steps: Steps) -> None:
    step = steps(by_user().process(Remember(), name="p"))
    check_life(step, "last", 1, 3)
    push(step, ("a", 1))
    step.clock.advance(500)
    push(step, ("a", 2))
    assert query(step, "each", "a") == [(1, 10), (2, 20)]
    step.clock.advance(500)
    assert query(step, "each", "a") == [(2, 20)]
    step.clock.advance(500)
    assert query(step, "each", "a") == []


def test_by_event_time(steps: Steps) -> None:
    step = steps(by_user().process(Remember(), name="p"))
    push(step, ("a", 1), at=5_000)
    step.clock.advance(100_000)
    step.watermark(5_999)
    assert query(step, "seen", "a") == 1
    step.watermark(6_000)
    assert query(step, "seen", "a") is ABSENT


@pytest.mark.parametrize("type_", [pa.int64(), pa.int16(), pa.string(), pa.timestamp("ms", "UTC")])
def test_keys_that_are_null_or_unknown(steps: Steps, type_: pa.DataType) -> None:
    schema = pa.schema([pa.field("k", type_), pa.field("n", pa.int64())])
    (stream,) = streams()
    keyed = stream.map(lambda record: record, into=schema).key_by("k")
    step = steps(keyed.agg(n=hg.sum("n"), name="agg", queryable="agg"))
    values = pa.array([7, 500, 7, 3]).cast(type_)
    known = values.to_pylist()
    (unknown,) = pa.array([8]).cast(type_).to_pylist()

    def check(with_null: object) -> None:
        assert query(step, "running", known[0]) == {"n": 4}
        assert query(step, "running", known[1]) == {"n": 2}
        assert query(step, "running", unknown) is ABSENT
        assert query(step, "running", None) == with_null

    assert query(step, "running", unknown) is ABSENT
    step.push_columns(pa.RecordBatch.from_arrays([values, pa.array([1, 2, 3, 4])], schema=schema))
    check(ABSENT)
    assert query(step, "running", unknown) is ABSENT  # a query adds no key
    nulls = pa.array([None], type_)
    step.push_columns(pa.RecordBatch.from_arrays([nulls, pa.array([9])], schema=schema))
    check({"n": 9})
    checkpoint(step)
    check({"n": 9})
