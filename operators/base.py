"""The contract between an operator and the subtask that runs it.

An operator is created once per subtask, from a factory that travels with the job.
All its methods run in the subtask's mailbox, never concurrently. Life cycle: `open` -> `restore`
(only with a snapshot) -> `process` / `on_watermark` / timers ... -> `finish` (end of data; may
still emit) -> `close`. After a crash at any point a new instance is restored from the last
completed checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from ..errors import InternalError
from ..state.evolution import is_pickled
from ..state.keygroups import KeyGroupRange
from ..state.queryable import KeyScan
from ..state.snapshot import CommitPermit, KeptState, RestoredState, StateInfo, StateSnapshot
from .clock import Clock
from .drops import Drops
from .elements import Batch
from .splits import SourceSplits

ATTEMPTS_PER_GENERATION: Final = 65_536
"""The number of an attempt is its coordinator's generation times this, plus its number under it."""


class Output(Protocol):
    """The destination of an operator's results: the next operator of the chain, or the exchange."""

    def emit(self, batch: Batch) -> None:
        """Send a batch downstream. Never blocks: backpressure is applied between inputs."""
        ...

    def emit_side(self, tag: str, batch: Batch) -> None:
        """Send a batch to the side output `tag`; without a consumer it is dropped and counted."""
        ...

    def emit_watermark(self, timestamp: int) -> None:
        """Send a watermark (ms). The caller keeps it monotone."""
        ...

    def emit_idle(self, idle: bool) -> None:
        """Announce that this stream went idle, or is active again."""
        ...


class Counter(Protocol):
    """A metric that only grows."""

    def inc(self, amount: float = 1) -> None: ...


class Histogram(Protocol):
    """A metric that counts values by their size."""

    def observe(self, value: float) -> None: ...


class Metrics(Protocol):
    """Metrics in the scope of one operator subtask.

    Metrics of users appear as `headgate_user_<name>`. Labels should have few values:
    `metrics.user-series-max` bounds the series of an operator subtask, and all others count in one
    series with the labels `other`.
    """

    def counter(self, name: str, labels: Mapping[str, str] = ...) -> Counter:
        """Return the counter `name`, without `_total`; it is created on first use.

        Raises:
            UsageError: a label is not a valid name, or is one that the engine sets.
        """
        ...

    def gauge(
        self, name: str, read: Callable[[], float | None], labels: Mapping[str, str] = ...
    ) -> None:
        """Register a gauge, which is read when metrics are scraped, in another thread.

        Args:
            name: with its unit at the end, such as `cache_bytes`.
            read: its value now; None or NaN if there is none.
            labels: of this series.

        Raises:
            UsageError: a label is not a valid name, or is one that the engine sets.
        """
        ...

    def histogram(
        self,
        name: str,
        buckets: Sequence[float] | None = None,
        labels: Mapping[str, str] = ...,
    ) -> Histogram:
        """Return the histogram `name`; it is created on first use.

        Args:
            name: with its unit at the end, such as `lookup_seconds`.
            buckets: ascending upper bounds; None: from 1 ms to 30 s.
            labels: of this series.

        Raises:
            UsageError: the bounds do not ascend, or a label cannot be used.
        """
        ...


class TimerService(Protocol):
    """Processing-time callbacks, run in the mailbox of the subtask."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` once after `delay_ms`; return a function that cancels it."""
        ...


def _no_directory() -> Path:
    raise InternalError("this operator was given no local directory")


def _never_held() -> float:
    return 0.0


