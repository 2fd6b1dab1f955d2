"""A coordinator's work for the sources of its job.

It gives a source that makes data of its own a place in the storage of the job, cuts sources into
splits, finds out which sources have read their history, and which of them wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from ...errors import HeadgateError, InternalError
from ...operators.graph import Node
from ...operators.source import SourceRun, SourceStorage
from ...operators.splits import History
from ..control.messages import QUIET_FOR_GOOD, SubtaskStatistics
from ..plan import PhysicalPlan, Vertex
from ..protocol import names
from ..protocol.failures import as_headgate_error
from ..protocol.watermark_alignment import WatermarkAlignment
from ..storage.base import CheckpointStore, Existed
from ..storage.open_store import join_address
from .environment import JobEnvironment

_log = logging.getLogger("headgate.job")


@final
class SourceDirectory:
    """The part of the job's storage in which a source keeps data of its own; a `SourceStorage`."""

    def __init__(self, store: CheckpointStore, address: str, source: str) -> None:
        self._store = store
        self._root = names.source_dir(source)
        self._address = f"{address}/{self._root}"

    @property
    def address(self) -> str:
        return self._address

    async def read(self, name: str) -> bytes | None:
        return await self._store.read(f"{self._root}/{name}")

    async def create_if_absent(self, name: str, data: bytes) -> bytes:
        match await self._store.create_if_absent(f"{self._root}/{name}", data):
            case Existed(there):
                return there
        return data

    async def upload(self, name: str, path: Path) -> None:
        await self._store.write_file(f"{self._root}/{name}", path)

    async def names(self, prefix: str) -> list[str]:
        below = len(self._root) + 1
        found = self._store.list_files(f"{self._root}/{prefix}")
        return [name[below:] async for name, _ in found]

    async def delete(self, names: Sequence[str]) -> None:
        await self._store.delete_files([f"{self._root}/{name}" for name in names])


def source_run(env: JobEnvironment, node: Node) -> SourceRun:
    """Return what the source `node` knows about the run."""
    storage: SourceStorage | None = None
    checkpoint = env.spec.checkpoint
    if env.store is not None and checkpoint is not None:
        address = join_address(checkpoint.storage, names.job_dir(env.spec.name))
        if address.startswith("file:"):
            address = env.store.describe()  # as a path, without escapes
        storage = SourceDirectory(env.store, address, node.name)
    return SourceRun(
        job=env.spec.name,
        run=env.spec.run,
        source=node.name,
        where=str(node.origin),
        options=env.options.effective(),
        storage=storage,
        announce=lambda text: env.publish("source", f"{node.name}: {text}", source=node.name),
        confirm=env.log.confirm if env.log is not None else None,
    )


async def discard_source_data(env: JobEnvironment) -> None:
    """Let the job's sources delete the data that they made: no checkpoint is left that reads it."""
    for node in env.spec.graph.sources():
        if node.source is None or not node.source.needs_storage:
            continue
        try:
            await node.source.discard(source_run(env, node))
        except HeadgateError as error:
            _log.warning("data of source `%s` was not deleted: %s", node.name, error)


@final
class FreshSplits:
    """The splits of sources that begin without state. A source is cut once in a coordinator's life."""

    def __init__(self, env: JobEnvironment) -> None:
        self._env = env
        self._splits: dict[str, list[bytes]] = {}

    @property
    def sources(self) -> frozenset[str]:
        """The names of the sources that have been cut."""
        return frozenset(self._splits)

    async def of(self, vertex: Vertex) -> list[bytes]:
        """Return the splits of the source of `vertex`.

        Raises:
            HeadgateError: the source cannot be cut.
        """
        name = vertex.head.name
        if name not in self._splits:
            source = vertex.head.source
            if source is None:
                raise InternalError(f"vertex has no source vertex=`{vertex.name}`")
            try:
                configured = source.configure(self._env.options.effective())
                prepared = await configured.prepare(source_run(self._env, vertex.head))
                found = await asyncio.to_thread(prepared.splits, vertex.parallelism)
                self._splits[name] = found
            except HeadgateError:
                raise
            except Exception as error:
                what = f"source `{name}` cannot be cut into splits"
                raise as_headgate_error(error, what, str(vertex.head.origin)) from error
        return self._splits[name]


def read_histories(
    plan: PhysicalPlan, statistics: Mapping[tuple[int, int], SubtaskStatistics]
) -> tuple[bool, list[int]]:
    """Return whether any source reads its history, and the vertices whose sources may go live.

    A source goes live when all of its subtasks have read their part of the history. A subtask that
    has not reported may still read it. None of this is stored: it follows from the reports of the
    subtasks, so a coordinator that takes over, or a restore to the middle of a history, needs only
    their next report.
    """
    backlog, over = False, []
    for vertex in plan.vertices:
        if vertex.head.source is None or not vertex.head.source.has_history:
            continue
        subtasks = [statistics.get((vertex.id, index)) for index in range(vertex.parallelism)]
        stages = {History.BEING_READ if each is None else each.history for each in subtasks}
        if History.BEING_READ in stages:
            backlog = True
        elif History.OVER in stages:
            over.append(vertex.id)
    return backlog, over


def quiet_sources(
    plan: PhysicalPlan, statistics: Mapping[tuple[int, int], SubtaskStatistics]
) -> list[Vertex]:
    """Return the vertices whose sources end, because nothing has come for as long as they wait.

    A subtask that has not reported since it began may have something to read. None of this is stored: a
    subtask that did not end before a failure waits again.
    """
    found = []
    for vertex in plan.vertices:
        source = vertex.head.source
        if source is None or source.stop_after_idle_ms is None:
            continue
        subtasks = [statistics.get((vertex.id, index)) for index in range(vertex.parallelism)]
        quiet_ms = min(0 if each is None else each.quiet_ms for each in subtasks)
        if source.stop_after_idle_ms <= quiet_ms < QUIET_FOR_GOOD:
            found.append(vertex)
    return found


def ended_splits(
    vertex: Vertex, statistics: Mapping[tuple[int, int], SubtaskStatistics]
) -> frozenset[str]:
    """Return the awaited splits of a source that have ended for good, as its subtasks have reported."""
    subtasks = [statistics.get((vertex.id, index)) for index in range(vertex.parallelism)]
    return frozenset(key for each in subtasks if each is not None for key in each.ended_splits)


def alignment_of(plan: PhysicalPlan) -> WatermarkAlignment:
    """Return the alignment groups of all event-time steps; steps of one group have equal settings."""
    settings = [node.watermarks for vertex in plan.vertices for node in vertex.nodes]
    aligned = [each.alignment for each in settings if each is not None and each.alignment]
    return WatermarkAlignment({each.group: (each.max_drift_ms, each.every_ms) for each in aligned})
