"""Builds the operator chain of one subtask from its vertex."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import check
from ...operators.base import Operator, OperatorContext, TimerService
from ...operators.elements import Batch
from ...operators.graph import Node
from ...operators.sink import SinkOperator
from ...state.keygroups import key_group_range
from ..observe.metrics import UserMetrics
from .chain import ChainedOperator, ChainOutput, OperatorChain, Partition, call_and_wait
from .environment import TaskEnvironment


class SourceHead(Operator):
    """The placeholder at the head of a source's chain: the subtask polls the reader and emits
    through it."""

    def process(self, batch: Batch, input_index: int) -> None:
        self.output.emit(batch)


def build_chain(
    env: TaskEnvironment,
    partitions: Mapping[int, Sequence[tuple[str | None, Partition]]],
) -> OperatorChain:
    """Instantiate and wire the operators of `env.vertex`, not yet opened.

    Args:
        partitions: by node id, the result partitions that leave the vertex there, with the side
            output they carry (None: the main output).
    """
    chained: dict[int, ChainedOperator] = {}
    for node in env.vertex.nodes:
        output = ChainOutput(node.name)
        operator = _instantiate(node)
        output.optional_sides = operator.optional_sides
        operator.output = output
        output.holds_end = operator.emits_at_end
        chained[node.id] = ChainedOperator(node.id, node.name, operator, output)
        for side, partition in partitions.get(node.id, ()):
            if side is None:
                output.partitions.append(partition)
            else:
                output.side_partitions.setdefault(side, []).append(partition)
    for link in env.vertex.links:
        target = (chained[link.target], link.input_index)
        output = chained[link.source].output
        if link.side is None:
            output.next.append(target)
        else:
            output.side_next.setdefault(link.side, []).append(target)
    everything = [partition for parts in partitions.values() for _, partition in parts]
    return OperatorChain(list(chained.values()), everything)


def _instantiate(node: Node) -> Operator:
    if node.source is not None:
        return SourceHead()
    if node.sink is not None:
        return SinkOperator(node.sink)
    check(node.factory is not None, "a node has neither source, sink nor factory", node=node.name)
    assert node.factory is not None  # for the type checker; `check` has raised otherwise
    return node.factory()


async def open_chain(
    chain: OperatorChain,
    env: TaskEnvironment,
    timers: TimerService,
    held_s: Callable[[], float],
) -> None:
    """Open all operators, tail to head, so that each can already emit when its turn comes."""
    for chained in reversed(chain.operators):
        context = make_context(chained, env, timers, held_s)
        await call_and_wait(chained, chained.operator.open, context)
        if chained.operator.function_life is not None:
            own = replace(context, metrics=UserMetrics(context.metrics))
            await call_and_wait(chained, chained.operator.function_life.open, own)


def make_context(
    chained: ChainedOperator,
    env: TaskEnvironment,
    timers: TimerService,
    held_s: Callable[[], float],
) -> OperatorContext:
    """Return the context of an operator in this subtask."""
    name = chained.name
    logger = logging.LoggerAdapter(
        logging.getLogger("headgate.operator"),
        {
            "job": env.plan.job_name,
            "operator": name,
            "subtask": env.index,
            "attempt": env.attempt,
        },
    )

    def run_in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(env.io_threads, call)

    return OperatorContext(
        job_name=env.plan.job_name,
        operator_name=name,
        subtask_index=env.index,
        parallelism=env.vertex.parallelism,
        max_parallelism=env.plan.max_parallelism,
        attempt=env.attempt,
        key_groups=key_group_range(env.index, env.vertex.parallelism, env.plan.max_parallelism),
        clock=env.clock,
        timers=timers,
        metrics=env.metrics_of(env.vertex.name, name, env.index),
        logger=logger,
        run_in_thread=run_in_thread,
        options=env.options,
        restored_checkpoint=env.restored_checkpoint,
        local_directory=lambda: env.directory.of_operator(name),
        held_s=held_s,
        splits=env.splits,
        drops=chained.output.drops,
        sides_read=frozenset([*chained.output.side_next, *chained.output.side_partitions]),
    )
