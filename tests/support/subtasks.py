"""Runs the subtasks of one keyed step by hand: records, watermarks, the clock, snapshots, rescaling."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.api.job_definition import WrittenJob
from headgate.api.stream import output_of
from headgate.connectors import from_list
from headgate.operators.base import OperatorContext
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch, ObjectBatch
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import KeyGroupRange, key_group_range
from headgate.state.snapshot import (
    RestoredFiles,
    RestoredState,
    StateSnapshot,
    TableCut,
)
from headgate.tests.support.operators import Counters, ManualClock, operator_context, rows_of

MAX_PARALLELISM = 12


class Output:
    """An output that keeps `(kind, record, time)` in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def emit(self, batch: Any) -> None:
        self._add("main", batch)

    def emit_side(self, tag: str, batch: Any) -> None:
        self._add(tag, batch)

    def emit_watermark(self, timestamp: int) -> None:
        self.events.append(("watermark", timestamp))

    def emit_idle(self, idle: bool) -> None:
        self.events.append(("idle", idle))

    def _add(self, kind: str, batch: Any) -> None:
        records = batch.data.to_pylist() if isinstance(batch, ColumnBatch) else batch.records
        times = [None] * len(batch) if batch.timestamps is None else batch.timestamps.tolist()
        assert len(times) == len(records)
        self.events += [(kind, *pair) for pair in zip(records, times, strict=True)]


