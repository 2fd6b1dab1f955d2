"""One subtask of a stage: the operators of a vertex, driven from its first block to its last."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from ...errors import HeadgateError, InternalError, check
from ...operators.base import AsyncOperator
from ...operators.clock import SystemClock
from ...operators.elements import WATERMARK_MAX, Batch
from ...operators.functions.per_worker import worker_begins, worker_ends
from ...operators.sink import SinkOperator
from ...operators.source import REJECTED, SourceReader
from ...operators.windows.records.operator import WindowOperator
from ...state.snapshot import OperatorSnapshot
from ..exchange.partitioners import Connections, make_partitioner
from ..observe.metrics import MetricsGroup, MetricsRegistry
from ..plan import ExchangeEdge, PhysicalPlan, Vertex
from ..task.chain import (
    NodePartition,
    build_chain,
    call_and_wait,
    make_context,
    open_chain,
    with_context,
    wrap_error,
)
from ..task.concurrency import MailboxTimers
from ..task.environment import SnapshotTiming, TaskEnvironment, TaskSettings
from ..task.local_files import SubtaskDirectory
from .blocks import RESULT, Block, BlockOrder, BlockWriter, FinalWatermarkOutput, decode

_THREADS: Final = 2
COMMIT: Final = 1
"""The number of the one checkpoint that a batch job has: its end."""
DROPPED: Final = ".dropped."
"""Separates, in the names of counters, a step from the kind of its drops."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An outgoing exchange of the vertex, as its sender needs it."""

    edge: ExchangeEdge
    phase: int
    receivers: int
    rows: Callable[[Batch], Any]


@dataclass(frozen=True, slots=True)
class BatchStage:
    """A vertex in the form sent to Spark's tasks, without the rest of the graph."""

    job_name: str
    max_parallelism: int
    vertex: Vertex
    outgoing: tuple[Outgoing, ...]
    options: dict[str, str]
    attempt: int
    run: str
    """Names the run of the job; see `OperatorContext.run_id`."""
    scratch: str | None
    """The directory for state on disk; None: the system's."""


class _NoReports:
    """Ignores reports: the outcome of a task is that of its call."""

    def acked(
        self, checkpoint_id: int, snapshots: Sequence[OperatorSnapshot], timing: SnapshotTiming
    ) -> None:
        return None

    def declined(self, checkpoint_id: int, reason: str, text: str) -> None:
        return None

    def finished(self) -> None:
        return None

    def loop_round(self, loop: str, number: int, records: int) -> None:
        return None

    def terminated(self) -> None:
        return None

    def failed(self, error: HeadgateError) -> None:
        return None


