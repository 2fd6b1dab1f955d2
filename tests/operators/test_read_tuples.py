"""map: a function that only puts columns and constants into a tuple is not called; results are the same."""

from __future__ import annotations

import datetime
import decimal
import struct
import sys
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.elements import ColumnBatch, ObjectBatch, Positions
from headgate.operators.functions.bytecode import Constant, direct_tuple
from headgate.operators.functions.dead_letters import OnError
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.per_record.operators import MapOperator
from headgate.operators.rows import PER_RECORD_ROWS, RowReader

ROWS = 5
COLUMNS = {
    "int8": pa.array([1, -2, 3, 4, 127], pa.int8()),
    "int64": pa.array([2**63 - 1, -(2**63), 0, 1, 2]),
    "uint32": pa.array([2**32 - 1, 0, 1, 2, 3], pa.uint32()),
    "uint64": pa.array([2**64 - 1, 0, 1, 2, 3], pa.uint64()),
    "float": pa.array([1.5, float("inf"), -0.0, float("nan"), 5e-324]),
    "float32": pa.array([0.1, 1.5, -0.0, 3e38, 1e-45], pa.float32()),
    "float16": pa.array(np.array([0.1, 1.5, 2, 3, 4], np.float16)),
    "bool": pa.array([True, False, True, True, False]),
    "int with null": pa.array([1, None, 3, 4, 5]),
    "bool with null": pa.array([True, None, True, True, False]),
    "text": pa.array(["a", "", "ü", None, "e"]),
    "date": pa.array([datetime.date(2024, 2, 29)] * ROWS),
    "time": pa.array([0, 1, None, 5, 6], pa.timestamp("us", "UTC")),
    "decimal": pa.array([decimal.Decimal("1.25"), None] + [decimal.Decimal(1)] * 3),
    "list": pa.array([[1, 2], None, [], [3], [4]]),
    "struct": pa.array([{"a": 1}, None, {"a": 2}, {"a": 3}, {"a": 4}]),
    "dictionary": pa.array(["x", None, "x", "y", "x"]).dictionary_encode(),
}


def exactly(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value), [exactly(each) for each in value]
    return type(value), struct.pack("<d", value) if type(value) is float else value


def user(function: Any, schema: pa.Schema, row_type: Any = None, **others: Any) -> UserFunction:
    reader = RowReader(schema, row_type, function)
    return UserFunction(function, "map", Origin("job.py:5", "map"), reader, **others)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("least", [1, 100])
def test_results_are_those_of_the_calls(harness, monkeypatch, name, least):
    """In type and bits, for columns of any type, in slices, and with event times."""
    monkeypatch.setattr(ObjectBatch, "NUMBERS_MIN", least)
    schema = pa.schema([("first", pa.int64()), ("c", COLUMNS[name].type)])
    data = pa.RecordBatch.from_arrays([pa.array(range(ROWS)), COLUMNS[name]], schema=schema)
    times, positions = np.arange(ROWS) * 10, Positions("s", "a", range(ROWS))
    batch = ColumnBatch(data, times, positions)
    calls: list[Any] = []

    def called(row: Any) -> Any:
        calls.append(1)
        return (row.c, 1, row["first"], row.c)

    for read in (lambda row: (row.c, 1, row["first"], row.c), lambda row: (row["c"],)):
        wanted = harness(MapOperator(user(called, schema)))
        found = harness(MapOperator(user(read, schema)))
        for part in (batch, batch.slice(1, 3), batch.slice(2, 0)):
            wanted.push(part)
            found.push(part)
        width = len(found.records[0])
        assert [exactly(r) for r in found.records] == [exactly(r[:width]) for r in wanted.records]
        assert found.times == wanted.times
        for one, other in zip(found.batches, wanted.batches, strict=True):
            assert one.positions.offsets.tolist() == other.positions.offsets.tolist()
    assert calls


def test_many_numbers_stay_arrays(harness, monkeypatch):
    schema = pa.schema([("n", pa.int32()), ("x", pa.float64()), ("t", pa.string())])
    batch = ColumnBatch(pa.record_batch([[1], [1.5], ["a"]], schema=schema))
    for function, fit in (
        (lambda row: (row.n, 1), True),
        (lambda row: (row.n, row.x, True, 1.5, 2**62), True),
        (lambda row: (row.n, 2**63), False),
        (lambda row: (row.n, None), False),
        (lambda row: (row.n, "a"), False),
        (lambda row: (row.n, row.t), False),
    ):
        for least in (1, 2):
            monkeypatch.setattr(ObjectBatch, "NUMBERS_MIN", least)
            run = harness(MapOperator(user(function, schema))).push(batch)
            assert (run.batches[0].numbers is not None) == (fit and least == 1)
            assert run.records == [function(row) for row in RowReader(schema, None, None)(batch)]