class Step:
    """The subtasks of one step. Records go to the subtask of their key.

    Args:
        stream: the output of the step.
        options: the options of the job.
        directory: the directory for state on disk.
    """

    def __init__(
        self,
        stream: Any,
        parallelism: int = 1,
        options: dict[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.node = output_of(stream).node
        self.clock, self.metrics = ManualClock(), Counters()
        self._options, self._directory, self._number = options or {}, directory, 0
        self._attempt = 0
        self.closed: list[Any] = []
        self._start(parallelism)

    def _start(self, parallelism: int, restored_checkpoint: int = 0) -> None:
        self.parallelism, self._attempt = parallelism, self._attempt + 1
        self._restored_checkpoint = restored_checkpoint
        self.operators, self.outputs = [], [Output() for _ in range(parallelism)]
        for index, output in enumerate(self.outputs):
            operator = self.node.factory()
            operator.output = output
            operator.open(self._context(index))
            self.operators.append(operator)

    def _context(self, index: int) -> OperatorContext:
        return operator_context(
            index,
            self.parallelism,
            MAX_PARALLELISM,
            attempt=self._attempt,
            restored_checkpoint=self._restored_checkpoint,
            clock=self.clock,
            timers=self.clock,
            metrics=self.metrics,
            run_in_thread=in_thread,
            options=self._options,
            local_directory=self._new_directory,
        )

    def _new_directory(self) -> Path:
        assert self._directory is not None
        self._number += 1
        path = self._directory / f"local-{self._number}"
        path.mkdir()
        return path

    # what happens to it

    def push(
        self, records: list[Any], times: list[int] | None = None, *, key: Any = None, at: int = 0
    ) -> Step:
        """Push records to input `at`, to subtasks by `key` of a record, or else to all subtasks."""
        for index, operator in enumerate(self.operators):
            mine = [i for i, r in enumerate(records) if key is None or self._owner(key(r)) == index]
            stamps = None if times is None else np.array([times[i] for i in mine], np.int64)
            if mine:
                operator.process(ObjectBatch([records[i] for i in mine], stamps), at)
        return self

    def push_columns(
        self, data: pa.RecordBatch, times: list[int] | None = None, *, key: str | None = None
    ) -> Step:
        """Push a batch of columns, divided by its column `key`; without it to the only subtask."""
        stamps = None if times is None else np.array(times, np.int64)
        if key is None:
            (operator,) = self.operators
            operator.process(ColumnBatch(data, stamps), 0)
            return self
        owners = np.array([self._owner(value) for value in data.column(key).to_pylist()], int)
        for index, operator in enumerate(self.operators):
            mine = np.flatnonzero(owners == index)
            if mine.size:
                part = data.take(pa.array(mine))
                operator.process(ColumnBatch(part, None if stamps is None else stamps[mine]), 0)
        return self

    def _owner(self, key: Any) -> int:
        group = key_group_of(hash_key(key), MAX_PARALLELISM)
        for index in range(self.parallelism):
            ours = key_group_range(index, self.parallelism, MAX_PARALLELISM)
            if group in ours:
                return index
        raise AssertionError(group)

    def watermark(self, timestamp: int) -> Step:
        for operator in self.operators:
            operator.on_watermark(timestamp)
        return self

    def end(self) -> Step:
        """End the input, as a subtask does."""
        self.watermark(WATERMARK_MAX)
        for operator in self.operators:
            operator.finish()
        return self

    def restart(self, parallelism: int | None = None, stream: Any = None) -> Step:
        """Take a snapshot, drop all subtasks, and restore them; pending timers of the clock are lost.

        `stream` is the output of the step in another version of the job.
        """
        return self.restore(self.checkpoint(1), parallelism, stream, checkpoint_id=1)

    def checkpoint(self, checkpoint_id: int) -> list[Any]:
        """Take a snapshot and return what is stored of it, for `restore`."""
        return self.stored(self.cut(checkpoint_id))

    def cut(self, checkpoint_id: int) -> list[tuple[StateSnapshot, KeyGroupRange]]:
        """Take a snapshot, of which nothing is written before `stored`."""
        return [(o.snapshot(checkpoint_id), o.context.key_groups) for o in self.operators]

    def stored(self, cut: list[tuple[StateSnapshot, KeyGroupRange]]) -> list[Any]:
        """Return what is stored of a snapshot, for `restore`."""
        return [self._written(snapshot, ours) for snapshot, ours in cut]

    def drop(self, cut: list[tuple[StateSnapshot, KeyGroupRange]]) -> None:
        """Drop a snapshot that is not to be stored."""
        for snapshot, _ in cut:
            for table in snapshot.tables.values():
                if table.discard is not None:
                    table.discard()
            for files in snapshot.files.values():
                files.release()

    def restore(
        self,
        stored: list[Any],
        parallelism: int | None = None,
        stream: Any = None,
        *,
        checkpoint_id: int,
    ) -> Step:
        """Drop all subtasks, and restore others from a snapshot."""
        infos = {info.name: info for info in self.operators[0].states()}
        old = list(self.operators)
        taken, self.clock.waiting = self.outputs, {}
        for operator in old:
            operator.close()
        self.node = self.node if stream is None else output_of(stream).node
        self._start(parallelism or self.parallelism, checkpoint_id)
        for output in taken:
            self.outputs[0].events += output.events
        for index, operator in enumerate(self.operators):
            state = self._share(stored, index)
            state.states.update(infos)
            asyncio.run(_awaited(operator.restore(state)))
        return self

    def _written(self, snapshot: StateSnapshot, ours: KeyGroupRange) -> Any:
        tables = {name: cut.make(None) for name, cut in snapshot.tables.items()}
        assert all(isinstance(cut, TableCut) for cut in snapshot.tables.values())
        items = {
            name: (cut.items() if callable(cut.items) else cut.items, cut.redistribution)
            for name, cut in snapshot.items.items()
        }
        files = {}
        for name, cut in snapshot.files.items():
            collected, paths = cut.collect(), {}
            for file in collected.files:
                self._number += 1
                assert self._directory is not None
                paths[file.id] = shutil.copy(file.path, self._directory / f"f{self._number}")
            cut.release()
            files[name] = (collected.meta, paths, ours)
        return tables, items, files

    def _share(self, stored: list[Any], index: int) -> RestoredState:
        """Return the state of one new subtask: its rows and items, and files that may have its rows."""
        ours = key_group_range(index, self.parallelism, MAX_PARALLELISM)
        state = RestoredState()
        for name in {name: None for tables, _, _ in stored for name in tables}:
            table = pa.concat_tables([part[0][name] for part in stored if name in part[0]])
            state.tables |= rows_of(ours, {name: table})
        for name, (_, mode) in stored[0][1].items():
            lists = [items[name][0] for _, items, _ in stored]
            every = [item for items in lists for item in items]
            state.items[name] = (
                lists[index % len(lists)] if mode == "broadcast"
                else every if mode == "union" else every[index :: self.parallelism]
            )  # fmt: skip
        for name in {name: None for _, _, files in stored for name in files}:
            state.files[name] = []
            for meta, paths, theirs in (part[2][name] for part in stored if name in part[2]):
                copies = {}
                for id_, path in paths.items():
                    self._number += 1
                    copies[id_] = Path(shutil.copy(path, self._directory / f"f{self._number}"))
                state.files[name].append(RestoredFiles(meta, copies, theirs.first, theirs.last))
        return state

    # what came of it

    def take(self, kind: str = "main") -> list[Any]:
        """Return the records that were emitted since the last call, with their times."""
        found = []
        for output in self.outputs:
            found += [event[1:] for event in output.events if event[0] == kind]
            output.events = [event for event in output.events if event[0] != kind]
        return found

    @property
    def events(self) -> list[tuple[Any, ...]]:
        """Return everything that the only subtask has emitted, in order."""
        (output,) = self.outputs
        events, output.events = output.events, []
        return events


async def _awaited(waiting: Any) -> None:
    if waiting is not None:
        await waiting


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function at once, and return an awaitable of its result."""
    result = function()

    async def done() -> Any:
        return result

    return done()


def streams(*, event_time: bool = True, names: tuple[str, ...] = ("in",)) -> list[Any]:
    """Return streams of Python objects of one job."""
    job = WrittenJob("test")
    found = []
    for name in names:
        stream = job.read(from_list([]), name=name)
        found.append(stream.event_time(lambda record: 0) if event_time else stream)
    return found


@pytest.fixture(params=["hashmap", "rocksdb"])
def steps(request: Any, tmp_path: Path) -> Iterator[Callable[..., Step]]:
    """Make the subtasks of a step, under both state backends."""
    made: list[Step] = []

    def make(stream: Any, parallelism: int = 1, options: dict[str, str] | None = None) -> Step:
        options = {"state.backend.type": request.param, **(options or {})}
        step = Step(stream, parallelism, options, tmp_path)
        made.append(step)
        return step

    yield make
    for step in made:
        for operator in step.operators:
            operator.close()
