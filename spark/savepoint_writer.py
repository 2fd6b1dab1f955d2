"""Makes savepoints from DataFrames: a first one for a job, or a copy of another with some states
replaced.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any, Final, Self

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from ..errors import StateError, UsageError
from ..operators.clock import SystemClock
from ..runtime.job import Job, runnable
from ..runtime.offline.editor import DeclaredOperator, SavepointEditor
from ..runtime.offline.files import OpenStore
from ..runtime.offline.pieces import CopyTask, Goal, WrittenFile, write_table
from ..runtime.offline.placing import SUBTASK_COLUMN, Placing
from ..runtime.offline.snapshot import open_snapshot
from ..runtime.savepoint.compare import declared_states
from ..state.snapshot import KEY_GROUP_COLUMN
from .types import as_spark, spark_schema

COPY_HERE_BYTES: Final = 64 << 20
"""State of the base up to this size is copied by the driver itself, larger state by tasks."""
_WRITTEN: Final = pa.schema([("written", pa.binary())])
_RESULT: Final = "written binary"
_ZONE: Final = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
"""Spark 4.0 has no parameter for the zone, and uses UTC."""


class SavepointWriter:
    """Makes a savepoint that jobs can begin with.

        SavepointWriter(spark, base=path).put("totals", "total", frame).write("kept")

    Everything of the base that is not replaced or removed is taken over: other states, positions of
    sources, pending output of sinks. The new savepoint is a directory of its own, and exists only once it
    is complete. The base is not changed.

    Args:
        spark: the session.
        base: a savepoint, or a job's checkpoints (the newest, or `@7`); None: begin with nothing.
        job: the job for which the savepoint is made. With it, states can be written that the base does
            not have.
        max_parallelism: the number of key groups; None: that of the base, or of the job.
        options: options of the storage, such as `s3.endpoint`.

    Raises:
        UsageError: neither base nor job is given, or the job is wrong as written.
        StateError: there is no such base.
    """

    def __init__(
        self,
        spark: Any,
        *,
        base: str | None = None,
        job: Job | None = None,
        max_parallelism: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if base is None and job is None:
            raise UsageError(
                "a savepoint is of something: neither base nor job is given",
                fix="base=PATH to change a savepoint, job=JOB to make the first one of a job",
            )
        self._spark = spark
        storage = dict(options or {})
        snapshot = None if base is None else open_snapshot(base, storage)
        spec = None if job is None else runnable(job).spec()
        declared = {}
        if spec is not None:
            widths = {n.name: v.parallelism for v in spec.plan.vertices for n in v.nodes}
            states = declared_states(spec.plan)
            declared = {name: DeclaredOperator(widths[name], states[name]) for name in states}
        groups = max_parallelism
        if groups is None and snapshot is not None:
            groups = snapshot.located.manifest.max_parallelism
        if groups is None:
            assert spec is not None
            groups = spec.plan.max_parallelism
        name = spec.name if spec is not None else ""
        self._editor = SavepointEditor(
            job=name or (snapshot.located.job if snapshot is not None else ""),
            base=snapshot,
            declared=declared,
            max_parallelism=groups,
            options=storage,
            now_ms=SystemClock().now_ms(),
        )
        self._frames: list[tuple[Placing, Any]] = []

    def put(self, operator: str, state: str, frame: Any) -> Self:
        """Replace a state by the rows of `frame`.

        Args:
            operator: the name of the operator.
            state: the name of state per key, windows, running aggregates or timers.
            frame: a DataFrame with the columns that reading the state gives; a row per element of lists
                and maps. `key_group` is ignored and may be missing; without `last_used`, values with a
                time to live count as used now.

        Raises:
            StateError: neither base nor job knows the state, or a column is missing, unknown, or of another
                type.
        """
        placing = self._editor.placing(operator, state)
        # Spark's struct() marks its fields as never null, which does not make another type.
        given = spark_schema(to_arrow_schema(frame.schema, **_ZONE))
        placing.check_columns(given, spark_schema(placing.schema))
        self._frames.append((placing, frame))
        return self

    def remove(self, operator: str, state: str | None = None) -> Self:
        """Leave out a state of the base, or all states of an operator.

        Raises:
            StateError: the base has no such state.
        """
        self._editor.remove(operator, state)
        return self

    def write(self, target: str) -> str:
        """Make the savepoint in a new directory below `target`, and return its path.

        Raises:
            StateError: rows do not fit their state, or the base cannot be read.
            StorageError: the storage failed.
            PySparkException: a task failed, also for one of these reasons; nothing is left behind.
        """
        goal = self._editor.begin(target, secrets.token_hex(6))
        try:
            copies = self._editor.copies(goal)
            written = [one for each in self._frames for one in self._write(goal, *each)]
            written += self._copy(copies)
            self._editor.publish(goal, written)
        except BaseException:
            self._editor.abort(goal)
            raise
        return goal.root

    def _write(self, goal: Goal, placing: Placing, frame: Any) -> list[WrittenFile]:
        """Write a state in two steps: rows get their key groups where they are, then those of each
        subtask go into a file.
        """
        placed = pa.schema([*spark_schema(placing.schema), pa.field(SUBTASK_COLUMN, pa.int32())])
        rows = frame.mapInArrow(_Place(placing, placed), from_arrow_schema(placed, True))
        rows = rows.repartition(placing.parallelism, SUBTASK_COLUMN)
        rows = rows.sortWithinPartitions(SUBTASK_COLUMN, KEY_GROUP_COLUMN)
        return _collected(rows.mapInArrow(_Write(placing, goal), _RESULT))

    def _copy(self, tasks: list[CopyTask]) -> list[WrittenFile]:
        states = {(one.state.operator, one.state.name): one.state for one in tasks}
        if sum(state.size_bytes for state in states.values()) <= COPY_HERE_BYTES:
            found = [task.run("driver") for task in tasks]
            return [one for one in found if one is not None]
        numbers = self._spark.range(len(tasks)).repartition(len(tasks))
        return _collected(numbers.mapInArrow(_Copy(tasks), _RESULT))


@dataclass(frozen=True, slots=True)
class _Place:
    placing: Placing
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from as_spark(self.placing.place(pa.Table.from_batches([batch])), self.schema)


@dataclass(frozen=True, slots=True)
class _Write:
    placing: Placing
    goal: Goal

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        placing, attempt = self.placing, _attempt()
        with OpenStore(self.goal.root, self.goal.options) as opened:
            for subtask, pieces in groupby(_by_subtask(batches), lambda piece: piece[0]):
                tables = (self._stored(table) for _, table in pieces)
                yield from _results(
                    write_table(
                        opened, placing.operator, subtask, placing.info.name, placing.info.keys,
                        placing.checked(tables), attempt,
                    )
                )  # fmt: skip

    def _stored(self, table: pa.Table) -> pa.Table:
        schema = self.placing.schema
        return table.select(schema.names).cast(schema)


@dataclass(frozen=True, slots=True)
class _Copy:
    tasks: list[CopyTask]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _results(self.tasks[number].run(_attempt()))


def _by_subtask(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Table]]:
    """Yield pieces of the sorted batches, each of one subtask."""
    for batch in batches:
        table = pa.Table.from_batches([batch])
        owners = table.column(SUBTASK_COLUMN)
        for subtask in owners.unique().to_pylist():
            yield subtask, table.filter(pa.compute.equal(owners, subtask))


def _attempt() -> str:
    """Return a name that is unique among all attempts of all tasks."""
    context = TaskContext.get()
    if context is None:
        raise StateError("not in a task of Spark")
    return f"{context.stageId()}-{context.taskAttemptId()}"


def _results(written: WrittenFile | None) -> Iterator[pa.RecordBatch]:
    if written is not None:
        yield pa.RecordBatch.from_pydict({"written": [msgspec.msgpack.encode(written)]}, _WRITTEN)


def _collected(frame: Any) -> list[WrittenFile]:
    decode = msgspec.msgpack.Decoder(WrittenFile).decode
    return [decode(bytes(row.written)) for row in frame.collect()]
