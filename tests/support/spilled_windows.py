"""Aggregates of windows on disk beside the same in memory: subtasks, records, snapshots, rescaling."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import StateError
from headgate.operators.aggregation.aggregates import AggregatePlan, avg, count, max, min, sum
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch
from headgate.operators.windows.kinds import WINDOW_FIELDS
from headgate.operators.windows.late import LATE
from headgate.state.hashing import hash_columns, key_groups_of
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredFiles, RestoredState, StateSnapshot
from headgate.tests.support.operators import ManualClock, operator_context

MAX_PARALLELISM = 16
SCHEMA = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("number", pa.int64()),
        pa.field("x", pa.int64()),
        pa.field("price", pa.decimal128(22, 2)),
        pa.field("text", pa.string()),
    ]
)
AGGREGATES = {
    "n": count(), "some": count("x"), "total": sum("x"), "mean": avg("x"), "least": min("x"),
    "money": sum("price"), "word": max("text"),
}  # fmt: skip
KEYS = [("name",), ("number",), ("name", "number")]
ROCKSDB = {"state.backend.type": "rocksdb", "taskmanager.memory.managed.size": "24kb"}
ROOMY = {**ROCKSDB, "taskmanager.memory.managed.size": "4mb"}
attempts = itertools.count(1)


class Output:
    """Rows that went out since `take`; how a window's keys are ordered is not defined."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.ends: list[int] = []
        self.largest = 0

    def emit(self, batch: ColumnBatch) -> None:
        assert batch.timestamps is not None
        self.largest = np.maximum(self.largest, len(batch))
        self.ends += batch.timestamps.tolist()
        self.rows += [f"result {row}" for row in batch.data.to_pylist()]

    def emit_side(self, tag: str, batch: ColumnBatch) -> None:
        assert tag == LATE
        self.rows += [f"late {row}" for row in batch.data.to_pylist()]

    def emit_watermark(self, timestamp: int) -> None:
        assert self.ends == sorted(self.ends)
        self.ends = []
        self.rows.append(f"watermark {timestamp}")

    def take(self) -> list[str]:
        """The rows, sorted between watermarks."""
        found, self.rows, self.ends = self.rows, [], []
        return sorted(found)


class UnorderedOutput(Output):
    """Rows whose times are in no order, such as those of early results."""

    def emit(self, batch: ColumnBatch) -> None:
        super().emit(batch)
        self.ends = []


