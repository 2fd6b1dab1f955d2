"""map_batches with a number of rows: full batches, time that is up, and nothing that waits across a
barrier.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import PlanError, StateError, UsageError, UserCodeError
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch, concatenated
from headgate.testing import harness

from .conftest import Bench, source

SCHEMA = {"n": "int64"}
OUT = {"n": "int64", "rows": "int64"}


def sized(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Says of each row in how large a batch it was."""
    return batch.append_column("rows", pa.array([len(batch)] * len(batch), pa.int64()))


async def sized_later(batch: pa.RecordBatch) -> pa.RecordBatch:
    await asyncio.sleep(pc.max(batch.column("n")).as_py() / 1000)
    return sized(batch)


def columns(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


def rows_of(step: Any) -> list[tuple[int, int]]:
    return [(row["n"], row["rows"]) for row in step.take()]


def plain(world: Any, **given: Any) -> Any:
    return world.source(SCHEMA).map_batches(sized, into=OUT, **{"rows": 3, **given})


def later(world: Any, **given: Any) -> Any:
    given = {"rows": 3, "name": "later", **given}
    return world.source(SCHEMA).map_batches(sized_later, into=OUT, **given)


def test_too_much_text_for_one_batch_loses_nothing_in_silence() -> None:
    """Columns of texts have offsets of 32 bits. (The memory of this one is never touched.)"""
    offsets = pa.py_buffer(np.array([0, 2**30], np.int32))
    text = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(np.zeros(2**30, np.uint8)))
    batch = ColumnBatch(pa.RecordBatch.from_arrays([text], ["text"]))
    with pytest.raises(StateError, match="offset overflow"):
        concatenated([batch, batch, batch])


def test_batches_are_full(bench: Any, world: Any) -> None:
    step = bench(plain(world)).push_columns(columns(1, 2))
    assert rows_of(step) == []
    step.push_columns(columns(3, 4))
    assert rows_of(step) == [(1, 3), (2, 3), (3, 3)]
    step.push_columns(columns(*range(5, 13)))
    assert rows_of(step) == [(n, 3) for n in range(4, 13)]


def test_rows_wait_for_so_long_only(bench: Any, world: Any) -> None:
    step = bench(plain(world, within="20ms"))
    step.push_columns(columns(1)).advance(15).push_columns(columns(2)).advance(4)
    assert rows_of(step) == []
    step.advance(1)
    assert rows_of(step) == [(1, 2), (2, 2)]
    step.push_columns(columns(3, 4)).advance(15).push_columns(columns(5, 6)).advance(15)
    assert rows_of(step) == [(3, 3), (4, 3), (5, 3)]  # the clock began again for the rest
    step.advance(5)
    assert rows_of(step) == [(6, 1)]


def test_fifty_milliseconds_unless_told_otherwise(bench: Any, world: Any) -> None:
    step = bench(plain(world)).push_columns(columns(1)).advance(49)
    assert rows_of(step) == []
    assert rows_of(step.advance(1)) == [(1, 1)]


@pytest.mark.parametrize("mark", ["watermark", "idle", "barrier", "end"])
def test_nothing_waits_across(bench: Any, world: Any, mark: str) -> None:
    for stream in (plain(world), later(world)):
        step = bench(stream).push_columns(columns(1, 2), [5, 6])
        if mark == "watermark":
            step.watermark(6)
        elif mark == "idle":
            step.idle(True)
        elif mark == "barrier":
            step.barrier()
        else:
            step.end()
        step.advance(2)
        found = step.events
        assert [(row["n"], row["rows"]) for kind, row in found if kind == "main"] == [
            (1, 2),
            (2, 2),
        ]
        kinds = [kind for kind, _ in found]
        assert kinds[:2] == ["main", "main"]


def test_event_times_stay_with_their_rows(bench: Any, world: Any) -> None:
    step = bench(plain(world)).push_columns(columns(1, 2), [5, 6]).push_columns(columns(3), [7])
    assert [(row["n"], time) for row, time in step.take_timed()] == [(1, 5), (2, 6), (3, 7)]


def test_several_batches_at_a_time_in_order(bench: Any, world: Any) -> None:
    step = bench(later(world, rows=1, max_in_flight=2))
    step.push_columns(columns(30, 10, 20))
    assert step.operators[0].full()
    step.advance(10)
    assert rows_of(step) == []
    step.advance(20)
    assert rows_of(step) == [(30, 1), (10, 1)]
    step.advance(20)
    assert rows_of(step) == [(20, 1)]
    assert step.operators[0].settled()


