"""map_async of keyed streams: one call of a key at a time, keys beside each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import PlanError, UserCodeError


class Journal:
    """Notes when calls begin and end: the first of a key is the slowest."""

    def __init__(self, wait_ms: dict[Any, int] | None = None) -> None:
        self.events: list[tuple[str, Any]] = []
        self.wait_ms = wait_ms or {}

    async def __call__(self, record: Any) -> Any:
        self.events.append(("begin", record))
        await asyncio.sleep(self.wait_ms.get(record, 10) / 1000)
        self.events.append(("end", record))
        return record

    def of(self, key: str) -> list[tuple[str, Any]]:
        return [event for event in self.events if event[1][0] == key]


def keyed(world: Any, journal: Any, **given: Any) -> Any:
    return world.source().key_with(lambda r: r[0]).map_async(journal, name="ask", **given)


def test_calls_of_a_key_follow_each_other(bench: Any, world: Any) -> None:
    records = [("a", 1), ("a", 2), ("b", 1), ("a", 3), ("c", 1)]
    journal = Journal({("a", 1): 50, ("a", 2): 5})
    step = bench(keyed(world, journal)).push(records).advance(10)
    assert sorted(step.take()) == [("b", 1), ("c", 1)]
    step.advance(60)
    assert step.take() == [("a", 1), ("a", 2), ("a", 3)]
    assert journal.of("a") == [(what, ("a", n)) for n in (1, 2, 3) for what in ("begin", "end")]


def test_a_key_goes_on_behind_a_watermark_that_waits(bench: Any, world: Any) -> None:
    journal = Journal({("b", 1): 100})
    step = bench(keyed(world, journal))
    step.push([("b", 1), ("a", 1)], [1, 1]).watermark(1).push([("a", 2)], [2]).advance(20)
    assert ("end", ("a", 2)) in journal.events
    assert step.events == [("main", ("a", 1))]
    step.advance(80)
    assert step.events == [("main", ("b", 1)), ("watermark", 1), ("main", ("a", 2))]


def test_a_key_goes_on_after_a_timeout_and_after_a_failure(bench: Any, world: Any) -> None:
    async def ask(record: Any) -> Any:
        if record[1] == 2:
            raise ValueError("two")
        await asyncio.sleep(1 if record[1] == 1 else 0.01)
        return record

    stream = keyed(world, ask, timeout="20ms", on_timeout="side_output", on_error="side_output")
    step = bench(stream).push([("a", n) for n in range(5)]).advance(100)
    assert step.take() == [("a", 0), ("a", 3), ("a", 4)]
    assert step.take("timed_out") == [("a", 1)]
    assert [letter.record for letter in step.take("failed")] == [("a", 2)]


def test_keys_that_are_equal_in_python_alone_do_not_wait(bench: Any, world: Any) -> None:
    journal = Journal()
    step = bench(keyed(world, journal)).push([(1, "x"), (True, "x")])
    assert len(journal.events) == 2
    step.advance(10)


@pytest.mark.parametrize("after", [1, 3])
def test_records_go_to_the_subtask_of_their_key(bench: Any, world: Any, after: int) -> None:
    journal = Journal()
    step = bench(keyed(world, journal, max_in_flight=4), 2)
    records = [(key, n) for n in range(3) for key in "abcdefgh"]
    for at in range(2):
        step.push([r for r in records if step.owner(r[0]) == at], at=at)
    journal.events.clear()
    step.restart(after)
    for index, operator in enumerate(step.operators):
        assert {step.owner(call.argument[0]) for call in operator._calls} <= {index}
    step.advance(500)
    assert sorted(step.take()) == sorted(records)
    for key in "abcdefgh":
        assert journal.of(key) == [(what, (key, n)) for n in range(3) for what in ("begin", "end")]


def test_key_columns(bench: Any, world: Any) -> None:
    log: list[Any] = []

    async def ask(row: Any) -> int:
        log.append(row.n)
        await asyncio.sleep(0.01)
        return int(row.n)

    schema = {"user": "string", "day": "int64", "n": "int64", "other": "double"}
    stream = world.source(schema).key_by("user", "day").map_async(ask, name="ask")
    data = pa.record_batch(
        {"user": ["a", "a", None, None], "day": [1, 1, 1, 1], "n": [1, 2, 3, 4], "other": [0.5] * 4}
    )
    step = bench(stream).push_columns(data)
    assert sorted(log) == [1, 3]
    step.restart(3).restart(1)
    assert sorted(step.advance(20).take()) == [1, 2, 3, 4]


def test_a_snapshot_has_a_row_per_key_group(bench: Any, world: Any) -> None:
    """One per record would have the columns' names with each."""
    schema = {"user": "string", "n": "int64"}

    async def ask(row: Any) -> int:
        await asyncio.sleep(0.01)
        return int(row.n)

    stream = world.source(schema).key_by("user").map_async(ask, name="ask", max_in_flight=1_000)
    users = [f"user {n % 40}" for n in range(600)]
    step = bench(stream).push_columns(pa.record_batch({"user": users, "n": range(600)}))
    table = step.operators[0].snapshot(1).tables["in-flight"].make(None)
    groups = table.column("key_group").to_pylist()
    assert groups == list(range(12))
    # The columns' names and types once per group, not with each record.
    assert sum(map(len, table.column("records").to_pylist())) < 12 * 1_000 + 600 * 30
    step.restart(3)
    found = step.advance(1_000).take()
    assert sorted(found) == list(range(600))
    for user in range(40):
        assert [n for n in found if n % 40 == user] == list(range(user, 600, 40))


def test_a_key_function_that_fails_names_the_record(bench: Any, world: Any) -> None:
    stream = world.source().key_with(lambda r: 1 // r).map_async(Journal(), name="ask")
    with pytest.raises(UserCodeError, match="ask. raised ZeroDivisionError.*record=`0`"):
        bench(stream).push([1, 0])


def test_a_keyed_step_needs_a_name(world: Any) -> None:
    with pytest.raises(PlanError, match="async step has no name"):
        world.source().key_with(lambda r: r).map_async(Journal(), name="")


def test_retries_keep_the_order_of_a_key(bench: Any, world: Any) -> None:
    failed: set[Any] = set()

    async def ask(record: Any) -> Any:
        if record not in failed:
            failed.add(record)
            raise ConnectionError
        return record

    stream = keyed(world, ask, retry=hg.Retry(attempts=2, delay="10ms"))
    step = bench(stream).push([("a", n) for n in range(4)]).advance(100)
    assert step.take() == [("a", n) for n in range(4)]
