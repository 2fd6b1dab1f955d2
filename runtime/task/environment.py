"""The environment of a subtask: its place in the plan, its gate and partitions, and its reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from ...errors import HeadgateError
from ...operators.base import Metrics
from ...operators.clock import Clock
from ...operators.splits import SourceSplits
from ...state.snapshot import OperatorSnapshot
from ..options.execution import TASK_SLICE
from ..options.monitoring import LATENCY_INTERVAL
from ..options.network import (
    BUFFER_SIZE,
    BUFFER_SIZE_MIN,
    DEBLOAT,
    DEBLOAT_PERIOD,
    DEBLOAT_SAMPLES,
    DEBLOAT_TARGET,
    DEBLOAT_THRESHOLD,
    REST_LOST_RECORDS,
    REST_LOST_VALUES,
)
from ..options.registry import Options
from ..options.state import (
    CHECKPOINT_INLINE,
    CHECKPOINT_MODE,
    COMMITTER_RETRIES,
    DELTA_CHAIN_MAX,
)
from ..plan import PhysicalPlan, Vertex
from ..protocol.debloating import DebloatSettings
from ..storage.base import CheckpointStore
from .accounting import LoopLoad
from .local_files import LocalCopies, SubtaskDirectory
from .segments import SegmentWriter


class SubtaskReports(Protocol):
    """Events a subtask reports; the worker passes them to the coordinator."""

    def acked(
        self, checkpoint_id: int, snapshots: Sequence[OperatorSnapshot], timing: SnapshotTiming
    ) -> None:
        """Report that this subtask's part of the checkpoint is durable."""
        ...

    def declined(self, checkpoint_id: int, reason: str, text: str) -> None:
        """Report that this subtask could not take part in the checkpoint."""
        ...

    def finished(self) -> None:
        """Report that all inputs ended and everything was flushed."""
        ...

    def loop_round(self, loop: str, number: int, records: int) -> None:
        """Report that probe `number` is back at this head of a loop, after `records` that came back."""
        ...

    def terminated(self) -> None:
        """Report that the subtask closed normally."""
        ...

    def failed(self, error: HeadgateError) -> None:
        """Report that the attempt failed."""
        ...


class SnapshotTiming(msgspec.Struct, frozen=True):
    """Times, in ms, and sizes of one subtask's snapshot."""

    sync_ms: float
    async_ms: float
    """From the cut until all is in the store, without the wait for barriers that overtook records.
    """
    alignment_ms: float
    """The time from the first barrier to the last."""
    start_delay_ms: float
    """The time from the trigger to the first barrier."""
    finished: bool
    unaligned: bool = False
    written_bytes: int = 0
    """The bytes that are new in the store; the snapshot may also share files with older ones."""
    in_flight_bytes: int = 0
    """The bytes among them that are records which barriers overtook."""
    processed_bytes: int = 0
    """The bytes of records processed during the alignment."""
    wrote: tuple[str, ...] = ()
    """The sinks that have taken records before the barrier, in this attempt."""


class TaskSettings(msgspec.Struct, frozen=True):
    """The options of subtasks."""

    slice_ms: int = 50
    """The time in ms for which user code runs at most per mailbox step (`headgate.task.slice`)."""
    inline_bytes_max: int = 20 * 1024
    """Smaller state is stored in the manifest (`execution.checkpointing.data-inline-threshold`)."""
    delta_chain_max: int = 20
    """The most files of one table's chain (`headgate.checkpoint.delta-chain-max`)."""
    exactly_once: bool = True
    """True if barriers are aligned, or overtake; False: at least once (`execution.checkpointing.mode`)."""
    latency_interval_ms: int = 0
    """The interval of a source's latency markers; 0: there are none (`metrics.latency.interval`).
    """
    commit_retries: int = 10
    """The number of times that a commit is repeated while its target is away (`sink.committer.retries`)."""
    lost_samples: bool = False
    """True if samples of dropped records are taken (`headgate.rest.lost-records`)."""
    lost_values: bool = False
    """True if they have the values of the records (`headgate.rest.lost-values`)."""
    debloat: DebloatSettings | None = None
    """Debloating (`taskmanager.network.memory.buffer-debloat.*`); None: off."""


class TaskEnvironment(msgspec.Struct):
    """The environment of one subtask."""

    plan: PhysicalPlan
    vertex: Vertex
    index: int
    generation: int
    attempt: int
    restored_checkpoint: int
    options: dict[str, str]
    settings: TaskSettings
    clock: Clock
    store: CheckpointStore | None
    store_at: Callable[[str], AbstractAsyncContextManager[CheckpointStore]]
    """Opens the store at an address, such as a savepoint's."""
    io_threads: Executor
    transfers: asyncio.Semaphore
    """Limits the state files that all subtasks of the worker read or write at once."""
    directory: SubtaskDirectory
    reports: SubtaskReports
    metrics_of: MetricsFactory
    splits: SourceSplits = msgspec.field(default_factory=SourceSplits)
    overtaking: bool = False
    """True if barriers may overtake records at the inputs of this vertex."""
    copies: LocalCopies | None = None
    """The copies of state files on this machine."""
    segments: SegmentWriter | None = None
    """Writes small state of all subtasks of the worker together; None: each file by itself."""
    run: str = ""
    """The run of the job; see `OperatorContext.run_id`."""
    load: LoopLoad = msgspec.field(default_factory=LoopLoad)
    """The load of the event loop, which all subtasks in it share."""

    @property
    def task_name(self) -> str:
        """The name of the subtask, `vertex name (i/p)`, as Flink writes it."""
        return f"{self.vertex.name} ({self.index + 1}/{self.vertex.parallelism})"


class MetricsFactory(Protocol):
    """Gives each operator subtask its metrics scope."""

    def __call__(self, task: str, operator: str, subtask: int) -> Metrics: ...


def task_settings(options: Options) -> TaskSettings:
    """The mailbox's time slice, how state is written, and how much is under way."""
    return TaskSettings(
        slice_ms=options.get(TASK_SLICE),
        inline_bytes_max=options.get(CHECKPOINT_INLINE),
        delta_chain_max=options.get(DELTA_CHAIN_MAX),
        exactly_once=options.get(CHECKPOINT_MODE) == "EXACTLY_ONCE",
        latency_interval_ms=options.get(LATENCY_INTERVAL),
        commit_retries=options.get(COMMITTER_RETRIES),
        lost_samples=options.get(REST_LOST_RECORDS) > 0,
        lost_values=options.get(REST_LOST_VALUES),
        debloat=_debloat_settings(options) if options.get(DEBLOAT) else None,
    )


def _debloat_settings(options: Options) -> DebloatSettings:
    return DebloatSettings(
        size_max=options.get(BUFFER_SIZE),
        size_min=options.get(BUFFER_SIZE_MIN),
        target_ms=options.get(DEBLOAT_TARGET),
        period_ms=options.get(DEBLOAT_PERIOD),
        samples=options.get(DEBLOAT_SAMPLES),
        threshold_percentages=options.get(DEBLOAT_THRESHOLD),
    )
