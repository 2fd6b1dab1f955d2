"""The contract between an operator and the subtask that runs it.

An operator is created once per subtask, from a factory that travels with the job. All its methods run
in the subtask's mailbox, never concurrently. Life: `open` -> `restore` (only with a snapshot) ->
`process` / `on_watermark` / timers ... -> `finish` (end of data; may still emit) -> `close`.
A crash at any point means: a new instance, restored from the last completed checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import InternalError
from ..state.evolution import is_pickled
from ..state.keygroups import KeyGroupRange
from ..state.snapshot import CommitPermit, RestoredState, StateInfo, StateSnapshot
from .clock import Clock
from .drops import Drops
from .elements import Batch
from .splits import SourceSplits

if TYPE_CHECKING:
    from .function_life import FunctionLife

ATTEMPTS_PER_GENERATION: Final = 65_536
"""An attempt's number is its coordinator's generation times this, plus its number under it."""


class Output(Protocol):
    """Where an operator sends what it makes: the next operator of the chain, or the exchange."""

    def emit(self, batch: Batch) -> None:
        """Send a batch downstream. Never blocks: backpressure is applied between inputs."""
        ...

    def emit_side(self, tag: str, batch: Batch) -> None:
        """Send a batch to the side output `tag`; without a consumer it is dropped, and counted as such."""
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

    Those that are not the engine's appear as `headgate_user_<name>`. Labels are for values of which there
    are few: `metrics.user-series-max` bounds the series of an operator subtask, and the rest counts in one
    series whose labels are `other`.
    """

    def counter(self, name: str, labels: Mapping[str, str] = ...) -> Counter:
        """The counter `name`, without `_total`; created on first use.

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
        """The histogram `name`; created on first use.

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
        """Run `callback` once after `delay_ms`; returns a function that cancels it."""
        ...


def _no_directory() -> Path:
    raise InternalError("this operator was given no local directory")


def _never_held() -> float:
    return 0.0


@dataclass(slots=True)
class OperatorContext:
    """What an operator may know about where it runs."""

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
    """Id of the checkpoint this attempt was restored from; 0 for a fresh start."""
    local_directory: Callable[[], Path] = _no_directory
    """Makes, on first use, a directory of this operator subtask's own; it is deleted after the attempt."""
    held_s: Callable[[], float] = _never_held
    """Seconds so far in which the subtask could not go on, whatever waited for it: backpressure."""
    splits: SourceSplits = field(default_factory=SourceSplits)
    """What the subtask's reader tells of its splits; one for all operators of the chain."""
    drops: Drops = field(default_factory=Drops)
    """Counts what this operator subtask lets go."""
    sides_read: frozenset[str] = frozenset()
    """The side outputs of the operator that something reads."""

    @property
    def file_token(self) -> str:
        """Begins the ids of files that this attempt of this subtask makes (`LocalFile.id`).

        Attempts are counted anew in another storage. There a run begins with a savepoint, whose number
        no earlier run can have begun with: numbers of checkpoints go on from it.
        """
        return f"{self.attempt}-{self.restored_checkpoint}-{self.subtask_index}"

    @property
    def attempt_number(self) -> int:
        """1 for the first attempt under one coordinator, 2 after its first failure, and so on."""
        return self.attempt % ATTEMPTS_PER_GENERATION


class Operator:
    """One subtask's instance of an operator. Subclasses override what they need."""

    output: Output
    context: OperatorContext
    function_life: FunctionLife | None = None
    """Of a user's function object with `open` or `close`: called behind the operator's own `open`, and
    behind its `close`."""
    optional_sides: frozenset[str] = frozenset()
    """Side outputs that are no loss if nothing reads them."""
    emits_at_end: bool = False
    """True if results of the user's `finish` come at the end of the input: the end of event time waits for
    them, so that they are not late further on."""
    stores_what_waits: bool = False
    """While it is true, records in front of a barrier come also while the operator is full, to be kept as
    state: so a checkpoint need not wait until there is room."""

    def open(self, context: OperatorContext) -> Awaitable[None] | None:
        """Called first, before any state or record. Raising fails the attempt.

        What it returns is awaited before anything else runs in this subtask.
        """
        self.context = context
        return None

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Take over the state of the last completed checkpoint: the rows of own key groups only.

        Called after `open`, only if the job was restored (the state may still be empty). What it
        returns is awaited before anything else runs in this subtask: blocking work goes into
        `context.run_in_thread`.
        """
        return None

    def process(self, batch: Batch, input_index: int) -> None:
        """Handle one batch of input number `input_index` (0 for operators with one input)."""
        raise NotImplementedError

    def full(self) -> bool:
        """True while it takes no more records. Asked of the head of a chain only.

        The subtask then reads barriers and other control elements, and records again once a callback of
        `context.timers` has changed that. See `stores_what_waits`.
        """
        return False

    def settled(self) -> bool:
        """False while callbacks of `context.timers` will still emit results of records that came.

        At the end of data `finish` waits for it, barriers do not.
        """
        return True

    def on_watermark(self, timestamp: int) -> None:
        """Event time of all inputs reached `timestamp` (ms). The default passes it on."""
        self.output.emit_watermark(timestamp)

    def on_idle(self, idle: bool) -> None:
        """All inputs went idle, or one is active again. The default passes it on."""
        self.output.emit_idle(idle)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        """Called before the barrier goes out; may emit: that still belongs to `checkpoint_id`."""

    def snapshot(self, checkpoint_id: int) -> StateSnapshot | None:
        """The synchronous part: a cheap consistent cut. Slow work goes into its table makers."""
        return None

    def states(self) -> Sequence[StateInfo]:
        """What states this operator has. Also asked before `open`, to check a savepoint against a job."""
        return ()

    def pickled_states(self) -> Sequence[str]:
        """The names of the states whose content is pickled. Also asked before `open`."""
        return [info.name for info in self.states() if is_pickled(info)]

    def on_checkpoint_complete(self, permit: CommitPermit) -> Awaitable[None] | None:
        """Checkpoint `permit.checkpoint_id` is durable. Notices can be lost or merged.

        What it returns is awaited before anything else runs in this subtask.
        """
        return None

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Checkpoint `checkpoint_id` will never complete; its data belongs to the next one."""

    def finish(self) -> Awaitable[None] | None:
        """All inputs ended; flush, may emit. Not called again after restoring a finished subtask.

        What it returns is awaited before anything else runs in this subtask, the `finish` of the
        operators behind it included.
        """
        return None

    def close(self) -> None:
        """Release resources. Also called after failures, then without `finish`. Must not raise."""


class AsyncOperator(Operator):
    """An operator with coroutine user code. It is always the head of a chain.

    The subtask awaits `process_async` before it handles anything else, so the order of records, and
    the barrier behind them, are kept. `process` of such an operator is never called.
    """

    async def process_async(self, batch: Batch, input_index: int) -> None:
        """Like `process`; may await. Cancellation leaves the batch unprocessed: the attempt is over."""
        raise NotImplementedError


OperatorFactory = Callable[[], Operator]
"""Makes one operator instance per subtask; must be picklable by cloudpickle."""
