"""An operator chain: operators of one vertex, wired by direct calls, and how it is built and opened.

Each operator's `output` is a `ChainOutput`: it passes batches to the next operators of the chain and to
the result partitions that leave the vertex. With a single next operator a hop is one Python call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from ...errors import HeadgateError, TargetAwayError, check
from ...operators.base import Operator, OperatorContext, TimerService
from ...operators.drops import Drops
from ...operators.elements import (
    WATERMARK_MAX,
    WATERMARK_MIN,
    Batch,
    Control,
    Watermark,
    WatermarkStatus,
)
from ...operators.graph import Node
from ...operators.lost_records import Samples
from ...operators.sink import RETRY_PAUSES_S, SinkOperator
from ...state.keygroups import key_group_range
from ...state.snapshot import CommitPermit
from ..exchange.partition import OutgoingBarrier, PartitionStats
from ..observe.metrics import UserMetrics
from ..protocol.failures import as_headgate_error
from .concurrency import to_the_end
from .environment import TaskEnvironment

LEAVING = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""Exceptions that are no failures of a task: it, or the process, is being ended."""


class ChainPartition(Protocol):
    """The part of a result partition that the chain needs."""

    def emit(self, batch: Batch) -> None:
        """Send a batch to the subtasks downstream; never blocks."""
        ...

    def broadcast(self, element: Control) -> None:
        """Send a control element to all subtasks downstream, after everything emitted so far."""
        ...


