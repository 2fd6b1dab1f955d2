"""The environment of a subtask: its place in the plan, its gate and partitions, and its reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from ...errors import HeadgateError
from ...operators.base import Metrics
from ...operators.clock import Clock
from ...operators.splits import SourceSplits
from ...state.snapshot import OperatorSnapshot
from ..plan import PhysicalPlan, Vertex
from ..protocol.debloating import DebloatSettings
from ..storage.base import CheckpointStore
from .local_copies import LocalCopies
from .local_directory import SubtaskDirectory


class SubtaskReports(Protocol):
    """Events a subtask reports; the worker passes them to the coordinator."""

    def acked(
        self, checkpoint_id: int, snapshots: Sequence[OperatorSnapshot], timing: SnapshotTiming
    ) -> None:
        """This subtask's part of the checkpoint is durable."""
        ...

    def declined(self, checkpoint_id: int, reason: str, text: str) -> None:
        """This subtask could not take part in the checkpoint."""
        ...

    def finished(self) -> None:
        """All inputs ended and everything was flushed."""
        ...

    def loop_round(self, loop: str, number: int, records: int) -> None:
        """Probe `number` is back at this head of a loop, and `records` came back in front of it."""
        ...

    def terminated(self) -> None:
        """Closed in good order."""
        ...

    def failed(self, error: HeadgateError) -> None:
        """The attempt is over."""
        ...


@dataclass(frozen=True, slots=True)
class SnapshotTiming:
    """Times, in ms, and sizes of one subtask's snapshot."""

    sync_ms: float
    async_ms: float
    """From the cut until all is in the store, without the wait for barriers that overtook records."""
    alignment_ms: float
    """From the first barrier to the last."""
    start_delay_ms: float
    """From the trigger to the first barrier."""
    finished: bool
    unaligned: bool = False
    written_bytes: int = 0
    """The size of what is new in the store; the snapshot itself may share files with older ones."""
    in_flight_bytes: int = 0
    """The part of it that is records which barriers overtook."""
    processed_bytes: int = 0
    """Records processed during the alignment."""
    wrote: tuple[str, ...] = ()
    """Names of the sinks that have taken records in front of the barrier, in this attempt."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Options of the task room."""

    slice_ms: int = 50
    """User code runs at most about this long per mailbox step (`headgate.task.slice`)."""
    inline_bytes_max: int = 20 * 1024
    """Smaller state travels in the manifest (`execution.checkpointing.data-inline-threshold`)."""
    delta_chain_max: int = 20
    """Files of one table's chain (`headgate.checkpoint.delta-chain-max`)."""
    exactly_once: bool = True
    """Barriers are aligned, or overtake; False: nothing waits (`execution.checkpointing.mode`)."""
    latency_interval_ms: int = 0
    """Between latency markers of a source; 0: there are none (`metrics.latency.interval`)."""
    debloat: DebloatSettings | None = None
    """How buffer sizes follow throughput (`taskmanager.network.memory.buffer-debloat.*`); None: not."""


@dataclass(slots=True)
class TaskEnvironment:
    """Everything around one subtask."""

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
    """The open store at an address, such as a savepoint's."""
    io_threads: Executor
    transfers: asyncio.Semaphore
    """Bounds the state files that all subtasks of the worker read or write at once."""
    directory: SubtaskDirectory
    reports: SubtaskReports
    metrics_of: MetricsFactory
    splits: SourceSplits = field(default_factory=SourceSplits)
    overtaking: bool = False
    """Barriers may overtake records on their way into this vertex."""
    copies: LocalCopies | None = None
    """Of state files, on this machine."""

    @property
    def task_name(self) -> str:
        """`vertex name (i/p)`, as Flink writes it."""
        return f"{self.vertex.name} ({self.index + 1}/{self.vertex.parallelism})"


class MetricsFactory(Protocol):
    """Gives each operator subtask its metrics scope."""

    def __call__(self, task: str, operator: str, subtask: int) -> Metrics: ...
