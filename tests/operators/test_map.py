"""map: results in order with their event times, into objects or columns, plain or coroutine."""

from __future__ import annotations

import asyncio
import pickle

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import UserCodeError
from headgate.operators.elements import ObjectBatch
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.per_record.operators import AsyncMapOperator, MapOperator
from headgate.operators.rows import PER_RECORD_ROWS, RowReader

ORIGIN = Origin("job.py:5", "stream.map(price)")
INTO = pa.schema([pa.field("url", pa.string()), pa.field("m", pa.int64(), False)])


class Scored(msgspec.Struct):
    url: str
    m: int


def user(function, schema=None, into=None, in_flight=100):
    return UserFunction(function, "map", ORIGIN, RowReader(schema, None, function), into, in_flight)


def test_objects_to_objects(harness):
    run = harness(MapOperator(user(lambda x: x + 1)))
    run.push(ObjectBatch([1, 2], np.array([10, 20]))).push(ObjectBatch([3], np.array([30])))
    assert run.records == [2, 3, 4]
    assert run.times == [10, 20, 30]


def test_columns_to_columns(harness, world):
    run = harness(MapOperator(user(lambda row: Scored(row.url, row.n * 2), world.schema, INTO)))
    run.push(world.batch(3))
    assert run.batches[0].data.schema == INTO
    assert run.records == [{"url": f"u{i}", "m": i * 2} for i in range(3)]
    assert run.times == [0, 1_000, 2_000]


def test_nulls_reach_the_function_as_none(harness, world):
    run = harness(MapOperator(user(lambda row: row.user_id, world.schema))).push(world.batch(5))
    assert run.records == ["user-0", "user-1", "user-2", "user-3", None]


def test_large_batches_are_worked_on_in_pieces(harness):
    count = PER_RECORD_ROWS * 2 + 1
    run = harness(MapOperator(user(lambda x: x))).push(ObjectBatch(list(range(count))))
    assert [len(batch) for batch in run.batches] == [PER_RECORD_ROWS, PER_RECORD_ROWS, 1]
    assert run.records == list(range(count))


def fail(x):
    return 1 // x


async def fail_later(x):
    await asyncio.sleep(0)
    return 1 // x


@pytest.mark.parametrize(
    ("operator", "function"), [(MapOperator, fail), (AsyncMapOperator, fail_later)]
)
def test_an_exception_names_step_line_and_record(harness, operator, function):
    with pytest.raises(UserCodeError) as caught:
        harness(operator(user(function))).push(ObjectBatch([3, 0, 1]))
    error = caught.value
    assert str(error) == (
        "the function of `map` raised ZeroDivisionError: integer division or modulo by zero record=`0`\n"
        "  at job.py:5  stream.map(price)"
    )
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "return 1 // x" in error.detail
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_long_record_is_shown_in_part(harness):
    with pytest.raises(UserCodeError) as caught:
        harness(MapOperator(user(len))).push(
            ObjectBatch([msgspec.Raw(b"1"), Scored("x" * 9_999, 1)])
        )
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("operator", [MapOperator, AsyncMapOperator])
def test_a_result_that_does_not_fit_names_its_record(harness, world, operator):
    def score(row):
        return {"url": "a", "m": None if row.n == 2 else 1}

    async def score_async(row):
        return score(row)

    function = score if operator is MapOperator else score_async
    with pytest.raises(UserCodeError) as caught:
        harness(operator(user(function, world.schema, INTO))).push(world.batch(4))
    assert caught.value.message.startswith(
        "the function of `map` returned None for column `m`, which is not optional record=`Row("
    )
    assert "n=2" in caught.value.message
    assert caught.value.fix == "the columns given with into= are: url: string, m: int64"


def test_coroutines_keep_the_order_and_their_bound(harness):
    """Later records finish first; never more than the bound are under way."""
    running = peak = 0

    async def slow(x):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(50 - x):
            await asyncio.sleep(0)
        running -= 1
        return -x

    run = harness(AsyncMapOperator(user(slow, in_flight=7)))
    run.push(ObjectBatch(list(range(50)), np.arange(50)))
    assert run.records == [-x for x in range(50)]
    assert run.times == list(range(50))
    assert peak == 7


def test_one_failing_coroutine_stops_the_others():
    finished = []

    async def work(x):
        if x == 0:
            raise ValueError("no")
        await asyncio.sleep(10)
        finished.append(x)

    with pytest.raises(UserCodeError, match="raised ValueError: no record=`0`"):
        asyncio.run(user(work).apply_async([0, 1, 2]))
    assert finished == []


def test_cancelling_cancels_the_calls_in_flight():
    begun, cancelled = [], []

    async def work(x):
        begun.append(x)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(x)
            raise

    async def main():
        task = asyncio.create_task(user(work).apply_async([1, 2]))
        while len(begun) < 2:  # noqa: ASYNC110  it is a list
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sorted(cancelled) == [1, 2]