@dataclass(slots=True)
class OperatorContext:
    """The environment of an operator."""

    job_name: str
    operator_name: str
    subtask_index: int
    parallelism: int
    max_parallelism: int
    attempt: int
    key_groups: KeyGroupRange
    clock: Clock
    timers: TimerService
    metrics: Metrics
    logger: logging.Logger | logging.LoggerAdapter[Any]
    run_in_thread: Callable[[Callable[[], Any]], asyncio.Future[Any]]
    """Run a blocking function in the worker's I/O threads."""
    options: dict[str, str] = field(default_factory=dict)
    restored_checkpoint: int = 0
    """The id of the checkpoint this attempt was restored from; 0 for a fresh start."""
    run_id: str = ""
    """Names the run of the job, for names in other systems: a restart and another coordinator keep it, and
    no other run has it, also not one that resumes from a checkpoint of this one.
    """
    local_directory: Callable[[], Path] = _no_directory
    """Creates, on first use, a private directory of this operator subtask, deleted after the attempt."""
    held_s: Callable[[], float] = _never_held
    """The seconds so far in which the subtask was blocked for any reason: backpressure."""
    splits: SourceSplits = field(default_factory=SourceSplits)
    """The splits that the subtask's reader reports; shared by all operators of the chain."""
    drops: Drops = field(default_factory=Drops)
    """Counts what this operator subtask drops."""
    sides_read: frozenset[str] = frozenset()
    """The side outputs of the operator that have a consumer."""
    window_ends_ms: int = 0
    """See `Node.window_ends_ms`."""

    @property
    def file_token(self) -> str:
        """Return the prefix of the ids of files that this attempt of this subtask makes (`LocalFile.id`).

        Attempts are counted from 1 again in another storage. There a run begins with a savepoint
        whose number no earlier run can have begun with, since the numbers of checkpoints continue
        from it.
        """
        return f"{self.attempt}-{self.restored_checkpoint}-{self.subtask_index}"

    @property
    def attempt_number(self) -> int:
        """Return 1 for the first attempt under one coordinator, 2 after its first failure, and so on."""
        return self.attempt % ATTEMPTS_PER_GENERATION


class FunctionLife(Protocol):
    """The life cycle of a user's function object, whose methods the subtask calls beside the operator's.

    `functions/life.py` implements it.
    """

    @property
    def finishes(self) -> bool:
        """True if the function has a `finish`."""
        ...

    async def open(self, context: OperatorContext) -> None:
        """Call its `open(ctx)`."""
        ...

    async def close(self) -> None:
        """Call its `close()`, once and only if it was opened."""
        ...

    async def finish(self, emit: Callable[[Batch], None], time: int) -> None:
        """Call its `finish()` and emit the results, with the event time `time` (ms)."""
        ...

    async def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Tell the function that a checkpoint is durable."""
        ...

    async def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Tell the function that a checkpoint will never complete."""
        ...


