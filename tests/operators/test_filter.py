"""filter by a function, plain or coroutine."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.errors import UserCodeError
from headgate.operators.elements import ObjectBatch
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.per_record.operators import AsyncFilterOperator, FilterOperator
from headgate.operators.rows import RowReader


def user(function, schema=None):
    return UserFunction(function, "filter", Origin("job.py:5"), RowReader(schema, None, function))


def even(row):
    return row.n % 2 == 0


async def even_async(row):
    return row.n % 2 == 0


@pytest.mark.parametrize(
    ("operator", "function"), [(FilterOperator, even), (AsyncFilterOperator, even_async)]
)
def test_records_and_their_times_stay_together(harness, world, operator, function):
    run = harness(operator(user(function, world.schema))).push(world.batch(6))
    assert [record["n"] for record in run.records] == [0, 2, 4]
    assert run.times == [0, 2_000, 4_000]
    assert run.batches[0].data.schema == world.schema


def test_objects(harness):
    run = harness(FilterOperator(user(bool)))
    run.push(ObjectBatch([0, 1, "", "x"], np.array([1, 2, 3, 4])))
    assert run.records == [1, "x"]
    assert run.times == [2, 4]


def test_all_kept_is_the_same_batch_and_none_kept_is_silence(harness, world):
    batch = world.batch(3)
    assert harness(FilterOperator(user(lambda row: 1))).push(batch).batches == [batch]
    assert harness(FilterOperator(user(lambda row: None))).push(batch).batches == []


def test_an_exception_names_the_record(harness, world):
    with pytest.raises(
        UserCodeError, match=r"`filter` raised TypeError: .* record=`Row\(user_id=None\)`"
    ):
        harness(FilterOperator(user(lambda row: row.user_id > "a", world.schema))).push(
            world.batch(5)
        )
