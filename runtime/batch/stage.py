"""The stages of a batch: a DataFrame per vertex, and the function by which Spark runs a subtask of it.

Errors travel back as texts of exceptions, because Spark passes nothing else on.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import pickle
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import HeadgateError, InternalError
from ...operators.partitioning import Broadcast
from ..plan import ExchangeEdge, PhysicalPlan, Vertex
from ..shipping import ship, unship
from ..worker.channels import rows_of
from .blocks import MARK, ORDER, RESULT, SCHEMA, Block, from_rows, in_batches, to_rows
from .subtask import BatchStage, BatchSubtask, Outgoing

_ERROR: Final = "headgate-error:"


def make_stage(
    plan: PhysicalPlan,
    vertex: Vertex,
    options: dict[str, str],
    attempt: int,
    run: str,
    scratch: str | None,
) -> BatchStage:
    """Return `vertex` in the form sent to Spark's tasks: without the rest of the graph."""
    outgoing = tuple(
        Outgoing(
            edge,
            phase_of(plan, edge),
            plan.vertices[edge.target].parallelism,
            rows_of(plan, edge),
        )
        for edge in plan.outputs_of(vertex)
    )
    alone = replace(vertex, nodes=[replace(node, inputs=()) for node in vertex.nodes])
    return BatchStage(
        plan.job_name, plan.max_parallelism, alone, outgoing, options, attempt, run, scratch
    )


def phase_of(plan: PhysicalPlan, edge: ExchangeEdge) -> int:
    """Return 0 for inputs that are read before everything else: broadcast inputs beside others."""
    inputs = plan.inputs_of(plan.vertices[edge.target])
    others = [each for each in inputs if not isinstance(each.partitioning, Broadcast)]
    return 0 if others and isinstance(edge.partitioning, Broadcast) else 1


class StageTask:
    """Runs one subtask of a stage; Spark calls it in its Python workers.

    Ready output is returned after each batch: a subtask only holds its state and the contents of
    `BlockOrder` and `BlockWriter`.
    """

    def __init__(self, stage: bytes, count: Callable[[dict[str, int]], None]) -> None:
        """Create the task. `stage`: shipped. `count` takes the counters of a finished subtask."""
        self._stage = stage
        self._count = count

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the output blocks, and the results of sinks, for the input blocks."""
        try:
            blocks_in = from_rows(batches)
            mark = next(blocks_in, None)
            if mark is None or mark.phase != MARK:
                raise InternalError(f"a task does not know which subtask it is row=`{mark}`")
            subtask = BatchSubtask(unship(self._stage), mark.target)
            splits = itertools.chain([mark], blocks_in)
            with asyncio.Runner() as runner:
                steps = subtask.run(splits if subtask.is_source else blocks_in)
                try:
                    while (blocks := runner.run(_next(steps))) is not None:
                        yield from map(to_rows, in_batches(blocks))
                finally:
                    runner.run(steps.aclose())
            self._count(subtask.counters())
        except HeadgateError as error:
            raise RuntimeError(packed(error)) from error


async def _next(steps: AsyncIterator[list[Block]]) -> list[Block] | None:
    return await anext(steps, None)


def packed(error: HeadgateError) -> str:
    """Encode an error as text that passes through Spark unchanged."""
    return f"{error}\n{_ERROR}{base64.b64encode(pickle.dumps(error)).decode()}:"


def unpacked(text: str) -> HeadgateError | None:
    """Decode the error in the text of one of Spark's; None if there is none."""
    _, found, rest = text.partition(_ERROR)
    if not found:
        return None
    error = pickle.loads(base64.b64decode(rest.partition(":")[0]))
    return error if isinstance(error, HeadgateError) else None


@dataclass(frozen=True, slots=True)
class Frames:
    """The DataFrame of all sinks' results, and the persisted ones, to be released."""

    results: Any
    shared: list[Any]


def make_frames(
    plan: PhysicalPlan,
    session: Any,
    splits: Mapping[str, list[bytes]],
    options: dict[str, str],
    attempt: int,
    run: str,
    scratch: str | None,
    count: Callable[[dict[str, int]], None],
) -> Frames:
    """Return the job as DataFrames; nothing runs.

    Args:
        plan: its vertices come after those they read.
        session: see `run.py`.
        splits: of each source, by name.
        options: the options for operators.
        attempt: part of the names of sinks' files.
        run: the name of the run, for sinks.
        scratch: directory for state on disk; None: the system's.
        count: takes the counters of each subtask.
    """
    frames: dict[int, Any] = {}
    shared: list[Any] = []
    for vertex in plan.vertices:
        if vertex.head.source is not None:
            rows = _splits(session, vertex, splits[vertex.head.name])
        else:
            rows = _inputs(plan, vertex, frames, session)
        stage = make_stage(plan, vertex, options, attempt, run, scratch)
        frame = rows.mapInArrow(StageTask(ship(stage), count), SCHEMA)
        sinks = [node for node in vertex.nodes if node.sink is not None]
        readers = {edge.target for edge in plan.outputs_of(vertex)}
        if len(readers) + bool(sinks) > 1:
            # Otherwise Spark would run the stage again for each of them.
            frame = frame.persist(_on_disk())
            shared.append(frame)
        frames[vertex.id] = frame
    results = [
        frames[vertex.id].where(f"edge <= {RESULT}").select("edge", "target", "seq", "payload")
        for vertex in plan.vertices
        if any(node.sink is not None for node in vertex.nodes)
    ]
    return Frames(reduce(lambda one, other: one.union(other), results), shared)


def _splits(session: Any, vertex: Vertex, splits: list[bytes]) -> Any:
    """Return a row for each subtask of a source, with its splits."""
    width = vertex.parallelism
    rows = [
        (0, index, MARK, 0, 0, 0, 0, bytearray(msgspec.msgpack.encode(splits[index::width])))
        for index in range(width)
    ]
    return session.createDataFrame(rows, SCHEMA).repartitionById(width, "target")


def _inputs(plan: PhysicalPlan, vertex: Vertex, frames: Mapping[int, Any], session: Any) -> Any:
    """Return the blocks for `vertex`, each in the partition of its subtask, in order."""
    edges = plan.inputs_of(vertex)
    # One vertex may send on several edges; each row is taken once.
    by_source: dict[int, list[int]] = {}
    for edge in edges:
        by_source.setdefault(edge.source, []).append(edge.id)
    parts = [
        frames[source].where(f"edge in ({', '.join(map(str, ids))})")
        for source, ids in by_source.items()
    ]
    rows = reduce(lambda one, other: one.union(other), parts, _marks(session, vertex.parallelism))
    return rows.repartitionById(vertex.parallelism, "target").sortWithinPartitions(*ORDER)


def _marks(session: Any, subtasks: int) -> Any:
    """Return a row before each subtask's blocks that identifies the subtask.

    Spark's own number of a task is that of the stage, which may have the tasks of several vertices,
    and a subtask may have no blocks.
    """
    columns = (
        "int(0) edge",
        "int(id) target",
        f"int({MARK}) phase",
        "bigint(0) first_ms",
        "int(0) input_index",
        "int(0) sender",
        "bigint(0) seq",
        "binary('') payload",
    )
    return session.range(0, subtasks, 1, 1).selectExpr(*columns)


def _on_disk() -> Any:
    from pyspark import StorageLevel

    return StorageLevel.DISK_ONLY
