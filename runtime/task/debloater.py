"""Limits the data in flight before a slow subtask.

It sets the size of the input buffers, and limits the rows taken at once where the subtask's own
output buffers have become small (`OutputRoom`). `protocol/debloating.py` decides on sizes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, final

from ...operators.elements import Batch
from ..exchange.gate import InputGate
from ..exchange.slicing import BatchSizer, rows_within
from ..protocol.debloating import BufferDebloater, DebloatSettings
from .accounting import Activity, TimeAccounting

_MEMORY = 0.9
"""The weight of a slice after the next one. Steps that send only now and then need some memory."""


@final
class Debloater:
    """The debloater of one subtask.

    Its timer runs in the event loop, so also while the subtask sleeps.
    """

    def __init__(
        self,
        settings: DebloatSettings,
        time: TimeAccounting,
        partitions: Sequence[DebloatedPartition],
    ) -> None:
        self._settings = settings
        self._time = time
        self._room = OutputRoom(partitions)
        self._gate: InputGate | None = None
        self._sizers: dict[int, BatchSizer] = {}
        self._total_s = self._idle_s = 0.0
        self._in_slice = False
        self._period_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self.sizes = BufferDebloater(settings)
        """The debloating protocol of the gate's buffers."""

    def watch(self, gate: InputGate) -> None:
        """Control the buffer size of `gate` from now on; a source has none."""
        self._gate = gate
        self._sizers = {gate.input_index_of(at): BatchSizer() for at in range(len(gate))}

    # -- records ------------------------------------------------------------------------------------

    def slice_begins(self) -> None:
        """Note that records are about to be processed."""
        self._in_slice = True
        self._room.slice_begins()

    def slice_over(self, batch: Batch, input_index: int) -> None:
        """Note that `batch` was processed; it counts for the gate if it came through it."""
        self._in_slice = False
        self._room.slice_over(len(batch))
        sizer = self._sizers.get(input_index)
        if sizer is not None:
            self.sizes.consumed(sizer.nbytes(batch))
        if self._period_ended:
            self._end_period()

    def rows_at_once(self) -> int | None:
        """Return how many rows to process before the next check of backpressure; None: any number."""
        return self._room.rows()

    # -- time ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the periods; does nothing without a gate."""
        if self._gate is not None:
            self._total_s, self._idle_s = self._times()
            self._set_timer()

    def stop(self) -> None:
        """Stop the periods."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._settings.period_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._set_timer()
        if self._in_slice:
            # A coroutine is running. Its batch, and its time, count when it is done.
            self._period_ended = True
        else:
            self._end_period()

    def _end_period(self) -> None:
        gate = self._gate
        assert gate is not None  # as `start` has seen
        self._period_ended = False
        total_s, idle_s = self._times()
        elapsed_ms = 1000 * (total_s - self._total_s)
        idle_ms = 1000 * (idle_s - self._idle_s)
        self._total_s, self._idle_s = total_s, idle_s
        size = self.sizes.period_over(elapsed_ms, idle_ms, gate.buffers_in_use)
        if size is not None:
            gate.announce_buffer_size(size)

    def _times(self) -> tuple[float, float]:
        """Return the seconds of the subtask so far: all, and idle."""
        self._time.settle()
        return sum(self._time.seconds), self._time.seconds[Activity.IDLE]


class DebloatedPartition(Protocol):
    """The part of a result partition that is needed here."""

    debloated_bytes: int | None
    emitted_bytes: int


@final
class OutputRoom:
    """Learns how much a row sends into each partition, and so how many rows fill one buffer per channel."""

    def __init__(self, partitions: Sequence[DebloatedPartition]) -> None:
        self._partitions = partitions
        self._rows = 0.0
        self._sent = [0.0 for _ in partitions]
        self._before = [0 for _ in partitions]

    def slice_begins(self) -> None:
        """Begin a slice: output from now on belongs to it; output before belonged to timers and the
        like."""
        self._before = [partition.emitted_bytes for partition in self._partitions]

    def slice_over(self, rows: int) -> None:
        """End a slice of `rows` rows."""
        self._rows = _MEMORY * self._rows + rows
        for index, partition in enumerate(self._partitions):
            sent = partition.emitted_bytes - self._before[index]
            self._sent[index] = _MEMORY * self._sent[index] + sent

    def rows(self) -> int | None:
        """Return the rows that fill one buffer per channel of the partition with least room.

        None while no receiver wants small buffers, or nothing is known about a row's output.
        """
        fitting: int | None = None
        for partition, sent in zip(self._partitions, self._sent, strict=True):
            room = partition.debloated_bytes
            if room is not None and sent >= 1:
                rows = rows_within(room, sent / self._rows)
                fitting = rows if fitting is None else min(fitting, rows)
        return fitting