def test_batches_under_way_are_state(bench: Any, world: Any) -> None:
    step = bench(later(world, rows=2, within="10ms"), 2)
    step.push_columns(columns(30, 10, 20), [1, 2, 3])
    step.restart(3).restart(1).advance(100)
    found = sorted((row["n"], time) for row, time in step.take_timed())
    assert found == [(10, 2), (20, 3), (30, 1)]


def test_a_failure_of_a_batch_fails_the_job(bench: Any, world: Any) -> None:
    async def fails(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("no")

    async def wrong(batch: pa.RecordBatch) -> Any:
        return 1

    for function, message in (
        (fails, "the function of `later` raised ValueError: no record=`'a batch of 1: n'`"),
        (wrong, "returned a int, not a pyarrow.RecordBatch"),
    ):
        stream = world.source(SCHEMA).map_batches(function, rows=1, name="later")
        with pytest.raises(UserCodeError, match=message):
            bench(stream).push_columns(columns(1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": 0}, "rows must be a whole number of at least 1 value=`0`"),
        ({"rows": None, "within": "1s"}, "rows= is missing"),
        ({"within": 3}, "within needs a unit"),
        ({"max_in_flight": 2}, "max_in_flight= is for `async def` functions"),
    ],
)
def test_mistakes(world: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        plain(world, **given)
    assert "test_micro_batches.py" in caught.value.where


def test_async_micro_batches_need_a_name(world: Any) -> None:
    with pytest.raises(PlanError, match="async step has no name"):
        later(world, name="")
    world.source(SCHEMA).map_batches(sized_later, into=OUT)


BATCHES = st.lists(
    st.one_of(
        st.lists(st.integers(0, 20), max_size=8),
        st.sampled_from(["watermark", "restart", "advance"]),
    ),
    max_size=12,
)


@pytest.mark.parametrize("asynchronous", [False, True])
@settings(max_examples=25, deadline=None)
@given(script=BATCHES, rows=st.integers(1, 5))
def test_every_row_once_in_order(asynchronous: bool, script: list[Any], rows: int) -> None:
    function = sized_later if asynchronous else sized
    step = Bench(source(SCHEMA).map_batches(function, into=OUT, rows=rows, name="step"))
    expected: list[Any] = []
    marks = 0
    try:
        for what in script:
            if what == "watermark":
                marks += 1
                step.watermark(marks)
                expected.append(("watermark", marks))
            elif what == "restart":
                _restart(step, asynchronous)
            elif what == "advance":
                step.advance(7)
            else:
                step.push_columns(columns(*what), list(what))
                expected += [("main", n) for n in what]
        step.end()
        expected.append(("watermark", WATERMARK_MAX))
        found = [(kind, row["n"] if kind == "main" else row) for kind, row in step.events]
    finally:
        step.close()
        step.loop.close()
    assert [each for each in found if each[0] == "main"] == [e for e in expected if e[0] == "main"]
    if "restart" not in script:
        assert without_repeats(found) == without_repeats(expected)


def without_repeats(events: list[Any]) -> list[Any]:
    """Drop each watermark that another one follows directly: only the last one counts."""
    kinds = [kind for kind, _ in events[1:]] + ["end"]
    repeated = ("watermark", "watermark")
    return [e for e, after in zip(events, kinds, strict=False) if (e[0], after) != repeated]


def _restart(step: Bench, asynchronous: bool) -> None:
    if asynchronous:
        step.restart()
        return
    step.barrier()
    assert step.operators[0].snapshot(1) is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_jobs(asynchronous: bool) -> None:
    job = hg.Job("micro")
    job.checkpoint(every="1h", storage="never-made")
    function = sized_later if asynchronous else sized
    job.read(from_list([], schema=SCHEMA), name="in").map_batches(
        function, into=OUT, rows=4, within="1s", name="step"
    ).write(collect(guarantee="exactly_once"), name="out")
    with harness(job, parallelism=2) as h:
        for start in range(0, 60, 6):
            h.push("in", columns(*range(start, start + 6)))
            if start % 24 == 12:
                h.checkpoint()
            if start == 36:
                h.crash()
        h.advance_time("1s")
        h.end()
        assert sorted(row["n"] for row in h.drain("out")) == list(range(60))


def test_empty_batches_are_nothing(bench: Any, world: Any) -> None:
    empty = columns(1).slice(0, 0)
    assert np.size(empty.column(0)) == 0
    for stream in (plain(world), later(world)):
        step = bench(stream).push_columns(empty)
        assert step.operators[0].settled()
        step.advance(100)
        assert step.take() == []
