"""Reports of subtasks to the coordinator as messages: acknowledgements, failures, progress of a restore."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Protocol

from ...errors import HeadgateError, InternalError
from ...operators.clock import Clock
from ...state.snapshot import OperatorSnapshot
from ..control.messages import (
    CheckpointAcked,
    CheckpointDeclined,
    LoopRoundBack,
    Messages,
    SubtaskAssignment,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskTerminated,
    WatermarkReached,
)
from ..protocol.failures import FailureKind, as_headgate_error
from ..task.environment import SnapshotTiming
from ..task.local_files import LocalCopies

REPORT_S = 0.5
"""Reports are at least this far apart, but for the last."""


def failure_of(
    attempt: int,
    task_name: str,
    error: Exception,
    vertex: int = -1,
    index: int = -1,
    region: int = -1,
) -> SubtaskFailed:
    """A failure as a message; an error that does not pickle travels as its text."""
    error = as_headgate_error(error, f"{task_name} failed", task_name)
    kind = FailureKind.of(error)
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = pickle.dumps(InternalError(str(error)))
    return SubtaskFailed(
        attempt=attempt,
        vertex=vertex,
        index=index,
        task_name=task_name,
        error=pickled,
        text=str(error),
        detail=error.detail,
        kind=kind.value,
        region=region,
    )


class MessageSender(Protocol):
    """Takes messages to the coordinator."""

    def send(self, message: Messages) -> None:
        """Send a message; never blocks."""
        ...


class RestoreMeter:
    """Adds up what the subtasks have read and reports it, not too often."""

    def __init__(self, total_bytes: int, clock: Clock, report: Callable[[int, int], None]) -> None:
        self._total, self._done = total_bytes, 0
        self._clock = clock
        self._report = report
        self._next = self._began = clock.monotonic()
        self.fetching_ms = 0
        """The time until the last subtask had read its state."""
        self.opening_ms = 0
        """The time in which the slowest subtask took its state over."""

    def fetched(self) -> float:
        """A subtask has read its state; returns the time, for `opened`."""
        now = self._clock.monotonic()
        self.fetching_ms = max(self.fetching_ms, round(1000 * (now - self._began)))
        return now

    def opened(self, since: float) -> None:
        """It has taken it over, which began at `since`."""
        took_ms = round(1000 * (self._clock.monotonic() - since))
        self.opening_ms = max(self.opening_ms, took_ms)

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        self._done += count
        now = self._clock.monotonic()
        if now >= self._next or self._done >= self._total:
            self._next = now + REPORT_S
            self._report(self._done, self._total)


class SubtaskReporter:
    """Turns the reports of one subtask into messages to the coordinator."""

    def __init__(
        self,
        attempt: int,
        assignment: SubtaskAssignment,
        task_name: str,
        sender: MessageSender,
        copies: LocalCopies | None,
    ) -> None:
        self._attempt = attempt
        self._vertex = assignment.vertex
        self._index = assignment.index
        self._task_name = task_name
        self._sender = sender
        self._copies = copies

    def acked(
        self, checkpoint_id: int, snapshots: Sequence[OperatorSnapshot], timing: SnapshotTiming
    ) -> None:
        if self._copies is not None:
            self._copies.acked(checkpoint_id, snapshots)
        self._sender.send(
            CheckpointAcked(
                attempt=self._attempt,
                checkpoint_id=checkpoint_id,
                vertex=self._vertex,
                index=self._index,
                snapshots=tuple(snapshots),
                finished=timing.finished,
                sync_ms=timing.sync_ms,
                async_ms=timing.async_ms,
                alignment_ms=timing.alignment_ms,
                start_delay_ms=timing.start_delay_ms,
                unaligned=timing.unaligned,
                written_bytes=timing.written_bytes,
                in_flight_bytes=timing.in_flight_bytes,
                processed_bytes=timing.processed_bytes,
                wrote=timing.wrote,
            )
        )

    def declined(self, checkpoint_id: int, reason: str, text: str) -> None:
        self._sender.send(
            CheckpointDeclined(
                attempt=self._attempt,
                checkpoint_id=checkpoint_id,
                vertex=self._vertex,
                index=self._index,
                reason=reason,
                text=text,
            )
        )

    def reached(self, step: str, group: str, watermark: int | None) -> None:
        """Take note of how far an aligned step is."""
        self._sender.send(
            WatermarkReached(
                attempt=self._attempt,
                vertex=self._vertex,
                index=self._index,
                step=step,
                group=group,
                watermark=watermark,
            )
        )

    def finished(self) -> None:
        self._sender.send(
            SubtaskFinished(attempt=self._attempt, vertex=self._vertex, index=self._index)
        )

    def loop_round(self, loop: str, number: int, records: int) -> None:
        self._sender.send(
            LoopRoundBack(
                attempt=self._attempt,
                loop=loop,
                index=self._index,
                number=number,
                records=records,
            )
        )

    def terminated(self) -> None:
        self._sender.send(
            SubtaskTerminated(attempt=self._attempt, vertex=self._vertex, index=self._index)
        )

    def failed(self, error: HeadgateError) -> None:
        self._sender.send(
            failure_of(self._attempt, self._task_name, error, self._vertex, self._index)
        )
