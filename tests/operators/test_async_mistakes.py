"""Coroutines in the wrong place, and functions that raise what an event loop takes for its own."""

from __future__ import annotations

import asyncio
import functools

import pytest

from headgate.errors import PlanError, UserCodeError
from headgate.operators.base import Operator
from headgate.operators.elements import ObjectBatch
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.per_record.map_batches import (
    AsyncMapBatchesOperator,
    BatchFunction,
    MapBatchesOperator,
)
from headgate.operators.per_record.operators import (
    AsyncFlatMapOperator,
    AsyncMapOperator,
    FilterOperator,
    FlatMapOperator,
    MapOperator,
)
from headgate.operators.rows import RowReader
from headgate.runtime.task.chain import ChainedOperator, ChainOutput, with_context


def user(function):
    return UserFunction(function, "step", Origin("job.py:5"), RowReader(None, None, function))


def cancel(record):
    raise asyncio.CancelledError


async def cancel_async(record):
    await asyncio.sleep(0)
    raise asyncio.CancelledError


async def await_cancelled(record):
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    return await future


def yield_cancelled(record):
    yield record
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("operator", "function"),
    [
        (MapOperator, cancel),
        (FilterOperator, cancel),
        (FlatMapOperator, cancel),
        (FlatMapOperator, yield_cancelled),
        (AsyncMapOperator, cancel_async),
        (AsyncMapOperator, await_cancelled),
        (AsyncFlatMapOperator, cancel_async),
    ],
)
def test_a_cancellation_raised_by_the_function_is_its_error(harness, operator, function):
    with pytest.raises(UserCodeError, match="of `step` raised CancelledError record=`7`"):
        harness(operator(user(function))).push(ObjectBatch([7]))


@pytest.mark.parametrize(
    ("operator", "function"),
    [(MapBatchesOperator, cancel), (AsyncMapBatchesOperator, cancel_async)],
)
def test_so_it_is_with_whole_batches(harness, world, operator, function):
    step = BatchFunction(function, "step", Origin("job.py:5"), world.schema)
    with pytest.raises(UserCodeError, match="of `step` raised CancelledError"):
        harness(operator(step)).push(world.batch(2))


def test_what_sinks_and_sources_raise_is_an_error_too():
    """It would look as if the subtask had been cancelled, and the job would wait for ever."""

    class Sink(Operator):
        def process(self, batch, input_index):
            raise asyncio.CancelledError

    chained = ChainedOperator(0, "out", Sink(), ChainOutput("out"))
    with pytest.raises(UserCodeError, match="operator `out` failed: CancelledError"):
        with_context(chained, chained.operator.process, ObjectBatch([1]), 0)


def test_the_end_of_the_task_is_not_the_functions_error(harness, world):
    async def sleep(data):
        await asyncio.sleep(60)

    async def main():
        step = BatchFunction(sleep, "step", Origin("job.py:5"), world.schema)
        run = harness(AsyncMapBatchesOperator(step))
        task = asyncio.create_task(run.operator.process_async(world.batch(2), 0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_stop_iteration_drops_no_records(harness):
    """Inside `map` it would look like the end of the records."""
    with pytest.raises(UserCodeError, match=r"raised StopIteration record=`2`"):
        harness(MapOperator(user(lambda x: next(iter([x] if x < 2 else []))))).push(
            ObjectBatch([1, 2, 3])
        )


class Words:
    async def __call__(self, text):
        for word in text.split():
            yield word


class Upper:
    async def __call__(self, text):
        return text.upper()


def test_flat_map_knows_objects_that_yield(harness):
    run = harness(AsyncFlatMapOperator(user(Words())))
    assert run.push(ObjectBatch(["a b", "c"])).records == ["a", "b", "c"]


async def later(*arguments):
    return 1


async def yields_later(record):
    yield record


def yields(record):
    yield record


STEPS = {
    "reduce": lambda stream, function: stream.key_by("url").reduce(function, name="r"),
    "key_with": lambda stream, function: stream.key_with(function),
    "partition_with": lambda stream, function: stream.partition_with(function),
    "event_time": lambda stream, function: stream.event_time(function),
}


@pytest.mark.parametrize("function", [later, functools.partial(later, 1), Upper(), yields_later])
@pytest.mark.parametrize("kind", STEPS)
def test_steps_that_await_nothing_refuse_coroutines(world, kind, function):
    with pytest.raises(PlanError, match=f"{kind} needs a plain function") as caught:
        STEPS[kind](world.stream(), function)
    assert "test_async_mistakes.py" in caught.value.where
    assert "async map before" in caught.value.fix


@pytest.mark.parametrize("function", [yields, yields_later, Words()])
@pytest.mark.parametrize("kind", ["map", "filter", "map_batches"])
def test_steps_with_one_result_refuse_generators(world, kind, function):
    with pytest.raises(PlanError, match=f"{kind} needs a function that returns") as caught:
        getattr(world.stream(), kind)(function)
    assert "test_async_mistakes.py" in caught.value.where
