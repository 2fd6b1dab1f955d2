"""Counts of a process for its metrics only: of checkpoints, failures and requests to the storage.

The event loop counts, and the thread that serves the metrics reads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, Literal, TypeAlias, final, get_args

import msgspec

from ...errors import MissingFileError
from .catalogue import DURATIONS, LATENCIES
from .metrics import PlainHistogram, Scope

CHECKPOINT_PARTS: Final = ("start_delay", "alignment", "sync", "async")
RESTART_PHASES: Final = (
    "silence",
    "cancel",
    "delay",
    "deploy",
    "workers",
    "download",
    "initialize",
)
Operation: TypeAlias = Literal["read", "write", "create", "list", "delete"]
Outcome: TypeAlias = Literal["ok", "throttled", "failed"]
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)


def _durations() -> PlainHistogram:
    return PlainHistogram(DURATIONS)


@final
class CheckpointFigures(msgspec.Struct):
    """The figures of all checkpoints under this coordinator. Times are in seconds."""

    duration: PlainHistogram = msgspec.field(default_factory=_durations)
    parts: dict[str, PlainHistogram] = msgspec.field(
        default_factory=lambda: {part: _durations() for part in CHECKPOINT_PARTS}
    )
    state_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    """State of each operator in the last completed checkpoint."""


@final
class JobFigures(msgspec.Struct):
    """The figures of all failures, restarts and rescalings under this coordinator. Times are in seconds."""

    failures: Counter[str] = msgspec.field(default_factory=Counter)
    """The number of failures by category."""
    restart: PlainHistogram = msgspec.field(default_factory=_durations)
    phases: dict[str, PlainHistogram] = msgspec.field(
        default_factory=lambda: {phase: _durations() for phase in RESTART_PHASES}
    )
    restore: PlainHistogram = msgspec.field(default_factory=_durations)
    local_bytes: int = 0
    storage_bytes: int = 0
    rescale: PlainHistogram = msgspec.field(default_factory=_durations)

    def failures_of(self, category: str) -> int:
        """The number of failures of this category."""
        return self.failures[category]

    def restarted(self, down_ms: int, phases_ms: Mapping[str, int | None]) -> None:
        """All subtasks run again."""
        self.restart.observe(down_ms / 1000)
        for phase, spent_ms in phases_ms.items():
            if spent_ms is not None:
                self.phases[phase].observe(spent_ms / 1000)

    def restored(self, spent_ms: int, local_bytes: int, storage_bytes: int) -> None:
        """All state of a deployment has been read and taken over."""
        self.restore.observe(spent_ms / 1000)
        self.local_bytes += local_bytes
        self.storage_bytes += storage_bytes


def _never(_: BaseException) -> bool:
    return False


@final
class StorageFigures:
    """Requests, bytes and retries of all stores of a process. Its event loop counts them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[Operation, Outcome]] = Counter()
        self.retries: Counter[Operation] = Counter()
        self.seconds = {operation: PlainHistogram(LATENCIES) for operation in OPERATIONS}
        self.read_bytes = 0
        self.written_bytes = 0

    @contextmanager
    def request(
        self, operation: Operation, is_throttled: Callable[[BaseException], bool] = _never
    ) -> Iterator[None]:
        """Count the request that is made in this block, and its time. A cancelled one does not count.

        Args:
            operation: the kind of request.
            is_throttled: whether an error says that the store wants fewer requests.
        """
        now = asyncio.get_running_loop().time
        began = now()
        try:
            yield
        except MissingFileError:  # that there is no such file is an answer
            self._ended(operation, "ok", now() - began)
            raise
        except Exception as error:
            outcome: Outcome = "throttled" if is_throttled(error) else "failed"
            self._ended(operation, outcome, now() - began)
            raise
        self._ended(operation, "ok", now() - began)

    def _ended(self, operation: Operation, outcome: Outcome, seconds: float) -> None:
        self.requests[operation, outcome] += 1
        self.seconds[operation].observe(seconds)

    def register(self, scope: Scope) -> None:
        """Show the figures in a scope; all series are there from the start."""
        for operation in OPERATIONS:
            labels = {"operation": operation}
            for outcome in OUTCOMES:
                read = partial(self.requests.__getitem__, (operation, outcome))
                scope.count("storage_requests", read, {**labels, "outcome": outcome})
            scope.count("storage_retries", partial(self.retries.__getitem__, operation), labels)
            scope.distribution("storage_request_seconds", self.seconds[operation], labels)
        scope.count("storage_read_bytes", lambda: self.read_bytes)
        scope.count("storage_written_bytes", lambda: self.written_bytes)