class Side:
    """The subtasks of one operator, which a subclass makes."""

    states: tuple[str, ...]
    """The names of the tables of rows."""
    output: type[Output] = Output
    results_min = 100

    def new_operator(self) -> Any:
        """Make the operator of a subtask."""
        raise NotImplementedError

    def __init__(self, directory: Path, keys: tuple[str, ...], parallelism: int, **options: str):
        self.keys, self.parallelism, self.disk = keys, parallelism, bool(options)
        self.operators, self.outputs, self.timers = [], [], ManualClock()
        self.calls: list[Callable[[], None]] | None = None  # None: they run at once
        for index in range(parallelism):
            operator, attempt = self.new_operator(), next(attempts)
            own = directory / f"attempt{attempt}"
            own.mkdir()
            self.outputs.append(self.output())
            operator.output = self.outputs[-1]
            operator.open(
                operator_context(
                    index,
                    parallelism,
                    MAX_PARALLELISM,
                    attempt=attempt,
                    run_in_thread=self.threads,
                    timers=self.timers,
                    options=options,
                    local_directory=lambda own=own: own,
                )
            )
            self.operators.append(operator)

    @classmethod
    def told_apart(cls, table: pa.Table) -> pa.Table:
        """The columns of a canonical table that do not depend on where the state was; checks its schema."""
        assert table.schema.remove_metadata() == plan_schema(table)
        return table

    def threads(self, call: Callable[[], None]) -> None:
        if self.calls is None:
            call()
        else:
            self.calls.append(call)

    def process(self, data: pa.RecordBatch, times: Any, input_index: int = 0) -> None:
        groups = key_groups_of(hash_columns([data.column(key) for key in self.keys]), 16)
        for index, operator in enumerate(self.operators):
            own = key_group_range(index, self.parallelism, MAX_PARALLELISM)
            rows = np.flatnonzero((groups >= own.first) & (groups <= own.last))
            operator.process(ColumnBatch(data.take(pa.array(rows)), times[rows]), input_index)

    def watermark(self, timestamp: int) -> None:
        for operator in self.operators:
            operator.on_watermark(timestamp)

    def take(self) -> list[str]:
        rows = [row for output in self.outputs for row in output.take()]
        return sorted(row for row in rows if not row.startswith("watermark"))

    def snapshots(self, store: Path, *, canonical: bool) -> list[RestoredState]:
        """Return the state that each subtask would restore."""
        return [self._snapshot(index, store, canonical) for index in range(self.parallelism)]

    def _snapshot(self, index: int, store: Path, canonical: bool) -> RestoredState:
        return self.state_of(self.operators[index].snapshot(1), index, store, canonical=canonical)

    def state_of(
        self, snapshot: StateSnapshot, index: int, store: Path, *, canonical: bool
    ) -> RestoredState:
        """Return the state that a subtask would restore from a snapshot that it took."""
        operator = self.operators[index]
        states = {info.name: info for info in operator.states()}
        tables = {name: cut.make(None) for name, cut in snapshot.tables.items()}
        own, files = key_group_range(index, self.parallelism, MAX_PARALLELISM), {}
        for name, cut in snapshot.files.items():
            try:
                if canonical:
                    if made := list(cut.tables()):
                        tables[name] = pa.concat_tables(made)
                    continue
                collected, held = cut.collect(), {}
                for file in collected.files:
                    held[file.id] = store / file.id
                    if not held[file.id].exists():
                        shutil.copy(file.path, held[file.id])
                files[name] = [RestoredFiles(collected.meta, held, own.first, own.last)]
            finally:
                cut.release()
        return RestoredState(tables=tables, files=files, states=states)

    def restore(self, parts: list[RestoredState]) -> None:
        for index, operator in enumerate(self.operators):
            own = key_group_range(index, self.parallelism, MAX_PARALLELISM)
            state = RestoredState(states=parts[0].states)
            for name in {name for part in parts for name in part.tables}:
                table = pa.concat_tables([p.tables[name] for p in parts if name in p.tables])
                groups = table.column("key_group").to_numpy()
                rows = np.flatnonzero((groups >= own.first) & (groups <= own.last))
                state.tables[name] = table.take(pa.array(rows))
            for part in parts:
                for name, found in part.files.items():
                    state.files.setdefault(name, []).extend(
                        one for one in found
                        if one.first_key_group <= own.last and one.last_key_group >= own.first
                    )  # fmt: skip
            operator.restore(state)

    def close(self) -> None:
        for operator in self.operators:
            operator.close()


def plan(keys: tuple[str, ...]) -> AggregatePlan:
    return AggregatePlan(keys, AGGREGATES, SCHEMA, WINDOW_FIELDS)


def batch(rng: np.random.Generator, at: int) -> tuple[pa.RecordBatch, Any]:
    """Rows around a time, some long before it; few or many."""
    size = int(rng.choice([10, 150]))
    x = rng.integers(-50, 50, size)
    number = rng.integers(0, 120, size)
    columns = [
        pa.array([f"name {value % 97}" if value % 13 else None for value in number * 7]),
        pa.array(number, mask=number == 5),
        pa.array(x, mask=x % 4 == 0),
        pa.array(x, mask=x % 5 == 0).cast(pa.decimal128(22, 2)),
        pa.array([None if value % 3 == 0 else f"{value}" for value in x]),
    ]
    times = at - rng.integers(0, rng.choice([30, 400]), size)
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), times


def canonical_rows(kind: type[Side], parts: list[RestoredState]) -> list[str]:
    """The rows of the tables of all subtasks; checks their promised form."""
    rows = []
    for name, part in itertools.product(kind.states, parts):
        table = part.tables.get(name)
        if table is not None:
            groups = table.column("key_group").to_pylist()
            assert groups == sorted(groups)
            rows += [f"{name} {row}" for row in kind.told_apart(table).to_pylist()]
    return sorted(rows)


def plan_schema(table: pa.Table) -> pa.Schema:
    keys = tuple(name for name in table.schema.names[1:3] if name in ("name", "number"))
    return plan(keys).state_schema


