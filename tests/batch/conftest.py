"""Batch jobs without Spark: the same stages and blocks, carried from one to the next by a loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from headgate.runtime.batch import run as batch
from headgate.runtime.batch.blocks import ORDER, RESULT, Block, from_rows, to_rows
from headgate.runtime.batch.stage import make_stage
from headgate.runtime.batch.subtask import BatchSubtask
from headgate.runtime.job import Job, runnable
from headgate.runtime.options.registry import Options
from headgate.runtime.shipping import ship, unship


async def _all(subtask: BatchSubtask, blocks: list[Block]) -> list[Block]:
    rows = [to_rows(blocks)] if blocks else []
    return [block async for some in subtask.run(from_rows(rows)) for block in some]


def run_here(job: Job) -> dict[str, int]:
    """Run a job as Spark would, subtask by subtask; returns what was counted."""
    runnable(job).override({"execution.runtime-mode": "BATCH"})
    spec = runnable(job).spec()
    options = Options(spec.options)
    plan = batch.batch_plan(spec)
    blocks: dict[int, dict[int, list[Block]]] = defaultdict(lambda: defaultdict(list))
    written: dict[int, list[bytes]] = defaultdict(list)
    counted: dict[str, int] = defaultdict(int)
    attempt = batch._attempt()
    run = batch._name_of_run(spec.run, attempt)
    for vertex in plan.vertices:
        stage = ship(make_stage(plan, vertex, options.effective(), attempt, run, None))
        for index in range(vertex.parallelism):
            if vertex.head.source is not None:
                splits = vertex.head.source.splits(vertex.parallelism)[index :: vertex.parallelism]
                given = [Block(0, index, 1, 0, 0, 0, 0, msgspec.msgpack.encode(splits))]
            else:
                given = [b for e in plan.inputs_of(vertex) for b in blocks[e.id][index]]
                given.sort(key=lambda block: [getattr(block, name) for name in ORDER])
            subtask = BatchSubtask(unship(stage), index)
            for block in asyncio.run(_all(subtask, given)):
                if block.edge <= RESULT:
                    written[RESULT - block.edge].append(block.payload)
                else:
                    blocks[block.edge][block.target].append(block)
            for name, count in subtask.counters().items():
                counted[name] += count
    asyncio.run(batch._commit(plan, written, options))
    return dict(counted)


@pytest.fixture
def run_batch_here() -> Any:
    return run_here
