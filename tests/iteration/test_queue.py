"""The feedback queue against a list: in memory, on disk, with logs open and aborted."""

from __future__ import annotations

import gc
import os
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headgate.errors import InternalError, StateError, StorageError
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.operators.loops.queue import FILE_BYTES, FeedbackQueue, Spill, memory_bytes_of
from headgate.operators.loops.stored import decode, encode, fitting


def objects(*records: Any) -> ObjectBatch:
    return ObjectBatch(list(records))


def times(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def content(batch: Batch) -> Any:
    found = None if batch.timestamps is None else batch.timestamps.tolist()
    return (batch.records if isinstance(batch, ObjectBatch) else batch.data.to_pylist()), found


class Machine(RuleBasedStateMachine):
    """Room for three batches of one record, then the disk. Barriers come back in the order they went."""

    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.queue = FeedbackQueue("loop", 3 * 64, Spill(lambda: self.directory))
        self.waiting: deque[int] = deque()
        self.logs: dict[int, list[int]] = {}
        self.away: deque[int] = deque()
        self.ids = 0
        self.records = 0

    @rule(rows=st.integers(1, 5))
    def put(self, rows: int) -> None:
        new = list(range(self.records, self.records + rows))
        self.records += rows
        self.queue.put(objects(*new))
        self.waiting.append(new[0])
        for log in self.logs.values():
            log.append(new[0])

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        assert content(self.queue.take())[0][0] == self.waiting.popleft()

    @precondition(lambda self: len(self.waiting) > 1)
    @rule()
    def drop(self) -> None:
        rows = self.queue.rows
        assert self.queue.drop(self.queue.next + 2) == rows - self.queue.rows
        self.waiting.popleft()
        self.waiting.popleft()

    @rule()
    def barrier(self) -> None:
        self.ids += 1
        self.queue.barrier(self.ids)
        self.logs[self.ids] = list(self.waiting)
        self.away.append(self.ids)

    @precondition(lambda self: self.away)
    @rule()
    def comes_back(self) -> None:
        id_ = self.away.popleft()
        found, log = self.queue.returned(id_, self.queue.end), self.logs.pop(id_, None)
        if log is None:
            assert found is None
        else:
            assert found is not None
            assert [decode(entry.encoded("loop")).records[0] for entry in found[1]] == log
            assert found[0].end - found[0].start == len(log)

    @precondition(lambda self: self.logs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.logs)))
        self.queue.aborted(id_)
        del self.logs[id_]

    @invariant()
    def bounded_and_whole(self) -> None:
        self.queue.validate()
        assert self.queue.memory_bytes <= 3 * 64
        assert self.queue.end - self.queue.next == len(self.waiting)


