"""Limits the rows a subtask takes at once, so that its output fits small output buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

from ..exchange.slicing import rows_within

_MEMORY = 0.9
"""The weight of a slice after the next one. Steps that send only now and then need some memory."""


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