class Operator:
    """One subtask's instance of an operator. Subclasses override what they need."""

    output: Output
    context: OperatorContext
    function_life: FunctionLife | None = None
    """The life cycle of a user's function object with `open` or `close`.

    Its methods are called after the operator's own `open`, and after its `close`.
    """
    optional_sides: frozenset[str] = frozenset()
    """Side outputs whose records are no loss without a consumer."""
    emits_at_end: bool = False
    """True if the user's `finish` emits results at the end of the input.

    The end of event time waits for them, so that they are not late downstream.
    """
    stores_what_waits: bool = False
    """While true, records before a barrier arrive even if the operator is full, and are kept as state.

    So a checkpoint does not have to wait until there is room.
    """

    makes_calls: bool = False
    """True if records wait in it for calls of coroutine functions: while it is full, it waits for these."""

    def open(self, context: OperatorContext) -> Awaitable[None] | None:
        """Open the operator; called first, before any state or record. Raising fails the attempt.

        The result is awaited before anything else runs in this subtask.
        """
        self.context = context
        return None

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the state of the last completed checkpoint: the rows of own key groups only.

        Called after `open`, only if the job was restored (the state may still be empty). The result
        is awaited before anything else runs in this subtask: blocking work belongs in
        `context.run_in_thread`.
        """
        return None

    def process(self, batch: Batch, input_index: int) -> None:
        """Handle one batch of input number `input_index` (0 for operators with one input)."""
        raise NotImplementedError

    def full(self) -> bool:
        """Return True while it takes no more records. Only the head of a chain is asked.

        The subtask then reads barriers and other control elements only, until a callback of
        `context.timers` makes this False. See `stores_what_waits`.
        """
        return False

    @property
    def pending_timers(self) -> int | None:
        """Return the number of the user's timers that wait; None if none can be set. Any thread may ask."""
        return None

    def settled(self) -> bool:
        """Return False while callbacks of `context.timers` will still emit results of earlier records.

        At the end of data `finish` waits for it; barriers do not.
        """
        return True

    def on_watermark(self, timestamp: int) -> None:
        """Handle the event time `timestamp` (ms), which all inputs have reached.

        The default forwards it.
        """
        self.output.emit_watermark(timestamp)

    def on_idle(self, idle: bool) -> None:
        """Handle that all inputs went idle, or one is active again. The default forwards it."""
        self.output.emit_idle(idle)

    def query(self, state: str, key: Any, checkpoint_id: int = 0) -> Any:
        """Return the value of a queryable state for a key, or `ABSENT`.

        `state` is the name in the step (`QueryableState.state`). Lists and maps are `QueriedEntries`.
        Nothing changes: values neither live longer nor expire because a client reads them.

        Args:
            state: its name.
            key: the key.
            checkpoint_id: the value is that of this checkpoint; 0: the one that it has now.

        Raises:
            NotKept: the value at that checkpoint is not known here.
        """
        raise InternalError(f"this operator has no queryable state state=`{state}`")

    def query_many(self, state: str, keys: Sequence[Any], checkpoint_id: int = 0) -> Iterable[Any]:
        """Return the value of each of some keys; see `query`.

        A list has all of them. Of other results, take each value before the next one. Objects may be of
        another type than those of `query`, with the same members.
        """
        return (self.query(state, key, checkpoint_id) for key in keys)

    def scan(self, state: str, checkpoint_id: int = 0) -> KeyScan:
        """Return the keys that a queryable state has, and perhaps others; see `query`.

        With a checkpoint, its values stay known until the scan is closed, as far as memory allows.

        Raises:
            NotKept: the keys at that checkpoint are not known here.
        """
        raise InternalError(f"this operator has no queryable state state=`{state}`")

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        """Prepare for a barrier before it is sent; results still belong to `checkpoint_id`."""

    def snapshot(self, checkpoint_id: int) -> StateSnapshot | None:
        """Return a cheap consistent cut; the synchronous part.

        Slow work belongs in its table makers.
        """
        return None

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of its states. Also called before `open`, to check a savepoint."""
        return ()

    def pickled_states(self) -> Sequence[str]:
        """Return the names of the states whose content is pickled. Also called before `open`."""
        return [info.name for info in self.states() if is_pickled(info)]

    def on_checkpoint_complete(self, permit: CommitPermit) -> Awaitable[None] | None:
        """Note that checkpoint `permit.checkpoint_id` is durable. Notices can be lost or merged.

        The result is awaited before anything else runs in this subtask.
        """
        return None

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Note that checkpoint `checkpoint_id` was aborted; its data belongs to the next one."""
        self.drop_point(checkpoint_id)

    def drop_point(self, checkpoint_id: int) -> None:
        """Drop what is kept for reads as of a snapshot, and for going back to it: neither will come.

        Called for snapshots of savepoints as soon as they are taken, and for aborted checkpoints.
        """

    def keep(self) -> dict[str, KeptState]:
        """Take the states out that can go back to a checkpoint, for the next attempt on this worker.

        Called once, before `close`, if the subtask is cancelled because of others. The operator must not
        touch these states any more.
        """
        return {}

    def finish(self) -> Awaitable[None] | None:
        """Flush at the end of all inputs; may emit.

        Not called again after restoring a finished subtask.

        The result is awaited before anything else runs in this subtask, including the `finish` of
        the operators after it.
        """
        return None

    def close(self) -> None:
        """Release resources. Also called after failures, then without `finish`. Must not raise."""

    def forget(self) -> None:
        """Drop everything that the operator refers to. Nothing calls it afterwards.

        Callbacks of its timers, for instance, refer to the operator, so its state would stay in memory
        until the garbage collector runs, which may be much later.
        """
        vars(self).clear()


class AsyncOperator(Operator):
    """An operator with coroutine user code. It is always the head of a chain.

    The subtask awaits `process_async` before it handles anything else, so
    the order of records and of the barrier after them is kept. `process` of such an operator is
    never called.
    """

    async def process_async(self, batch: Batch, input_index: int) -> None:
        """Process a batch; may await. Cancellation leaves the batch unprocessed: the attempt is over."""
        raise NotImplementedError


OperatorFactory = Callable[[], Operator]
"""Makes one operator instance per subtask; must be picklable by cloudpickle."""
