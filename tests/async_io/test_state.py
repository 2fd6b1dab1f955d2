"""Records under way are state: after a restore they are called for again, wherever they are then."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

from headgate.api.stream import output_of
from headgate.errors import StateError


def test_records_under_way_are_called_for_again(bench: Any, world: Any) -> None:
    service = world.service()
    step = bench(world.source().map_async(service.ask, max_in_flight=2, name="ask"))
    step.push([30, 10, 20], [1, 2, 3]).advance(15)
    step.restart()
    assert sorted(service.asked) == [10, 10, 30, 30]
    step.advance(100)
    assert step.take_timed() == [(300, 1), (100, 2), (200, 3)]


def test_what_left_before_the_barrier_is_not_called_for_again(bench: Any, world: Any) -> None:
    service = world.service()
    step = bench(world.source().map_async(service.ask, ordered=False, name="ask"))
    step.push([30, 10]).advance(15).restart()
    assert sorted(service.asked) == [10, 30, 30]
    assert step.advance(100).take() == [100, 300]


def test_a_snapshot_is_of_its_moment(bench: Any, world: Any) -> None:
    step = bench(world.source().map_async(world.service().ask, name="ask")).push([10, 20])
    snapshot = step.operators[0].snapshot(1)
    step.push([30]).advance(15)
    step.operators[0].snapshot = lambda checkpoint_id: snapshot
    step.restart()
    assert sorted(step.advance(50).take()) == [100, 100, 200]


def test_records_are_stored_as_they_came(bench: Any, world: Any) -> None:
    """The function changes its record in place, also while the snapshot is written."""
    service = world.service()

    async def change(record: dict[str, Any]) -> dict[str, Any]:
        record["seen"] = record.get("seen", 0) + 1
        await service.ask(10)
        return record

    step = bench(world.source().map_async(change, name="ask")).push([{"a": 1}, {"a": 2}])
    step.restart().advance(10)
    assert step.take() == [{"a": 1, "seen": 1}, {"a": 2, "seen": 1}]


def test_columns_are_stored_as_they_came(bench: Any, world: Any) -> None:
    """Columns the function does not read, nulls and dictionaries included."""
    names = pa.array(["x", None, "y"]).dictionary_encode()
    data = pa.record_batch({"n": [10, 20, 30], "name": names, "at": [None, 2.5, 3.5]})
    stream = world.source(data.schema).map_async(
        self_of_row(world), timeout="50ms", on_timeout="side_output", name="ask"
    )
    step = bench(stream).push_columns(data, [1, 2, 3]).restart(2).restart(1).advance(100)
    assert step.take() == [10, 20]
    assert step.take_timed("timed_out") == [({"n": 30, "name": "y", "at": 3.5}, 3)]


def self_of_row(world: Any) -> Any:
    service = world.service(lambda n: 1_000 if n == 30 else n)

    async def ask(row: Any) -> Any:
        await service.ask(row.n)
        return row.n

    return ask


@pytest.mark.parametrize("after", [1, 3, 5])
def test_records_are_dealt_out_anew(bench: Any, world: Any, after: int) -> None:
    service = world.service(lambda n: 10)
    step = bench(world.source().map_async(service.ask, name="ask"), 2)
    step.push(list(range(40)), list(range(40))).push([77, 78, 79], [7, 8, 9], at=1)
    step.restart(after)
    held = [len(operator._calls) for operator in step.operators]
    assert sum(held) == 43
    assert min(held) > 0 or after == 5
    expected = sorted([(n * 10, n) for n in range(40)] + [(770, 7), (780, 8), (790, 9)])
    assert sorted(step.advance(10).take_timed()) == expected


def test_more_records_than_there_is_room_for_wait(bench: Any, world: Any) -> None:
    service = world.service(lambda n: 10)
    step = bench(world.source().map_async(service.ask, max_in_flight=5, name="ask"), 4)
    for at in range(4):
        step.push([at * 5 + i for i in range(5)], at=at)
    step.restart(1)
    assert step.operators[0].full()
    service.most = 0
    assert sorted(step.advance(40).take()) == [n * 10 for n in range(20)]
    assert service.most == 5


def test_what_is_stored_for_a_barrier_is_bounded(bench: Any, world: Any) -> None:
    """A barrier of another channel may be long in coming."""
    step = bench(world.source().map_async(world.service(lambda n: 10).ask, name="ask"))
    (operator,) = step.operators
    assert operator.stores_what_waits
    step.push([0] * 60_000)
    assert operator.full()
    assert operator.stores_what_waits
    step.push([0] * 6_000)
    assert not operator.stores_what_waits
    step.advance(100)
    assert operator.full()
    assert operator.stores_what_waits


@pytest.mark.parametrize(("most", "stores"), [("0", False), ("899", False), ("901", True)])
def test_the_bound_is_an_option(bench: Any, world: Any, most: str, stores: bool) -> None:
    step = bench(
        world.source().map_async(world.service().ask, name="ask"),
        options={"headgate.async.waiting-records": most},
    )
    (operator,) = step.operators
    assert operator.stores_what_waits == (most != "0")
    step.push([10] * 1_000)
    assert operator.stores_what_waits == stores


def test_records_of_large_batches_under_way_do_not_wait(bench: Any, world: Any) -> None:
    """Two batches that hang, of more records than may wait: the next barrier still passes them."""

    async def hang(batch: pa.RecordBatch) -> pa.RecordBatch:
        await asyncio.sleep(3_600)
        return batch

    schema = {"n": "int64"}
    step = bench(world.source(schema).map_batches(hang, rows=40_000, max_in_flight=2, name="hang"))
    step.push_columns(pa.record_batch({"n": range(81_000)}))
    (operator,) = step.operators
    assert operator.full()
    assert operator.stores_what_waits


def test_a_record_that_cannot_be_stored_fails_the_checkpoint(bench: Any, world: Any) -> None:
    async def ask(n: Any) -> str:
        await world.service().ask(10)
        return "answer"

    step = bench(world.source().map_async(ask, name="ask")).push([(n for n in range(3))])
    cut = step.operators[0].snapshot(1)
    with pytest.raises(StateError, match="a record cannot be pickled step=`ask`: cannot pickle"):
        cut.items["in-flight"].items()
    assert step.advance(10).take() == ["answer"]


def test_other_columns_are_refused(bench: Any, world: Any) -> None:
    async def ask(row: Any) -> Any:
        await world.service().ask(10)
        return row

    def stream(schema: Any) -> Any:
        return world.source(schema).map_async(ask, name="ask")

    step = bench(stream({"a": "int64", "b": "string"}))
    step.push_columns(pa.record_batch({"a": [1], "b": ["x"]}))
    step.node = output_of(stream({"a": "string", "b": "string"})).node
    with pytest.raises(
        StateError, match="do not fit the step step=`ask`: column `a` is int64"
    ) as e:
        step.restart()
    assert "test_state.py" in e.value.where
    other = bench(stream({"a": "int64", "b": "string"}))
    other.push_columns(pa.record_batch({"a": [1], "b": ["x"]}))
    other.node = output_of(stream(None)).node
    with pytest.raises(StateError, match="the stream is now of Python objects, and was not"):
        other.restart()


def test_the_order_of_columns_may_change(bench: Any, world: Any) -> None:
    async def ask(row: Any) -> Any:
        await world.service().ask(10)
        return (row.a, row.b)

    def stream(schema: Any) -> Any:
        return world.source(schema).map_async(ask, name="ask")

    step = bench(stream({"a": "int64", "b": "string"}))
    step.push_columns(pa.record_batch({"a": [1], "b": ["x"]}))
    step.node = output_of(stream({"b": "string", "a": "int64"})).node
    assert step.restart().advance(10).take() == [(1, "x")]
