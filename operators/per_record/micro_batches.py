"""The operator of `map_batches` with `rows=`: batches of a chosen size, for functions with costly calls.

Records are collected until there are enough, or the first has waited long enough. They never wait
across a barrier, a watermark or the end, so this step has no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..base import OperatorContext
from ..elements import Batch, ColumnBatch, concatenated
from ..rows import column_batch
from .map_batches import BatchCalls, BatchFunction, divide


class RowBuffer:
    """Cuts a stream of batches into pieces of equal size.

    Args:
        rows: of each piece.
        within_ms: the longest time a row waits.
        send: takes a piece.
    """

    def __init__(self, rows: int, within_ms: int, send: Callable[[ColumnBatch], None]) -> None:
        self._rows = rows
        self._within_ms = within_ms
        self._send = send
        self._parts: list[ColumnBatch] = []
        self._count = 0
        self._stop: Callable[[], None] | None = None

    @property
    def waits(self) -> bool:
        """True if rows wait here."""
        return self._count > 0

    def add(self, batch: ColumnBatch, context: OperatorContext) -> None:
        """Add a batch; send full pieces, and keep the rest."""
        for piece in self._full_pieces(batch):
            self._disarm()
            self._send(piece)
        if self._count and self._stop is None:
            self._stop = context.timers.call_later(self._within_ms, self.flush)

    def _full_pieces(self, batch: ColumnBatch) -> Iterator[ColumnBatch]:
        start = 0
        while self._count + len(batch) - start >= self._rows:
            length = self._rows - self._count
            parts, self._parts, self._count = self._parts, [], 0
            yield concatenated([*parts, batch.slice(start, length)])
            start += length
        if start < len(batch):
            self._parts.append(batch.slice(start, len(batch) - start))
            self._count += len(batch) - start

    def flush(self) -> None:
        """Send the rows that wait."""
        self._disarm()
        if self._parts:
            parts, self._parts, self._count = self._parts, [], 0
            self._send(concatenated(parts))

    def _disarm(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None


class MicroBatches(BatchCalls):
    """Calls a plain function for batches of a set number of rows."""

    def __init__(self, user: BatchFunction, rows: int, within_ms: int) -> None:
        super().__init__(user)
        self._buffer = RowBuffer(rows, within_ms, self._call)

    def process(self, batch: Batch, input_index: int) -> None:
        self._buffer.add(column_batch(batch), self.context)

    def _call(self, batch: ColumnBatch) -> None:
        divide(self._user, batch).send(self._letters, self.output)

    def settled(self) -> bool:
        return not self._buffer.waits

    def on_watermark(self, timestamp: int) -> None:
        self._buffer.flush()
        self.output.emit_watermark(timestamp)

    def on_idle(self, idle: bool) -> None:
        self._buffer.flush()
        self.output.emit_idle(idle)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._buffer.flush()

    def finish(self) -> None:
        self._buffer.flush()
