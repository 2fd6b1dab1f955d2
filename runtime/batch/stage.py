"""The function that Spark calls to run a subtask, and the transport of its errors."""

from __future__ import annotations

import asyncio
import base64
import itertools
import pickle
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

import pyarrow as pa

from ...errors import HeadgateError, InternalError
from ...operators.partitioning import Broadcast
from ..plan import ExchangeEdge, PhysicalPlan, Vertex
from ..shipping import unship
from ..worker.channels import rows_of
from .blocks import MARK, Block, from_rows, in_batches, to_rows
from .subtask import Outgoing, Stage, Subtask

_ERROR: Final = "headgate-error:"


def make_stage(
    plan: PhysicalPlan, vertex: Vertex, options: dict[str, str], attempt: int, scratch: str | None
) -> Stage:
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
    return Stage(plan.job_name, plan.max_parallelism, alone, outgoing, options, attempt, scratch)


def phase_of(plan: PhysicalPlan, edge: ExchangeEdge) -> int:
    """Return 0 for inputs that are read before everything else: broadcast inputs beside others."""
    inputs = plan.inputs_of(plan.vertices[edge.target])
    others = [each for each in inputs if not isinstance(each.partitioning, Broadcast)]
    return 0 if others and isinstance(edge.partitioning, Broadcast) else 1


class StageTask:
    """Runs one subtask of a stage; Spark calls it in its Python workers.

    Ready output is returned after each batch: a subtask only holds its state and the contents of
    `TimeOrder` and `BlockWriter`.
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
            subtask = Subtask(unship(self._stage), mark.target)
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
