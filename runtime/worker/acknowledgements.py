"""The acknowledgements of a worker's subtasks, gathered so that a checkpoint takes one message.

A checkpoint needs all subtasks, so it is not delayed by one that waits here for the others of its worker.
The wait is bounded all the same: what a checkpoint still lacks must be seen while it is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

import msgspec

from ...operators.clock import Clock
from ..control.messages import CheckpointAcked, SubtaskAck

INLINE_BYTES_MAX: Final = 1 << 20
"""The bytes of state, stored in the acknowledgements themselves, from which on they wait no longer."""


@dataclass(slots=True)
class _Gathered:
    """The acknowledgements of one checkpoint that wait, each with the time at which it came."""

    acks: list[tuple[SubtaskAck, float]] = field(default_factory=list)
    inline_bytes: int = 0


@final
class GatheredAcks:
    """Holds acknowledgements back until those of all subtasks here are ready, or for a bounded time."""

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
