"""map_batches: record batches in and out, checked against what was promised."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headgate.errors import UserCodeError
from headgate.operators.elements import ColumnBatch
from headgate.operators.origin import Origin
from headgate.operators.per_record.map_batches import (
    AsyncMapBatchesOperator,
    BatchFunction,
    MapBatchesOperator,
)

INTO = pa.schema({"url": pa.string(), "m": pa.int64()})


def user(function, into=INTO):
    return BatchFunction(function, "enrich", Origin("job.py:5"), into)


def double(data):
    return pa.RecordBatch.from_arrays(
        [pc.multiply(data.column("n"), 2), data.column("url")], names=["m", "url"]
    )


async def double_async(data):
    return double(data)


@pytest.mark.parametrize(
    ("operator", "function"),
    [(MapBatchesOperator, double), (AsyncMapBatchesOperator, double_async)],
)
def test_columns_come_out_as_promised(harness, world, operator, function):
    run = harness(operator(user(function))).push(world.batch(2))
    assert run.batches[0].data.schema == INTO
    assert run.records == [{"url": "u0", "m": 0}, {"url": "u1", "m": 2}]
    assert run.times == [0, 1_000]


def test_empty_in_and_out_is_silence(harness, world):
    def explode(data):
        raise AssertionError

    harness(MapBatchesOperator(user(explode))).push(world.batch(0))
    run = harness(MapBatchesOperator(user(lambda data: double(data).slice(0, 0))))
    assert run.push(world.batch(3)).batches == []


def test_fewer_records_are_fine_without_event_time(harness, world):
    run = harness(MapBatchesOperator(user(lambda data: double(data).slice(1))))
    assert len(run.push(ColumnBatch(world.batch(3).data)).records) == 2


@pytest.mark.parametrize(
    ("function", "text", "fix"),
    [
        (
            lambda data: data.to_pydict(),
            "returned a dict, not a pyarrow.RecordBatch",
            "to_batches()",
        ),
        (
            lambda data: data,
            "returned other columns than promised: no column `m`, unexpected column `user_id`",
            "into=",
        ),
        (
            lambda data: double(data).cast(pa.schema({"m": pa.int8(), "url": pa.string()})),
            "returned other columns than promised: column `m` is int8, not int64",
            "into=",
        ),
        (
            lambda data: double(data).slice(1),
            "returned 2 records for 3, so their event times are unknown",
            ".event_time(...) after map_batches",
        ),
        (lambda data: 1 // 0, "raised ZeroDivisionError", ""),
    ],
)
def test_errors_name_the_step(harness, world, function, text, fix):
    with pytest.raises(UserCodeError) as caught:
        harness(MapBatchesOperator(user(function))).push(world.batch(3))
    assert caught.value.message.startswith(f"the function of `enrich` {text}")
    assert fix in caught.value.fix
    assert caught.value.where == "job.py:5"
