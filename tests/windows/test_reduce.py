"""Keyed reduce: the running value per record, and state that survives."""

from __future__ import annotations

import enum

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import UserCodeError
from headgate.operators.aggregation.reduce import ReduceOperator
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of

SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])


class Visit(msgspec.Struct):
    user: str | None
    n: int
    at: object


def add(a, b):
    return (a[0], a[1] + b[1])


def by_first(record):
    return record[0]


keys = st.integers(0, 4) | st.sampled_from(["a", None, ("a", 1), b"x", 2**70])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(keys, st.integers(0, 9)), max_size=15), max_size=6),
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_running_values_over_a_snapshot_and_rescale(start, batches, cut, parallelism):
    state, first = {}, start(ReduceOperator(add, by_first))

    def expect(records):
        found = []
        for key, n in records:
            state[key] = (key, state[key][1] + n) if key in state else (key, n)
            found.append(state[key])
        return found

    for records in batches[:cut]:
        first.output.events.clear()
        first.process(ObjectBatch(records))
        assert first.output.rows() == [(value, None) for value in expect(records)]
    tables = first.tables()
    restored = [
        start(ReduceOperator(add, by_first), tables, index, parallelism)
        for index in range(parallelism)
    ]
    for records in batches[cut:]:
        values = expect(records)
        for index, harness in enumerate(restored):
            harness.output.events.clear()
            harness.process(ObjectBatch([r for r in records if owner(r[0], parallelism) == index]))
            assert harness.output.rows() == [
                (value, None) for value in values if owner(value[0], parallelism) == index
            ]


def owner(key, parallelism):
    return owner_of(key_group_of(hash_key(key), 8), parallelism, 8)


def visits(rows, times=None):
    columns = [pa.array([r[i] for r in rows], type_) for i, type_ in enumerate(SCHEMA.types)]
    return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), times)


@pytest.mark.parametrize("row_type", [None, Visit])
def test_columns_come_back_as_columns(start, row_type):
    def later(a, b):
        b.n += a.n
        return b

    operator = ReduceOperator(later, ("user",), schema=SCHEMA, row_type=row_type)
    harness = start(operator)
    harness.process(visits([("a", 1, 5), (None, 2, 6), ("a", 3, None)], np.array([7, 8, 9])))
    again = start(
        ReduceOperator(later, ("user",), schema=SCHEMA, row_type=row_type), harness.tables()
    )
    again.process(visits([(None, 10, 1), ("a", 10, 2)]))
    batches = [harness.output.events[0][1], again.output.events[0][1]]
    assert [b.data.schema for b in batches] == [SCHEMA, SCHEMA]
    assert [b.data["n"].to_pylist() for b in batches] == [[1, 2, 4], [12, 14]]
    assert batches[0].timestamps.tolist() == [7, 8, 9]


def test_two_key_columns_make_a_tuple(start):
    operator = ReduceOperator(lambda a, b: a, ("user", "n"), schema=SCHEMA)
    harness = start(operator)
    harness.process(visits([("a", 1, 5), ("a", 2, 6), ("a", 1, 7)]))
    table = harness.tables()["reduce"]
    keys = zip(table["user"].to_pylist(), table["n"].to_pylist(), strict=True)
    assert sorted(keys) == [("a", 1), ("a", 2)]


def test_changing_a_value_after_the_cut_does_not_change_the_snapshot(start):
    def extend(a, b):
        a[1].extend(b[1])
        return a

    harness = start(ReduceOperator(extend, by_first))
    harness.process(ObjectBatch([("k", [1]), ("k", [2])]))
    snapshot = harness.operator.snapshot(1)
    harness.process(ObjectBatch([("k", [3])]))
    restored = start(
        ReduceOperator(extend, by_first), {"reduce": snapshot.tables["reduce"].make(None)}
    )
    restored.process(ObjectBatch([("k", [9])]))
    assert restored.output.rows() == [(("k", [1, 2, 9]), None)]


def test_values_of_classes_that_only_the_job_knows_are_kept(start):
    colour = enum.Enum("Colour", ["RED"])  # not importable by name: plain pickle refuses
    harness = start(ReduceOperator(lambda a, b: a, key=lambda r: 1))
    harness.process(ObjectBatch([colour.RED]))
    restored = start(ReduceOperator(lambda a, b: a, key=lambda r: 1), harness.tables())
    restored.process(ObjectBatch([5]))
    assert restored.output.rows()[0][0].name == "RED"


@pytest.mark.parametrize("wrong", ["key", "function"])
def test_an_error_of_the_user_names_step_and_record(start, wrong):
    def fail(*_):
        raise ValueError("no")

    key, function = (fail, add) if wrong == "key" else (by_first, fail)
    harness = start(ReduceOperator(function, key, step="sums"))
    with pytest.raises(UserCodeError, match="`sums` raised ValueError: no") as error:
        harness.process(ObjectBatch([(1, 2), (1, 3)]))
    assert ("(1, 2)" if wrong == "key" else "(1, 3)") in str(error.value)


def test_a_result_that_is_no_record_of_the_stream_is_refused(start):
    harness = start(ReduceOperator(lambda a, b: 5, ("user",), schema=SCHEMA, step="sums"))
    with pytest.raises(UserCodeError, match="sums"):
        harness.process(visits([("a", 1, 1), ("a", 2, 2)]))