def test_large_batches_stay_in_pieces(harness):
    schema = pa.schema([("n", pa.int64())])
    rows = PER_RECORD_ROWS + 1
    run = harness(MapOperator(user(lambda row: (row.n, 1), schema)))
    run.push(ColumnBatch(pa.record_batch({"n": np.arange(rows)})))
    assert [len(batch) for batch in run.batches] == [PER_RECORD_ROWS, 1]
    assert run.records == [(n, 1) for n in range(rows)]


class Event(msgspec.Struct):
    n: int
    twice: int = 0

    def __post_init__(self) -> None:
        self.twice = self.n * 2


def test_what_is_no_column_is_called_for(harness):
    """Objects, records with attributes of their own, steps with `into=`; and an error policy as well."""
    schema = pa.schema([("n", pa.int64())])
    batch = ColumnBatch(pa.record_batch({"n": [1, 2]}))
    run = harness(MapOperator(user(lambda row: (row.n, row.twice), schema, Event))).push(batch)
    assert run.records == [(1, 2), (2, 4)]
    run = harness(MapOperator(user(lambda row: (row[0], 1), schema)))
    assert run.push(ObjectBatch([(5,), (6,)])).records == [(5, 1), (6, 1)]
    into = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    run = harness(MapOperator(user(lambda row: (row.n, 1), schema, into=into))).push(batch)
    assert run.batches[0].data.schema == into
    skip = OnError(then="skip")
    run = harness(MapOperator(user(lambda row: (row.n, 1), schema, on_error=skip))).push(batch)
    assert run.records == [(1, 1), (2, 1)]


def test_a_debugger_sees_all_calls(harness):
    schema, seen = pa.schema([("n", pa.int64())]), []
    function = lambda row: (row.n, 1)  # noqa: E731

    def trace(frame: Any, event: str, _: Any) -> None:
        if frame.f_code is function.__code__:
            seen.append(event)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run = harness(MapOperator(user(function, schema)))
        run.push(ColumnBatch(pa.record_batch({"n": [1, 2]})))
    finally:
        sys.settrace(before)
    assert run.records == [(1, 1), (2, 1)]
    assert seen == ["call", "call"]


class Keyed:
    def pair(self, row: Any) -> Any:
        return row.a, row["b"], 1

    def own(self, row: Any) -> Any:
        return self, row.a


def documented(row: Any) -> Any:
    """The function has a docstring."""
    return (row.a, "x", None)


def assigns(row: Any) -> Any:
    row = OTHER
    return row.a, 1


def two_lines(row: Any) -> Any:
    a = row.a
    return a, 1


def generates(row: Any) -> Any:
    yield row.a, 1


async def waits(row: Any) -> Any:
    return row.a, 1


OTHER = Keyed()
FIELD = "a"


@pytest.mark.parametrize(
    ("function", "places"),
    [
        (lambda row: (row.a, 1), ["a", Constant(1)]),
        (lambda row: (row["a"], row.b), ["a", "b"]),
        (lambda row: (row.a,), ["a"]),
        (lambda row: (-1, row.a, row.a, 1_000), [Constant(-1), "a", "a", Constant(1_000)]),
        (lambda row: (row[0], row[1.5], row[None]), [0, 1.5, None]),
        (lambda row: (row.a, (1, 2)), ["a", Constant((1, 2))]),
        (documented, ["a", Constant("x"), Constant(None)]),
        (OTHER.pair, ["a", "b", Constant(1)]),
    ],
)  # fmt: skip
def test_tuples_of_reads_are_found(function, places):
    found = direct_tuple(function)
    assert found is not None
    assert [each if isinstance(each, Constant) else each.name for each in found] == places


@pytest.mark.parametrize(
    "function",
    [
        lambda row: row,
        lambda row: row.a,
        lambda row: 1,
        lambda row: (1, 2),
        lambda row: (row, 1),
        lambda row: [row.a, 1],
        lambda row: {row.a: 1},
        lambda row: ((row.a, 1), 2),
        lambda row: (row.a.b, 1),
        lambda row: (row["a"]["b"], 1),
        lambda row: (row.a(), 1),
        lambda row: (row.a + 1, 1),
        lambda row: (row.a, FIELD),
        lambda row: (row[FIELD], 1),
        lambda row: (row.a, *row.b),
        lambda row: (row.a, 1)[0],
        lambda row: (row.a, 1) if row.b else (row.b, 1),
        lambda row: row.a and (row.b, 1),
        lambda row: (row.a, -row.b),
        lambda row: (row[1:2], 1),
        lambda row, other=1: (row.a, 1),
        lambda *row: (row.a, 1),
        lambda row: lambda: (row.a, 1),
        lambda row: [row.a for row in row.b],
        OTHER.own,
        assigns,
        two_lines,
        generates,
        waits,
        partial(lambda row: (row.a, 1)),
        len,
        Keyed,
    ],
)
def test_other_functions_are_called(function):
    assert direct_tuple(function) is None