@dataclass
class BatchSubtask:
    """One subtask of `stage`, from its first block to its last."""

    stage: BatchStage
    index: int
    _given: list[Block] = field(default_factory=list)
    _writers: list[BlockWriter] = field(default_factory=list)
    _fired: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None
    _metrics: MetricsGroup = field(default_factory=lambda: MetricsGroup(MetricsRegistry(), {}))

    async def run(self, blocks: Iterator[Block]) -> AsyncGenerator[list[Block], None]:
        """Yield blocks as soon as there are any.

        Args:
            blocks: of the inputs, in their order; for a source: its splits. Waiting for one blocks.
        """
        if self.stage.scratch is not None:
            Path(self.stage.scratch).mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="headgate-batch-", dir=self.stage.scratch))
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="batch-io")
        env = self._environment(directory, threads)
        self._chain = build_chain(env, self._outputs())
        operators = [chained.operator for chained in self._chain.operators]
        self._sinks = [each for each in operators if isinstance(each, SinkOperator)]
        self._timers = MailboxTimers(self._mail)
        worker_begins(self)
        try:
            await self._open(env)
            steps = self._read(env, blocks) if self.is_source else self._receive(blocks)
            async for _ in steps:
                if self._given:
                    yield self._take()
            await self._finish()
            for writer in self._writers:
                writer.flush()
            if self._given:
                yield self._take()
        finally:
            self._timers.cancel_all()
            self._chain.close()
            await self._chain.close_functions()
            await worker_ends(self)
            threads.shutdown(wait=True)
            shutil.rmtree(directory, ignore_errors=True)

    def counters(self) -> dict[str, int]:
        """Return the operators' counters, by operator and metric."""
        found: dict[str, int] = {}
        for scope in self._metrics.scopes():
            for name, count in scope.counts().items():
                found[f"{scope.labels['operator']}.{name}"] = int(count)
        for chained in self._chain.operators:
            found[f"{chained.name}.records_in"] = chained.records_in
            found[f"{chained.name}.records_out"] = chained.output.records_out
            for kind, count in chained.output.drops.counts.items():
                found[f"{chained.name}{DROPPED}{kind.value}"] = count
        return {name: count for name, count in found.items() if count}

    @property
    def is_source(self) -> bool:
        """True if it reads splits, which come as its only block."""
        return self.stage.vertex.head.source is not None

    def _take(self) -> list[Block]:
        taken = list(self._given)
        self._given.clear()
        return taken

    # -- building -----------------------------------------------------------------------------------

    def _environment(self, directory: Path, threads: ThreadPoolExecutor) -> TaskEnvironment:
        stage = self.stage

        def no_store(address: str) -> Any:
            raise InternalError(f"batch execution has no checkpoints address=`{address}`")

        env = TaskEnvironment(
            plan=PhysicalPlan(stage.job_name, stage.max_parallelism, [stage.vertex], []),
            vertex=stage.vertex,
            index=self.index,
            generation=0,
            attempt=stage.attempt,
            restored_checkpoint=0,
            run=stage.run,
            options=stage.options,
            settings=TaskSettings(),
            clock=SystemClock(),
            store=None,
            store_at=no_store,
            io_threads=threads,
            transfers=asyncio.Semaphore(_THREADS),
            directory=SubtaskDirectory(directory),
            reports=_NoReports(),
            metrics_of=self._metrics.operator,
        )
        env.splits.behind_source = self.is_source
        return env

    def _outputs(self) -> dict[int, list[NodePartition[BlockWriter]]]:
        stage, outputs = self.stage, dict[int, list[NodePartition[BlockWriter]]]()
        names = {node.id: node.name for node in stage.vertex.nodes}
        for out in stage.outgoing:
            edge = out.edge
            width = stage.vertex.parallelism
            pairs = Connections(edge.partitioning, width, out.receivers)
            targets = list(pairs.receivers_of(self.index))
            partitioner = make_partitioner(
                edge.partitioning,
                targets=len(targets),
                sender=self.index,
                max_parallelism=stage.max_parallelism,
                rng=random.Random(f"{edge.id}/{self.index}"),
                rows=out.rows,
            )
            writer = BlockWriter(
                edge.id,
                out.phase,
                edge.input_index,
                self.index,
                names[edge.source_node],
                targets,
                partitioner,
                self._given.append,
            )
            self._writers.append(writer)
            outputs.setdefault(edge.source_node, []).append(NodePartition(edge.side, writer))
        return outputs

    async def _open(self, env: TaskEnvironment) -> None:
        for node, chained in zip(self.stage.vertex.nodes, self._chain.operators, strict=True):
            if node.watermarks is not None:
                chained.operator.output = FinalWatermarkOutput(chained.output)
        await open_chain(self._chain, env, self._timers, _never_held)

    # -- input --------------------------------------------------------------------------------------

    async def _read(
        self, env: TaskEnvironment, blocks: Iterator[Block]
    ) -> AsyncGenerator[None, None]:
        """Process all records of the splits of a source, which came as one block."""
        head = self._chain.head
        source = self.stage.vertex.head.source
        if source is None:
            raise InternalError(f"a stage without a source vertex=`{self.stage.vertex.name}`")
        reader: SourceReader = source.reader()
        context = make_context(head, env, self._timers, _never_held)

        def reject(batch: Batch) -> None:
            head.output.emit_side(REJECTED, batch)

        try:
            with_context(head, reader.open, context, reject)
            splits = [
                split
                for block in blocks
                for split in msgspec.msgpack.decode(block.payload, type=list[bytes])
            ]
            with_context(head, reader.add_splits, splits)
            while True:
                batch = with_context(head, reader.poll)
                if batch is not None:
                    await self._process(batch, 0)
                with_context(head, env.splits.batch_done)
                if batch is None:
                    if reader.finished:
                        return
                    await reader.wait()
                yield None
        finally:
            reader.close()

    async def _receive(self, blocks: Iterator[Block]) -> AsyncGenerator[None, None]:
        """Process the records of other vertices in event-time order, with watermarks in between."""
        mine = (self._checked(block) for block in blocks)
        order = BlockOrder(decode, exact=self._minds_order)
        releases = (release for block in mine for release in order.take(block))
        for some in (releases, order.end()):
            for release in some:
                if release.batch is not None:
                    await self._process(release.batch, release.input_index)
                else:
                    await self._watermark(release.watermark)
                yield None

    @property
    def _minds_order(self) -> bool:
        """Return True if timers of the first step must fire at their place between the records."""
        operator = self._chain.head.operator
        if isinstance(operator, WindowOperator):
            return operator.minds_order
        return self.stage.vertex.head.kind == "process"

    def _checked(self, block: Block) -> Block:
        check(
            block.target == self.index,
            "a block came to the wrong subtask",
            target=block.target,
            subtask=self.index,
        )
        return block

    async def _process(self, batch: Batch, input_index: int) -> None:
        head = self._chain.head
        while any(sink.backlogged() for sink in self._sinks):
            await self._timer()
        head.records_in += len(batch)
        if isinstance(head.operator, AsyncOperator):
            try:
                await head.operator.process_async(batch, input_index)
            except HeadgateError:
                raise
            except Exception as error:
                raise wrap_error(head.name, error) from error
            return
        while head.operator.full():
            await self._timer()
        with_context(head, head.operator.process, batch, input_index)
        await self._give_way()

    async def _watermark(self, timestamp: int) -> None:
        head = self._chain.head
        head.current_watermark = timestamp
        with_context(head, head.operator.on_watermark, timestamp)
        await self._give_way()

    # -- timers -------------------------------------------------------------------------------------

    def _mail(self, mail: Callable[[], Any]) -> None:
        """Run a timer: timers fire only while a coroutine of the subtask waits, never within a call."""
        try:
            mail()
        except BaseException as error:
            self._failure = error
        self._fired.set()

    async def _timer(self) -> None:
        """Wait for the next timer: nothing else changes what an operator waits for."""
        self._fired.clear()
        await self._fired.wait()
        self._raise()

    async def _give_way(self) -> None:
        """Let due timers fire."""
        await asyncio.sleep(0)
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            name = self._chain.head.name
            known = isinstance(self._failure, HeadgateError)
            raise self._failure if known else wrap_error(name, self._failure)

    # -- the end ------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        await self._watermark(WATERMARK_MAX)
        while not self._chain.settled():
            await self._timer()
        await self._chain.finish()
        for node, chained in zip(self.stage.vertex.nodes, self._chain.operators, strict=True):
            operator = chained.operator
            if isinstance(operator, SinkOperator):
                await call_and_wait(chained, self._roll, node.id, operator)

    def _roll(self, node: int, operator: SinkOperator) -> Awaitable[None] | None:
        """Make the output of a sink durable, and invisible; its committables are the result."""
        precommit = operator.writer.roll(COMMIT)
        if precommit is None:
            return None

        async def pre_commit(call: Callable[[], list[bytes]] = precommit) -> None:
            for number, item in enumerate(await operator.context.run_in_thread(lambda: call())):
                self._given.append(
                    Block(RESULT - node, self.index, 1, 0, 0, self.index, number, item)
                )

        return pre_commit()


def _never_held() -> float:
    return 0.0
