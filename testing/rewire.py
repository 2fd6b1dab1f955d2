"""Replaces the sources and sinks of a user's job by those of a world.

A source reads what the test pushes; a sink collects what is written, and so does a listener at each side
output that the job does not read.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as pa

from ..api.settings import NO_RESTART, CheckpointSettings
from ..errors import UsageError
from ..operators.base import Operator, OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.graph import Graph, Input, Node
from ..operators.partitioning import Forward
from ..operators.sink import Guarantee, Sink, SinkOperator, SinkWriter
from ..operators.source import Source, SourceReader
from ..runtime.job import Job, runnable
from ..runtime.job_settings import absolute
from ..runtime.options.execution import PARALLELISM
from ..runtime.options.monitoring import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from ..runtime.options.network import BUFFER_TIMEOUT, BUFFER_TIMEOUT_ENABLED
from ..runtime.options.recovery import TAKEOVERS_MAX
from ..runtime.options.registry import current_key
from ..runtime.options.state import RECOVERY_PATH
from ..runtime.plan import JobSpec
from ..state.snapshot import CommitPermit
from .steering import SteeredFactory
from .world import SPLITS, Bell, Readers, SinkBox, SourceBox, World, world_of

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


# --- sinks -----------------------------------------------------------------------------------------


class CollectingSink(Sink):
    """Collects the written records, and makes them visible when the real sink would: at once, or when
    committed.
    """

    guarantees = frozenset(Guarantee)

    def __init__(self, token: str, name: str, real: Sink) -> None:
        self.token = token
        self.name = name
        self.guarantee = real.guarantee
        self.needs_columns = real.needs_columns

    def writer(self) -> SinkWriter:
        return _CollectingWriter(self)

    def describe(self) -> str:
        return "harness"


class _CollectingWriter(SinkWriter):
    def __init__(self, sink: CollectingSink) -> None:
        self._world = world_of(sink.token)
        self._box = self._world.sinks[sink.name]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._world.begin_attempt(context.attempt)

    def write(self, batch: Batch) -> None:
        entry = (self._world.next_written(), batch)
        if self._box.transactional:
            self._box.writing.setdefault(self.context.subtask_index, []).append(entry)
        else:
            self._box.visible.append(entry)

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        batches = self._box.writing.pop(self.context.subtask_index, [])
        if not batches:
            return None
        committable = f"{self._world.token}/{self._world.next_written()}".encode()
        self._box.rolled[committable] = (self.context.attempt, batches)
        return lambda: [committable]

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        """Commit the batches. A missing one was committed before, or belongs to the world of a
        savepoint.
        """
        for committable in committables:
            _, batches = self._box.rolled.pop(committable, (0, []))
            self._box.visible.extend(batches)


class SideListener(Operator):
    """Collects a side output that no step of the job reads."""

    def __init__(self, token: str, name: str) -> None:
        self._world = world_of(token)
        self._box = self._world.sides[name]

    def process(self, batch: Batch, input_index: int) -> None:
        self._box.visible.append((self._world.next_written(), batch))

    def on_watermark(self, timestamp: int) -> None:
        """Do nothing, as there is no operator behind this one."""

    def on_idle(self, idle: bool) -> None:
        """Do nothing, as there is no operator behind this one."""


# --- sources ---------------------------------------------------------------------------------------


class _Split(msgspec.Struct, tag="headgate.testing"):
    """One log of a source; `position` counts its batches."""

    token: str
    number: int
    position: int = 0


@dataclass(frozen=True)
class PushSource(Source):
    """Stands in for the source with this name."""

    token: str
    name: str
    schema: pa.Schema | None
    row_type: type[Any] | None
    bounded: bool
    rejected_schema: pa.Schema | None

    def splits(self, parallelism: int) -> list[bytes]:
        return [
            msgspec.msgpack.encode(_Split(self.token, number))
            for number in range(max(SPLITS, parallelism))
        ]

    def reader(self) -> SourceReader:
        return _PushReader(self)

    def with_columns(self, columns: Sequence[str]) -> PushSource:
        if self.schema is None:
            return self
        kept = pa.schema([field for field in self.schema if field.name in columns])
        whole = len(kept) == len(self.schema)
        return replace(self, schema=kept, row_type=self.row_type if whole else None)

    def describe(self) -> str:
        return "harness"


class _PushReader(SourceReader):
    def __init__(self, source: PushSource) -> None:
        self._source = source
        self._world = world_of(source.token)
        self._box = self._world.sources[source.name]
        self._positions: dict[int, int] = {}
        self._bell = Bell()

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._world.begin_attempt(context.attempt)
        self._box.readers[context.subtask_index] = Readers(self._positions, self._bell.ring)

    def add_splits(self, splits: Sequence[bytes]) -> None:
        """Add splits. Those from the savepoint of another harness begin from the start; those of a real
        source are lost.
        """
        ours = [split for each in splits if (split := _decode(each)) is not None]
        for split in ours:
            known = split.token == self._source.token
            self._positions[split.number] = split.position if known else 0
        if splits and not ours:
            context = self.context
            numbers = range(context.subtask_index, SPLITS, context.parallelism)
            self._positions.update(dict.fromkeys(numbers, 0))

    def poll(self) -> Batch | None:
        found = self._next_entry()
        if found is None:
            return None
        split, batch = found
        self._positions[split] += 1
        if self._source.schema is None or not isinstance(batch, ColumnBatch):
            return batch
        return ColumnBatch(batch.data.select(self._source.schema.names), batch.timestamps)

    async def wait(self) -> None:
        if self._next_entry() is None and not self.finished:
            await self._bell.wait()

    @property
    def finished(self) -> bool:
        return self._box.ended and not any(
            len(self._box.logs.get(split, ())) > position
            for split, position in self._positions.items()
        )

    def snapshot(self) -> list[bytes]:
        return [
            msgspec.msgpack.encode(_Split(self._source.token, number, position))
            for number, position in sorted(self._positions.items())
        ]

    def _next_entry(self) -> tuple[int, Batch] | None:
        """Return the oldest entry that is released and unread, with its split."""
        entries = (
            (log[position], split)
            for split, log in self._box.logs.items()
            if (position := self._positions.get(split, len(log))) < len(log)
        )
        oldest = min(((place, split, batch) for (place, batch), split in entries), default=None)
        if oldest is None or oldest[0] >= self._world.released:
            return None
        return oldest[1], oldest[2]


def _decode(split: bytes) -> _Split | None:
    try:
        return msgspec.msgpack.decode(split, type=_Split)
    except msgspec.DecodeError:
        return None
