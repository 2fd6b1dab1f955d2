"""The reports of a worker to the coordinator: of its subtasks, their acknowledgements, and a restore.

`SubtaskReporter` turns what a subtask reports into messages, `GatheredAcks` gathers acknowledgements so
that a checkpoint takes one message, and `RestoreMeter` measures how a restore gets on.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, final

import msgspec

from ...errors import HeadgateError, InternalError
from ...operators.clock import Clock
from ...state.snapshot import OperatorSnapshot, StateHandle
from ..control.messages import (
    CheckpointAcked,
    CheckpointDeclined,
    LoopRoundBack,
    Messages,
    SubtaskAck,
    SubtaskAssignment,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskTerminated,
    WatermarkReached,
)
from ..protocol.failures import FailureKind, as_headgate_error
from ..task.environment import SnapshotTiming
from ..task.local_files import LocalCopies

INLINE_BYTES_MAX: Final = 1 << 20
"""The bytes of state, stored in the acknowledgements themselves, from which on they wait no longer."""
REPORT_S = 0.5
"""Reports on the progress of a restore are at least this far apart, but for the last."""


class MessageSender(Protocol):
    """Takes messages to the coordinator."""

    def send(self, message: Messages) -> None:
        """Send a message; never blocks."""
        ...

    def acked(self, attempt: int, checkpoint_id: int, ack: SubtaskAck) -> None:
        """Send the acknowledgement of a subtask, perhaps together with others; never blocks."""
        ...


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
        ack = SubtaskAck(
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
        self._sender.acked(self._attempt, checkpoint_id, ack)

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


class _Gathered(msgspec.Struct):
    """The acknowledgements of one checkpoint that wait, each with the time at which it came."""

    acks: list[tuple[SubtaskAck, float]] = msgspec.field(default_factory=list)
    inline_bytes: int = 0


@final
class GatheredAcks:
    """Holds acknowledgements back until those of all subtasks here are ready, or for a bounded time.

    A checkpoint needs all subtasks, so it is not delayed by one that waits here for the others of its
    worker. The wait is bounded all the same: what a checkpoint still lacks must be seen while it is under
    way.
    """

    def __init__(
        self, send: Callable[[CheckpointAcked], None], subtasks: Callable[[int], int], clock: Clock
    ) -> None:
        """
        Args:
            send: takes a message to the coordinator.
            subtasks: returns the number of subtasks here of an attempt.
            clock: of the worker.
        """
        self._send = send
        self._subtasks = subtasks
        self._clock = clock
        self._waiting: dict[tuple[int, int], _Gathered] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.delay_ms = 0
        """The longest time that an acknowledgement waits."""

    def add(self, attempt: int, checkpoint_id: int, ack: SubtaskAck) -> None:
        """Add the acknowledgement of a subtask, and send what need not wait."""
        gathered = self._waiting.setdefault((attempt, checkpoint_id), _Gathered())
        gathered.acks.append((ack, self._clock.monotonic()))
        gathered.inline_bytes += sum(
            len(handle.inline or b"") for snapshot in ack.snapshots for handle in snapshot.handles
        )
        complete = len(gathered.acks) >= self._subtasks(attempt)
        if complete or not self.delay_ms or gathered.inline_bytes >= INLINE_BYTES_MAX:
            self._flush(attempt, checkpoint_id)
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.delay_ms / 1000, self.flush)

    def flush(self) -> None:
        """Send everything: an acknowledgement goes ahead of what happens after it."""
        for attempt, checkpoint_id in list(self._waiting):
            self._flush(attempt, checkpoint_id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self, attempt: int, checkpoint_id: int) -> None:
        now = self._clock.monotonic()
        acks = self._waiting.pop((attempt, checkpoint_id)).acks
        subtasks = tuple(
            msgspec.structs.replace(ack, held_ms=1000 * (now - since)) if now > since else ack
            for ack, since in acks
        )
        self._send(CheckpointAcked(attempt=attempt, checkpoint_id=checkpoint_id, subtasks=subtasks))


class RestoreMeter:
    """Adds up what the subtasks have read and reports it, not too often."""

    def __init__(self, total_bytes: int, clock: Clock, report: Callable[[int, int], None]) -> None:
        self._total, self._done = total_bytes, 0
        self._clock = clock
        self._report = report
        self._next = self._began = clock.monotonic()
        self.fetching_ms = 0
        """The time until the last subtask had read its state."""
        self.more_in_files = 0
        """The bytes to be read from files, beyond those that were expected at first."""
        self.opening_ms = 0
        """The time in which the slowest subtask took its state over."""

    def expect(self, counted: Sequence[StateHandle], needed: Sequence[StateHandle]) -> None:
        """Count the in-flight records that are `needed` in place of the handles counted before."""
        self._total += sum(h.size_bytes for h in needed) - sum(h.size_bytes for h in counted)
        self.more_in_files += bytes_in_files(needed) - bytes_in_files(counted)

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


def bytes_in_files(handles: Iterable[StateHandle]) -> int:
    """Return the bytes of those handles that are in files."""
    return sum(handle.size_bytes for handle in handles if handle.file is not None)
