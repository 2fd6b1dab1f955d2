"""The DataFrames of a job: one per vertex, made of those of the vertices before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from ..plan import PhysicalPlan, Vertex
from ..shipping import ship
from .blocks import MARK, ORDER, RESULT, SCHEMA
from .stage import StageTask, make_stage


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
    scratch: str | None,
    count: Callable[[dict[str, int]], None],
) -> Frames:
    """Return the job as DataFrames; nothing runs.

    Args:
        plan: its vertices come after those they read.
        session: see `session.py`.
        splits: of each source, by name.
        options: the options for operators.
        attempt: part of the names of sinks' files.
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
        stage = make_stage(plan, vertex, options, attempt, scratch)
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