class OutputPartition(ChainPartition, Protocol):
    """A result partition that holds records back, and tells its subtask about it.

    Attributes:
        debloated_bytes: the bytes of one buffer for each channel together, while a receiver wants small
            buffers.
        emitted_bytes: the bytes emitted, as far as they had to be measured.
    """

    debloated_bytes: int | None
    emitted_bytes: int

    @property
    def backlogged(self) -> bool:
        """True while records wait that may not be sent yet; raises ExchangeError if a channel broke."""
        ...

    def set_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the backlog ends, a channel breaks, or credit came for which a buffer waits."""
        ...

    def flush(self) -> None:
        """Send all partly filled buffers now."""
        ...

    def next_flush(self) -> float | None:
        """Return the monotonic time at which `flush` is due; None: there is nothing to flush."""
        ...

    def flush_due(self, now: float) -> bool:
        """Return True if a partly filled buffer has waited for the buffer timeout."""
        ...

    def flush_early(self, now: float, load: float) -> None:
        """Send partly filled buffers to receivers that wait for records."""
        ...

    def next_early(self) -> float | None:
        """Return the monotonic time from which `flush_early` may send something; None: nothing for now."""
        ...

    def outgoing_barrier(self, checkpoint_id: int) -> OutgoingBarrier | None:
        """Return the way out of the last barrier, if it is of this checkpoint and may overtake records."""
        ...

    def stats(self) -> PartitionStats:
        """Return counters since the start, and the queue length now."""
        ...

    def close(self) -> None:
        """Release the channels."""
        ...


P_co = TypeVar("P_co", bound=ChainPartition, covariant=True)


class NodePartition(msgspec.Struct, Generic[P_co], frozen=True):
    """A result partition that leaves the vertex behind one of its nodes.

    Attributes:
        side: the side output that it carries; None: the main output.
        partition: takes the records.
        edge: the id of the exchange; None for the way back in a loop.
    """

    side: str | None
    partition: P_co
    edge: int | None = None


Outputs: TypeAlias = Mapping[int, Sequence[NodePartition[OutputPartition]]]
"""The result partitions of a subtask, by the id of the node behind which they leave."""


class ChainedOperator(msgspec.Struct):
    """One operator of a chain."""

    node_id: int
    name: str
    operator: Operator
    output: ChainOutput
    records_in: int = 0
    current_watermark: int = -(2**63)


class ChainOutput(msgspec.Struct):
    """The output of one operator. `records_out` counts the records of its main output."""

    name: str
    next: list[tuple[ChainedOperator, int]] = msgspec.field(default_factory=list)
    partitions: list[ChainPartition] = msgspec.field(default_factory=list)
    side_next: dict[str, list[tuple[ChainedOperator, int]]] = msgspec.field(default_factory=dict)
    side_partitions: dict[str, list[ChainPartition]] = msgspec.field(default_factory=dict)
    records_out: int = 0
    watermark: int = -(2**63)
    holds_end: bool = False
    """True while the end of event time waits until the operator has finished, for its last results.
    """
    end_held: bool = False
    latest: int | None = None
    """The latest event time of what was emitted, while `holds_end` is true."""
    drops: Drops = msgspec.field(default_factory=Drops)
    optional_sides: frozenset[str] = frozenset()

    def emit(self, batch: Batch) -> None:
        rows = len(batch)
        if rows == 0:
            return
        self.records_out += rows
        if self.holds_end and batch.timestamps is not None:
            latest = int(batch.timestamps.max())
            self.latest = latest if self.latest is None else max(self.latest, latest)
        for chained, index in self.next:
            chained.records_in += rows
            chained.operator.process(batch, index)
        for partition in self.partitions:
            partition.emit(batch.without_positions())

    def emit_side(self, tag: str, batch: Batch) -> None:
        rows = len(batch)
        if rows == 0:
            return
        chained_readers = self.side_next.get(tag, ())
        partitions = self.side_partitions.get(tag, ())
        if not (chained_readers or partitions or tag in self.optional_sides):
            self.drops.unread(tag, batch, self.watermark)
        for chained, index in chained_readers:
            chained.records_in += rows
            chained.operator.process(batch, index)
        for partition in partitions:
            partition.emit(batch.without_positions())

    def emit_watermark(self, timestamp: int) -> None:
        if self.holds_end and timestamp == WATERMARK_MAX:
            self.end_held = True
            return
        self.watermark = timestamp
        for chained, _ in self._all_next():
            chained.current_watermark = timestamp
            chained.operator.on_watermark(timestamp)
        for partition in self._all_partitions():
            partition.broadcast(Watermark(timestamp))

    @property
    def time_at_end(self) -> int:
        """Return the event time of results at the end: the latest that was emitted, else the watermark."""
        if self.latest is not None:
            return self.latest
        return self.watermark if self.watermark > WATERMARK_MIN else 0

    def release_end(self) -> None:
        """Release the end of event time: all results were emitted."""
        self.holds_end = False
        if self.end_held:
            self.end_held = False
            self.emit_watermark(WATERMARK_MAX)

    def emit_idle(self, idle: bool) -> None:
        for chained, _ in self._all_next():
            chained.operator.on_idle(idle)
        for partition in self._all_partitions():
            partition.broadcast(WatermarkStatus(idle))

    def _all_next(self) -> list[tuple[ChainedOperator, int]]:
        """Return the next operators of main and side outputs: event time travels on both."""
        if not self.side_next:
            return self.next
        return [*self.next, *(target for targets in self.side_next.values() for target in targets)]

    def _all_partitions(self) -> list[ChainPartition]:
        if not self.side_partitions:
            return self.partitions
        return [*self.partitions, *(p for parts in self.side_partitions.values() for p in parts)]


class OperatorChain:
    """The operators of one subtask, head first."""

    def __init__(
        self, operators: Sequence[ChainedOperator], partitions: Sequence[ChainPartition]
    ) -> None:
        self.operators = list(operators)
        self.partitions = list(partitions)

    @property
    def head(self) -> ChainedOperator:
        """The operator that receives the inputs."""
        return self.operators[0]

    def settled(self) -> bool:
        """Return True if no operator will emit anything before there is more input."""
        return all(chained.operator.settled() for chained in self.operators)

    def wrote(self) -> tuple[str, ...]:
        """Return the names of the sinks that have taken records in this attempt, and show some."""
        return tuple(
            chained.name
            for chained in self.operators
            if isinstance(chained.operator, SinkOperator) and chained.operator.wrote
        )

    def broadcast(self, element: Control) -> None:
        """Send a control element out of the vertex on all its partitions."""
        for partition in self.partitions:
            partition.broadcast(element)

    async def finish(self) -> None:
        """Flush all operators, head to tail: the results of one are still processed by the next."""
        for chained in self.operators:
            await call_and_wait(chained, chained.operator.finish)
            life = chained.operator.function_life
            if life is not None and life.finishes:
                output = chained.output
                await call_and_wait(chained, life.finish, output.emit, output.time_at_end)
            with_context(chained, chained.output.release_end)

    def close(self) -> None:
        """Close all operators, tail to head; never raises."""
        for chained in reversed(self.operators):
            try:
                chained.operator.close()
            except Exception as error:
                context = getattr(chained.operator, "context", None)
                if context is not None:
                    context.logger.warning("close failed: %s", error)

    def forget(self) -> None:
        """Drop the state of all operators. They have been closed, and nothing calls them any more."""
        for chained in self.operators:
            chained.operator.forget()

    async def close_functions(self) -> None:
        """Call `close` of all function objects that have one, tail to head; never raises."""
        for chained in reversed(self.operators):
            life = chained.operator.function_life
            if life is None:
                continue
            try:
                await life.close()
            except Exception as error:
                chained.operator.context.logger.warning("close failed: %s", error)


def with_context(chained: ChainedOperator, call: Any, *arguments: Any) -> Any:
    """Call into an operator; an error that is not ours is wrapped in one that names the operator."""
    try:
        return call(*arguments)
    except (HeadgateError, KeyboardInterrupt, SystemExit):
        raise
    except (
        BaseException
    ) as error:  # code that is called, not awaited, is never cancelled from outside
        raise wrap_error(chained.name, error) from error


async def call_and_wait(
    chained: ChainedOperator, call: Callable[..., Awaitable[None] | None], *arguments: Any
) -> None:
    """Call into an operator like `with_context`, and await the result to the end."""
    waiting = with_context(chained, call, *arguments)
    if waiting is None:
        return
    try:
        await to_the_end(waiting)
    except (HeadgateError, *LEAVING):
        raise
    except BaseException as error:
        raise wrap_error(chained.name, error) from error


async def commit_and_wait(
    chained: ChainedOperator,
    call: Callable[..., Awaitable[None] | None],
    argument: Any,
    permit: CommitPermit,
    retries: int,
) -> None:
    """Call into an operator that may commit, like `call_and_wait`, and again while its target is away.

    Cancelling ends a pause at once.

    Args:
        chained: the operator.
        call: its `restore` or `on_checkpoint_complete`. The latter is called again in both cases, because
            a restored operator has its state, and only the commit is left.
        argument: of the first call.
        permit: for the checkpoint that is committed.
        retries: how often the call is repeated.
    """
    for tries in range(retries + 1):
        try:
            await call_and_wait(chained, call, argument)
            return
        except TargetAwayError as error:
            if tries == retries:
                raise
            pause_s = RETRY_PAUSES_S[min(tries, len(RETRY_PAUSES_S) - 1)]
            chained.operator.context.logger.warning(
                "sink `%s` cannot commit checkpoint %s: %s; trying again in %g s",
                chained.name,
                permit.checkpoint_id,
                error.message,
                pause_s,
            )
        await asyncio.sleep(pause_s)
        call, argument = chained.operator.on_checkpoint_complete, permit


def wrap_error(name: str, error: BaseException) -> HeadgateError:
    """Wrap an unexpected exception in operator `name` in a HeadgateError, with its traceback text."""
    return as_headgate_error(error, f"operator `{name}` failed", name)


class SourceHead(Operator):
    """The placeholder at the head of a source's chain: the subtask polls the reader and emits
    through it."""

    def process(self, batch: Batch, input_index: int) -> None:
        self.output.emit(batch)


def build_chain(
    env: TaskEnvironment,
    outputs: Mapping[int, Sequence[NodePartition[ChainPartition]]],
) -> OperatorChain:
    """Instantiate and wire the operators of `env.vertex`, not yet opened.

    Args:
        env: the place of the subtask.
        outputs: by node id, the result partitions that leave the vertex there.
    """
    chained: dict[int, ChainedOperator] = {}
    for node in env.vertex.nodes:
        samples = Samples(node.name, values=env.settings.lost_values)
        output = ChainOutput(node.name, drops=Drops(samples if env.settings.lost_samples else None))
        operator = _instantiate(node)
        output.optional_sides = operator.optional_sides
        operator.output = output
        output.holds_end = operator.emits_at_end
        chained[node.id] = ChainedOperator(node.id, node.name, operator, output)
        for leaving in outputs.get(node.id, ()):
            if leaving.side is None:
                output.partitions.append(leaving.partition)
            else:
                output.side_partitions.setdefault(leaving.side, []).append(leaving.partition)
    for link in env.vertex.links:
        target = (chained[link.target], link.input_index)
        output = chained[link.source].output
        if link.side is None:
            output.next.append(target)
        else:
            output.side_next.setdefault(link.side, []).append(target)
    everything = [leaving.partition for found in outputs.values() for leaving in found]
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
        run_id=env.run,
        local_directory=lambda: env.directory.of_operator(name),
        held_s=held_s,
        splits=env.splits,
        drops=chained.output.drops,
        sides_read=frozenset([*chained.output.side_next, *chained.output.side_partitions]),
        window_ends_ms=next(
            node.window_ends_ms for node in env.vertex.nodes if node.id == chained.node_id
        ),
    )
