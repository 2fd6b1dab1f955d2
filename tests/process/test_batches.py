"""KeyedBatchProcess: rows by key as Arrow slices, with the key's state, event times and timers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.api.job_definition import WrittenJob
from headgate.connectors import generator, sequence
from headgate.errors import PlanError, UserCodeError
from headgate.operators.process.batches import EVENT_TIME_COLUMN, group_rows

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


class Increasing(hg.KeyedBatchProcess[str, Any, Any]):
    """Keeps the rows of a key that are larger than all before them; forgets when its time has come."""

    largest = hg.ValueState[int](default=-1)

    def on_batch(self, groups: hg.Groups[str], ctx: hg.Context[str]) -> Iterator[pa.RecordBatch]:
        for key, rows in groups:
            assert key == ctx.key
            assert set(rows.column("k").to_pylist()) == {key}
            n = rows.column("n").to_numpy()
            before = np.maximum.accumulate(np.concatenate([[self.largest.get()], n]))[:-1]
            self.largest.set(int(max(before[-1], n[-1])))
            ctx.event_time.at(50)
            yield rows.filter(pa.array(n > before))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> list[pa.RecordBatch]:
        largest = self.largest.get()
        self.largest.clear()
        return [pa.record_batch({"k": [ctx.key], "n": [-largest]}, schema=SCHEMA)]


def columns_of(job: WrittenJob, name: str = "in", *, event_time: bool = True, **casts: str) -> Any:
    fields = casts or {"k": "TEXT", "n": "BIGINT"}
    stream = job.read(generator(dict.fromkeys(fields, sequence())), name=name)
    stream = stream.select(
        *(f"CAST({field} AS {kind}) AS {field}" for field, kind in fields.items())
    )
    return stream.event_time("n") if event_time else stream


def keyed(event_time: bool = True) -> Any:
    return columns_of(WrittenJob("test"), event_time=event_time).key_by("k")


def batch(rows: list[tuple[str | None, int]]) -> pa.RecordBatch:
    return pa.record_batch([[k for k, _ in rows], [n for _, n in rows]], schema=SCHEMA)


def plain(found: list[Any]) -> list[tuple[str, int, int]]:
    return [(row["k"], row["n"], time) for row, time in found]


ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 20)), max_size=40)


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=ROWS, cuts=st.sets(st.integers(0, 40)), restart=st.integers(0, 40))
def test_how_batches_are_cut_does_not_matter(
    world: Any, rows: list[Any], cuts: set[int], restart: int
) -> None:
    """Against a loop over the rows; a snapshot is restored in the middle."""
    step = world.step(keyed().process(Increasing(), name="p"))
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    for start, stop in itertools.pairwise(bounds):
        if start >= restart:
            step.restart()
            restart = 41
        step.push_columns(batch(rows[start:stop]), list(range(start, stop)))
    expected, largest = {}, {}
    for index, (key, n) in enumerate(rows):
        if n > largest.get(key, -1):
            expected.setdefault(key, []).append((key, n, index))
            largest[key] = n
    found: dict[Any, list[Any]] = {}
    for row in plain(step.take()):
        found.setdefault(row[0], []).append(row)
    assert found == expected
    step.watermark(50)
    timers = plain(step.take())
    assert sorted(timers, key=repr) == sorted(((k, -n, 50) for k, n in largest.items()), key=repr)


def test_slices_are_sent_on_together_without_the_column_of_times(steps: Any, world: Any) -> None:
    step = steps(keyed().process(Increasing(), name="p"))
    batches: list[Any] = []
    step.operators[0].output.emit = batches.append
    step.push_columns(batch([("a", 1), ("b", 2), ("a", 3), ("c", 0)]), [4, 3, 2, 1])
    (made,) = batches
    assert made.data.schema.equals(SCHEMA)
    assert made.data.to_pydict() == {"k": ["a", "a", "b", "c"], "n": [1, 3, 2, 0]}
    assert made.timestamps.tolist() == [4, 2, 3, 1]


def test_without_event_time_there_is_no_column_of_times(world: Any) -> None:
    class Columns(hg.KeyedBatchProcess[str, Any, Any]):
        def on_batch(self, groups: hg.Groups[str], ctx: hg.Context[str]) -> Iterator[Any]:
            assert len(groups) == 2
            for _, rows in groups:
                assert ctx.timestamp is None
                yield rows

    step = world.step(keyed(event_time=False).process(Columns(), name="p"))
    step.push_columns(batch([("a", 1), ("b", 2)]))
    assert step.take() == [({"k": "a", "n": 1}, None), ({"k": "b", "n": 2}, None)]


def test_other_columns_with_into_and_the_latest_time_of_a_key(world: Any) -> None:
    class Counts(hg.KeyedBatchProcess[str, Any, Any]):
        side = hg.SideOutput[str]()

        def on_batch(self, groups: hg.Groups[str], ctx: hg.Context[str]) -> Iterator[Any]:
            for key, rows in groups:
                ctx.emit(self.side, key)
                times = rows.column(EVENT_TIME_COLUMN)
                assert ctx.timestamp == pc.max(times.cast(pa.int64())).as_py()
                yield pa.record_batch(
                    [pa.array([key]), pa.array([len(rows)]), times.slice(0, 1)],
                    names=["key", "count", EVENT_TIME_COLUMN],
                )

    into = pa.schema([("key", pa.string()), ("count", pa.int64())])
    step = world.step(keyed().process(Counts(), name="p", into=into))
    step.push_columns(batch([("a", 1), ("b", 2), ("a", 3)]), [5, 6, 7])
    assert step.take() == [({"key": "a", "count": 2}, 5), ({"key": "b", "count": 1}, 6)]
    assert step.take("side") == [("a", 7), ("b", 6)]


class Returns(hg.KeyedBatchProcess[str, Any, Any]):
    def __init__(self, what: Any) -> None:
        self.what = what

    def on_batch(self, groups: hg.Groups[str], ctx: hg.Context[str]) -> Any:
        rows = [rows for _, rows in groups]
        return self.what(rows)


def nulls(rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    times = pa.nulls(len(rows[0]), rows[0].schema.field(EVENT_TIME_COLUMN).type)
    return [rows[0].set_column(2, EVENT_TIME_COLUMN, times)]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda rows: [rows[0].to_pylist()], "made a list, not a pyarrow.RecordBatch"),
        (lambda rows: [rows[0].drop_columns([EVENT_TIME_COLUMN])], "event times are unknown"),
        (lambda rows: [rows[0].drop_columns(["n"])], "no column `n`"),
        (nulls, "with nulls"),
        (lambda rows: 1 / 0, "raised ZeroDivisionError"),
        (lambda rows: (1 / 0 for _ in rows), "raised ZeroDivisionError"),
    ],
)
def test_what_cannot_go_on_is_the_users_error(world: Any, what: Any, message: str) -> None:
    step = world.step(keyed().process(Returns(what), name="p"))
    with pytest.raises(UserCodeError, match=message) as caught:
        step.push_columns(batch([("a", 1)]), [0])
    assert "test_batches.py" in caught.value.where
    assert "a batch of 1: k, n" in caught.value.message


def test_mistakes_are_found_before_anything_runs() -> None:
    job = WrittenJob("test")
    stream = columns_of(job)
    taken = columns_of(job, "second", n="BIGINT", _event_time="BIGINT")
    objects = stream.map(lambda row: row)
    for keyed_stream, message in [
        (stream.key_with(lambda row: row.k), "needs a key made of columns"),
        (taken.key_by("n"), "has a column `_event_time`"),
        (objects.key_with(lambda row: row.k), "needs columns"),
    ]:
        with pytest.raises(PlanError, match=message) as caught:
            keyed_stream.process(Increasing(), name="p")
        assert "test_batches.py" in caught.value.where


def test_keys_of_several_columns() -> None:
    columns = [
        pa.array(["x", "y", None, "x", None, "x"]).dictionary_encode(),
        pa.array([1, 1, 2, 2, 2, 1]),
    ]
    order, starts = group_rows(columns)
    groups = [part.tolist() for part in np.split(order, starts[1:])]
    assert sorted(groups) == [[0, 5], [1], [2, 4], [3]]
