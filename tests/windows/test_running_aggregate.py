"""Running aggregates against a dict."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError
from headgate.operators.aggregation.aggregates import AggregatePlan, count, sum
from headgate.operators.aggregation.aggregates import max as largest
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of

SCHEMA = pa.schema([("k", pa.int64()), ("x", pa.int64())])
PLAN = AggregatePlan(("k",), {"n": count(), "total": sum("x")}, SCHEMA)


def batch(rows, timed=True):
    columns = [pa.array([row[index] for row in rows], pa.int64()) for index in range(2)]
    times = np.array([row[2] for row in rows], np.int64) if timed else None
    return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), times)


rows_ = st.tuples(st.none() | st.integers(0, 6), st.none() | st.integers(-9, 9), st.integers(-5, 5))


class Model:
    """Counts and sums per key, and what each batch should emit."""

    def __init__(self) -> None:
        self.state: dict = {}

    def batch(self, rows):
        for key, x, _ in rows:
            n, total = self.state.get(key, (0, None))
            self.state[key] = (n + 1, total if x is None else (total or 0) + x)
        last = {key: index for index, (key, _, _) in enumerate(rows)}
        latest = {key: max(t for k, _, t in rows if k == key) for key in last}
        return [(key, *self.state[key], latest[key]) for key in sorted(last, key=last.__getitem__)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(rows_, max_size=20), max_size=6), st.integers(0, 6), st.integers(1, 3))
def test_each_touched_key_is_emitted_once_per_batch(start, batches, cut, parallelism):
    model, first = Model(), start(RunningAggregate(PLAN))
    for rows in batches[:cut]:
        first.output.events.clear()
        first.process(batch(rows))
        assert first.output.rows() == model.batch(rows)
    tables = first.tables()
    restored = [start(RunningAggregate(PLAN), tables, i, parallelism) for i in range(parallelism)]
    for rows in batches[cut:]:
        expected = model.batch(rows)
        for index, harness in enumerate(restored):
            harness.output.events.clear()
            harness.process(batch([r for r in rows if owner(r[0], parallelism) == index]))
            assert harness.output.rows() == [
                row for row in expected if owner(row[0], parallelism) == index
            ]
    made = [harness.tables()["running"] for harness in restored]
    merged = pa.concat_tables(made).drop_columns(["key_group"]).to_pylist()
    assert {row["k"]: (row["n"], row["total"]) for row in merged} == model.state


def owner(key, parallelism):
    return owner_of(key_group_of(hash_key(key), 8), parallelism, 8)


def test_without_event_time_there_are_no_timestamps(start):
    harness = start(RunningAggregate(PLAN))
    harness.process(batch([(1, 2, 0)], timed=False))
    assert harness.output.rows() == [(1, 1, 2, None)]


def test_without_keys_there_is_one_row_per_batch(start):
    plan = AggregatePlan((), {"n": count(), "total": sum("x")}, SCHEMA)
    harness = start(RunningAggregate(plan))
    harness.process(batch([(1, 2, 0), (2, 3, 7)]))
    again = start(RunningAggregate(plan), harness.tables())
    again.process(batch([(1, None, 5)]))
    assert harness.output.rows() + again.output.rows() == [(2, 5, 7), (3, 5, 5)]


def test_python_objects_are_refused(start):
    with pytest.raises(PlanError):
        start(RunningAggregate(PLAN)).process(ObjectBatch([1]))


def test_a_count_of_a_column_does_not_read_its_values(start):
    """Nor turns them into Python objects: these could not be."""
    schema = pa.schema([("k", pa.int64()), ("s", pa.string())])
    plan = AggregatePlan(("k",), {"n": count("s")}, schema)
    texts = pa.array([b"\xff", None, b"\xfe"], pa.binary()).view(pa.string())
    data = pa.RecordBatch.from_arrays([pa.array([1, 1, 2]), texts], schema=schema)
    harness = start(RunningAggregate(plan))
    harness.process(ColumnBatch(data, None))
    assert harness.output.rows() == [(1, 1, None), (2, 1, None)]


def test_a_null_in_a_dictionary_is_a_null(start):
    """Its index is not null, only what it stands for."""
    type_ = pa.dictionary(pa.int8(), pa.int64())
    schema = pa.schema([("k", pa.int64()), ("d", type_)])
    plan = AggregatePlan(("k",), {"n": count("d"), "top": largest("d")}, schema)
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array([5, None]))
    data = pa.RecordBatch.from_arrays([pa.array([1, 1, 2]), column], schema=schema)
    harness = start(RunningAggregate(plan))
    harness.process(ColumnBatch(data, None))
    assert harness.output.rows() == [(1, 1, 5, None), (2, 1, 5, None)]
    alone = AggregatePlan(("k",), {"n": count("d")}, schema)
    harness = start(RunningAggregate(alone))
    harness.process(ColumnBatch(data, None))
    assert harness.output.rows() == [(1, 1, None), (2, 1, None)]
