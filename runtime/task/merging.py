"""Puts small batches that wait at a gate together, so that an operator is called once for all of them.

Each call has a price that does not depend on its records: tens of microseconds. With many senders each of
them sends a small part of the records. Nothing is waited for, and the records of a channel stay in order.
They pass records and control elements of other channels at most, between which there is no order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, final

from ...errors import check
from ...operators.elements import Batch, ObjectBatch
from ..exchange.gate import InputGate, PolledBatch
from ..exchange.slicing import BatchSizer, Coalescer

BEHIND_THE_END: Final = "records behind the end of data"
"""The error of a sender that goes on after it has said that it would not."""


@final
class BatchMerger:
    """Takes what may be put behind a batch of one gate, up to the size of a full buffer."""

    def __init__(self, gate: InputGate, with_data: Collection[int]) -> None:
        """Nothing is taken yet; `with_data` are the channels whose data has not ended, now and later."""
        self._gate = gate
        self._with_data = with_data
        self._merged = Coalescer()
        self._sizer = BatchSizer()

    def merge(
        self, batch: Batch, input_index: int, rows_max: int
    ) -> tuple[Batch, PolledBatch | None]:
        """Return `batch` with what waits behind it, and the rest of the last batch that was taken, if any.

        Args:
            batch: the records that come first.
            input_index: their operator input.
            rows_max: the most rows of the result.
        """
        settings = self._gate.settings
        is_objects = isinstance(batch, ObjectBatch)
        full = settings.object_rows_per_buffer if is_objects else settings.rows_per_buffer_target
        rows_max = min(rows_max, full)
        if len(batch) >= rows_max or not self._gate.queued_buffers:
            return batch, None
        self._add(batch)
        alike = self._gate.poll_alike(input_index, rows_max - len(batch), self._add)
        for position, _ in alike:
            check(position in self._with_data, BEHIND_THE_END, channel=position)
        merged = self._merged.take()
        rows = len(merged)
        if rows <= rows_max:
            return merged, None
        rest = alike[-1][0], merged.slice(rows_max, rows - rows_max)
        return merged.slice(0, rows_max), rest

    def _add(self, batch: Batch) -> bool:
        """Add a batch if it can be part of the result; return False otherwise."""
        merged = self._merged
        if merged.size_bytes >= self._gate.settings.buffer_size_max_bytes:
            return False
        if not merged.accepts(batch):
            return False
        # Columns are copied; of Python objects only references are.
        size = 0 if isinstance(batch, ObjectBatch) else self._sizer.nbytes(batch)
        merged.add(batch, size, size)
        return True
