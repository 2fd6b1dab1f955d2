"""Replaces the sources and sinks of a user's job by those of a world."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from ..api.settings import NO_RESTART, CheckpointSettings
from ..errors import UsageError
from ..operators.graph import Graph, Input, Node
from ..operators.partitioning import Forward
from ..operators.sink import Guarantee, SinkOperator
from ..runtime.job import Job, runnable
from ..runtime.job_settings import absolute
from ..runtime.options.execution import PARALLELISM
from ..runtime.options.monitoring import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from ..runtime.options.network import BUFFER_TIMEOUT, BUFFER_TIMEOUT_ENABLED
from ..runtime.options.recovery import TAKEOVERS_MAX
from ..runtime.options.registry import current_key
from ..runtime.options.state import RECOVERY_PATH
from ..runtime.plan import JobSpec
from .stand_ins import CollectingSink, PushSource, SideListener
from .steering import SteeredFactory
from .world import SinkBox, SourceBox, World

STORAGE: Final = "memory://harness"
_EVENT_TIME: Final = "event_time"
_ONE_WORKER: Final = 1 << 20
"""The slots per worker. All subtasks share one worker, so that no data travel through sockets, also those
of steps in different slot sharing groups.
"""
_OPTIONS: Final = {
    BUFFER_TIMEOUT_ENABLED.key: "true",
    BUFFER_TIMEOUT.key: "0 ms",  # the clock stands still: nothing may wait for it to fill a buffer
    HEARTBEAT_INTERVAL.key: "36500 d",
    HEARTBEAT_TIMEOUT.key: "73000 d",
    TAKEOVERS_MAX.key: "1000000",
}


def rewire(
    job: Job,
    world: World,
    *,
    parallelism: int | None,
    restore_from: str | os.PathLike[str] | None,
    allow_non_restored_state: bool,
) -> JobSpec:
    """Return the job that a coordinator can run. `job` is not changed; its sources and sinks are added to
    `world`.

    Raises:
        UsageError: the job is wrong as written.
    """
    rewired = copy.copy(runnable(job))
    dropped = {RECOVERY_PATH.key} | (set() if parallelism is None else {PARALLELISM.key})
    rewired.options = {k: v for k, v in job.options.items() if current_key(k) not in dropped}
    if parallelism is not None:
        rewired.options[PARALLELISM.key] = str(parallelism)
    rewired.resources = {}
    rewired.graph = _copy(runnable(job).graph)
    for node in list(rewired.graph.nodes):
        _replace(node, rewired.graph, world)
    spec = rewired.spec(
        restore_from=None if restore_from is None else absolute(os.fspath(restore_from)),
        allow_non_restored_state=allow_non_restored_state,
    )
    return replace(
        spec,
        checkpoint=CheckpointSettings(every_ms=None, storage=STORAGE),
        restart=NO_RESTART,
        options={**spec.options, **_OPTIONS},
        slots_per_worker=_ONE_WORKER,
    )


def _copy(graph: Graph) -> Graph:
    nodes: dict[int, Node] = {}
    for node in graph.nodes:
        inputs = tuple(replace(input_, node=nodes[input_.node.id]) for input_ in node.inputs)
        sides = dict(node.sides)
        nodes[node.id] = replace(node, inputs=inputs, sides=sides, slot_sharing_group=None)
    return Graph(list(nodes.values()))


def _replace(node: Node, graph: Graph, world: World) -> None:
    if node.source is not None:
        real = node.source
        world.sources[node.name] = SourceBox(
            node.name, real.schema, real.row_type, tuple(_event_time_steps(node, graph))
        )
        node.source = PushSource(
            world.token, node.name, real.schema, real.row_type, real.bounded, real.rejected_schema
        )
    elif node.sink is not None:
        (input_,) = node.inputs
        schema, row_type = _arriving(input_)
        transactional = node.sink.guarantee is Guarantee.EXACTLY_ONCE
        world.sinks[node.name] = SinkBox(node.name, schema, row_type, transactional)
        node.sink = CollectingSink(world.token, node.name, node.sink)
        node.factory = partial(SinkOperator, node.sink)
    else:
        if node.kind == _EVENT_TIME and node.factory is not None:
            node.factory = SteeredFactory(node.factory, world.token, node.name)
        _listen(node, graph, world)


def _arriving(input_: Input) -> tuple[object, type[object] | None]:
    if input_.side is not None:
        return input_.node.sides[input_.side], None
    return input_.node.schema, input_.node.row_type


def _listen(node: Node, graph: Graph, world: World) -> None:
    """Collect the side outputs of `node` that the job does not use."""
    read = {reader.inputs[index].side for reader, index in graph.consumers(node)}
    for side, schema in node.sides.items():
        name = f"{node.name}.{side}"
        if side in read or any(other.name == name for other in graph.nodes):
            continue
        world.sides[name] = SinkBox(name, schema, None, transactional=False)
        graph.nodes.append(
            Node(
                id=max(other.id for other in graph.nodes) + 1,
                name=name,
                kind="listen",
                origin=node.origin,
                inputs=(Input(node, Forward(), side),),
                factory=partial(SideListener, world.token, name),
                parallelism=node.parallelism,
                max_parallelism=node.max_parallelism,
            )
        )


def _event_time_steps(source: Node, graph: Graph) -> Iterator[str]:
    """Yield the steps that give the records of `source` their event time: the first on every path."""
    seen: set[int] = set()
    front = [source]
    while front:
        node = front.pop(0)
        for reader, _ in graph.consumers(node):
            if reader.id in seen:
                continue
            seen.add(reader.id)
            if reader.kind == _EVENT_TIME:
                yield reader.name
            else:
                front.append(reader)


def check_job(job: object) -> Job:
    """Return the job, if it is one.

    Raises:
        UsageError: the argument is not a job.
    """
    if isinstance(job, Job):
        return job
    raise UsageError(
        f"harness needs a job type=`{type(job).__name__}`",
        fix="give it the hg.Job, before job.run() is called; load_job(path) reads one from YAML",
    )
