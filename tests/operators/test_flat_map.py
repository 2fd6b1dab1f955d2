"""flat_map: any number of records, each with the event time of the one it came from."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import UserCodeError
from headgate.operators.elements import ObjectBatch
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.per_record.operators import AsyncFlatMapOperator, FlatMapOperator
from headgate.operators.rows import PER_RECORD_ROWS, RowReader


def user(function, into=None):
    return UserFunction(
        function, "flat_map", Origin("job.py:5"), RowReader(None, None, function), into
    )


def words(text):
    return text.split()


def words_one_by_one(text):
    yield from text.split()


async def words_async(text):
    return text.split()


async def words_async_one_by_one(text):
    for word in text.split():
        yield word


@pytest.mark.parametrize(
    ("operator", "function"),
    [
        (FlatMapOperator, words),
        (FlatMapOperator, words_one_by_one),
        (AsyncFlatMapOperator, words_async),
        (AsyncFlatMapOperator, words_async_one_by_one),
    ],
)
def test_every_kind_of_function(harness, operator, function):
    run = harness(operator(user(function)))
    run.push(ObjectBatch(["a b", "", "c", "d e f"], np.array([10, 20, 30, 40])))
    assert run.records == list("abcdef")
    assert run.times == [10, 10, 30, 40, 40, 40]


def test_nothing_made_is_silence(harness):
    assert harness(FlatMapOperator(user(words))).push(ObjectBatch(["", " "])).batches == []


def test_into_columns(harness):
    schema = pa.schema({"word": pa.string()})
    run = harness(FlatMapOperator(user(lambda text: [{"word": w} for w in text.split()], schema)))
    assert run.push(ObjectBatch(["a b"])).records == [{"word": "a"}, {"word": "b"}]


def test_results_are_sent_on_while_a_record_is_worked_on(harness):
    """A record that makes very many others needs memory for one batch of them."""
    seen = []

    def many(count):
        for number in range(count):
            seen.append(len(run.batches))
            yield number

    run = harness(FlatMapOperator(user(many)))
    run.push(ObjectBatch([PER_RECORD_ROWS * 3, 5], np.array([1, 2])))
    assert seen[-1] == 3
    assert [len(batch) for batch in run.batches] == [PER_RECORD_ROWS] * 3 + [5]
    assert run.times == [1] * (PER_RECORD_ROWS * 3) + [2] * 5


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: None, "returned NoneType, which is not iterable record=`'a b'`"),
        (lambda x: 3, "returned int, which is not iterable"),
        (lambda x: "word", "returned one str, whose parts would become records"),
        (lambda x: {"word": x}, "returned one dict, whose parts would become records"),
        (lambda x: 1 // 0, "raised ZeroDivisionError"),
        (lambda x: (1 // n for n in (1, 0)), "raised ZeroDivisionError"),
    ],
)
def test_what_the_function_may_not_do(harness, function, text):
    with pytest.raises(UserCodeError) as caught:
        harness(FlatMapOperator(user(function))).push(ObjectBatch(["a b"]))
    assert text in caught.value.message
    assert caught.value.where == "job.py:5"


def test_a_failure_downstream_is_not_blamed_on_the_function(harness):
    run = harness(FlatMapOperator(user(lambda count: range(count))))

    def broken(batch):
        raise RuntimeError("downstream")

    run.output.emit = broken
    with pytest.raises(RuntimeError, match="downstream"):
        run.push(ObjectBatch([PER_RECORD_ROWS + 1]))