def events(seed: int, steps: int) -> Iterator[tuple[str, Any]]:
    """Batches, watermarks, checkpoints and restores; time goes on."""
    chance, rng, now = random.Random(seed), np.random.default_rng(seed), 0
    for _ in range(steps):
        now += chance.choice([0, 5, 40])
        yield "batch", batch(rng, now)
        kind = chance.choice(["watermark", "watermark", "checkpoint", "restore", "", ""])
        yield kind, now - 20


def check_against_memory(
    kind: type[Side], directory: Path, keys: tuple[str, ...], seed: int, options: dict[str, str]
) -> int:
    """Check that state on disk gives the results and snapshots of state in memory.

    That holds after checkpoints, restores from files and from canonical tables of either backend, and
    at other parallelisms. Return the most files that there were at a time.
    """
    chance = random.Random(seed)
    disk, memory = kind(directory, keys, 1, **options), kind(directory, keys, 1)
    spilled = fired = 0
    for step, what in events(seed, 40):
        if step == "batch":
            for side in (disk, memory):
                side.process(*what)
                side.timers.advance(20)
        elif step == "watermark":
            for side in (disk, memory):
                side.watermark(what)
        elif step == "checkpoint":
            both = [side.snapshots(directory, canonical=True) for side in (disk, memory)]
            assert canonical_rows(kind, both[0]) == canonical_rows(kind, both[1])
        elif step == "restore":
            before = [disk, memory]
            if disk.parallelism > 1:  # barriers may overtake watermarks
                for side in before:
                    side.operators[-1].on_watermark(what)
            canonical = chance.random() < 0.4
            parts = [side.snapshots(directory, canonical=canonical) for side in before]
            if canonical:  # each backend reads what the other wrote
                parts.reverse()
            parallelism = chance.choice([1, 2, 3])
            disk = kind(directory, keys, parallelism, **options)
            memory = kind(directory, keys, parallelism)
            for side, part in zip((disk, memory), parts, strict=True):
                side.restore(part)
            for side in before:
                side.close()
        found = disk.take()
        assert found == memory.take()
        fired += len(found)
        spilled = np.maximum(spilled, len(run_files(directory, kind)))
    for side in (disk, memory):
        side.watermark(WATERMARK_MAX)
    found = disk.take()
    assert found == memory.take()
    for side in (disk, memory):
        side.close()
    assert fired + len(found) > kind.results_min
    assert not run_files(directory, kind)
    return int(spilled)


def run_files(directory: Path, kind: type[Side]) -> list[Path]:
    """The files of all subtasks."""
    return [path for name in kind.states for path in directory.glob(f"attempt*/{name}/*.arrow")]


def check_restored_in_a_thread(
    kind: type[Side], directory: Path, restored: Callable[[Any], bool]
) -> None:
    """Check that files are read in a thread.

    A worker has one event loop: while it reads for long it would miss its heartbeats. `restored` says
    whether an operator has its state.
    """
    side, rng = kind(directory, ("name",), 1, **ROCKSDB), np.random.default_rng(6)
    for _ in range(5):
        side.process(*batch(rng, 50))
    parts = side.snapshots(directory, canonical=False)
    again = kind(directory, ("name",), 1, **ROCKSDB)
    again.calls = []
    again.restore(parts)
    assert not restored(again.operators[0])
    for call in again.calls:
        call()
    assert restored(again.operators[0])
    for one in (side, again):
        one.close()


def check_files_fit(kind: type[Side], directory: Path, window: Any = None) -> None:
    """Check that files need the backend that wrote them, undamaged lists, and no other `window`."""
    side, rng = kind(directory, ("name",), 1, **ROCKSDB), np.random.default_rng(5)
    for _ in range(5):
        side.process(*batch(rng, 50))
    parts = side.snapshots(directory, canonical=False)
    with pytest.raises(StateError, match="files of another state backend"):
        kind(directory, ("name",), 1).restore(parts)
    other = kind(directory, ("name",), 1, **ROCKSDB)
    if window is not None:
        other.operators[0]._window = window
        with pytest.raises(StateError, match="other windows"):
            other.restore(parts)
    damaged = RestoredFiles(b"?", {}, 0, 15)
    with pytest.raises(StateError, match="damaged"):
        side.restore([RestoredState(files={kind.states[0]: [damaged]})])
    for one in (side, other):
        one.close()