def test_against_a_model(tmp_path: Path) -> None:
    Machine.directory = tmp_path
    case = Machine.TestCase
    case.settings = settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=timedelta(seconds=10),
        suppress_health_check=[HealthCheck.too_slow],
    )
    case().runTest()
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_free_when_nobody_needs_what_lies_there(tmp_path: Path) -> None:

    def open_files() -> int:
        held = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
        return sum(str(tmp_path) in os.readlink(each) for each in held if os.path.islink(each))

    queue = FeedbackQueue("loop", 0, Spill(lambda: tmp_path))
    large = objects(b"x" * (FILE_BYTES // 2))
    for _ in range(5):
        queue.put(large)
    assert queue.spilled_bytes > 2 * FILE_BYTES
    assert queue.over_memory
    assert open_files() == 3
    while queue.next < queue.end - 1:
        queue.take()
    gc.collect()
    assert open_files() == 1
    queue.take()
    assert not queue.over_memory
    del queue
    gc.collect()
    assert open_files() == 0


def test_an_open_log_keeps_what_was_sent(tmp_path: Path) -> None:
    queue = FeedbackQueue("loop", 2 * 64, Spill(lambda: tmp_path))
    queue.put(objects(1))
    queue.barrier(7)
    queue.put(objects(2))
    assert [content(queue.take())[0] for _ in range(2)] == [[1], [2]]
    assert queue.memory_bytes == 128
    queue.put(objects(3))
    assert queue.over_memory
    found = queue.returned(7, 2)
    assert found is not None
    assert [content(entry.batch())[0] for entry in found[1]] == [[1], [2]]
    assert queue.memory_bytes == 0


def test_a_log_holds_records_as_they_came_back() -> None:
    """Steps may change records in place once they are sent, and the log is written after that."""
    queue = FeedbackQueue("loop")
    first, second = {"n": 1}, {"n": 2}
    queue.put(objects(first))
    queue.put(objects(second))
    queue.barrier(7)
    assert queue.take().records == [first]  # type: ignore[union-attr]
    first["n"] = -1
    found = queue.returned(7, 2)
    assert found is not None
    taken = queue.take()
    assert taken.records[0] is second  # type: ignore[union-attr]
    second["n"] = -2
    for _ in range(2):
        assert [content(decode(entry.encoded("loop")))[0] for entry in found[1]] == [
            [{"n": 1}],
            [{"n": 2}],
        ]
    assert queue.memory_bytes == 0


def test_a_record_that_cannot_be_pickled_fails_the_checkpoint_only(tmp_path: Path) -> None:
    queue = FeedbackQueue("step")
    with (tmp_path / "open").open("w") as file:
        queue.put(objects(file))
        queue.barrier(1)
        assert content(queue.take())[0] == [file]
        found = queue.returned(1, 1)
        assert found is not None
        with pytest.raises(StateError, match="step=`step`"):
            found[1][0].encoded("step")


def test_nothing_is_taken_from_an_empty_queue() -> None:
    with pytest.raises(InternalError, match="empty"):
        FeedbackQueue("loop").take()


def test_a_disk_that_takes_nothing_fails_with_a_reason(tmp_path: Path) -> None:
    queue = FeedbackQueue("loop", 0, Spill(lambda: tmp_path / "gone"))
    with pytest.raises(StorageError, match="cannot spill"):
        queue.put(objects(1))


def test_a_record_that_cannot_be_written_fails_with_a_reason(tmp_path: Path) -> None:
    queue = FeedbackQueue("step", 0, Spill(lambda: tmp_path))
    with (tmp_path / "open").open("w") as file, pytest.raises(StateError, match="step=`step`"):
        queue.put(objects(file))


COLUMNS = pa.RecordBatch.from_pydict(
    {"id": [1, 2, 3], "word": pa.array(["a", "b", "a"]).dictionary_encode()}
)


@pytest.mark.parametrize(
    "batch",
    [
        objects(1, "two", None),
        ObjectBatch(["a", "b"], times(5, 7)),
        ColumnBatch(COLUMNS),
        ColumnBatch(COLUMNS.slice(1, 2), times(8, 9)),
        ColumnBatch(pa.RecordBatch.from_pydict({"n": pa.array([], pa.int64())})),
    ],
)
def test_batches_as_bytes(batch: Batch) -> None:
    found = decode(encode(batch, "loop"))
    assert content(found) == content(batch)
    if isinstance(batch, ColumnBatch):
        assert isinstance(found, ColumnBatch)
        assert found.data.schema == batch.data.schema
    assert memory_bytes_of(batch) >= 0


def test_restored_records_must_fit() -> None:
    schema = pa.schema([("id", pa.int64()), ("word", pa.string())])
    fitted = fitting(ColumnBatch(COLUMNS, times(1, 2, 3)), schema, "loop")
    assert isinstance(fitted, ColumnBatch)
    assert fitted.data.schema == schema
    with pytest.raises(StateError, match="now of Python objects"):
        fitting(ColumnBatch(COLUMNS), None, "loop")
    with pytest.raises(StateError, match="now of columns"):
        fitting(objects(1), schema, "loop")
    words = ColumnBatch(COLUMNS.select(["word"]).rename_columns(["n"]))
    with pytest.raises(StateError, match="do not fit it any more"):
        fitting(words, pa.schema([("n", pa.int64())]), "loop")
    nested = ColumnBatch(pa.RecordBatch.from_pydict({"n": [{"a": 1}]}))
    with pytest.raises(StateError, match="do not fit it any more"):
        fitting(nested, pa.schema([("n", pa.int64())]), "loop")
    with pytest.raises(StateError, match=r"columns are \(id, word\)"):
        fitting(ColumnBatch(COLUMNS), pa.schema([("other", pa.int64())]), "loop")
