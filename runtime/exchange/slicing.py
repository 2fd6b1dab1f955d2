"""Buffers of a good size: large batches are cut without copying, small ones are put together once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from ...operators.elements import Batch, ColumnBatch, ObjectBatch
from .settings import ExchangeSettings


class BatchSizer:
    """Bytes of a batch. Asking Arrow costs microseconds per column, so fixed widths are remembered."""

    __slots__ = ("_row_bytes", "_schema")

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._row_bytes: float | None = None

    def nbytes(self, batch: Batch) -> int:
        """Bytes of a batch on its way, exact enough to choose buffer sizes by."""
        if isinstance(batch, ObjectBatch):
            return len(batch) * _record_bytes(batch)
        schema = batch.data.schema
        if self._schema is None or not schema.equals(self._schema):
            self._schema = schema
            self._row_bytes = _fixed_row_bytes(schema)
        if self._row_bytes is None:
            return batch.nbytes
        times = 0 if batch.timestamps is None else 8
        return int(len(batch) * (self._row_bytes + times))


def _record_bytes(batch: ObjectBatch) -> int:
    """Bytes of one record as it would travel, by the one in the middle; at least 64."""
    if not batch.records:
        return 64
    try:
        return max(64, len(pickle.dumps(batch.records[len(batch) // 2], 5)))
    except Exception:  # the encoder has other ways, and says what is wrong if it has none
        return 64


def _fixed_row_bytes(schema: pa.Schema) -> float | None:
    types = schema.types
    if not all(pa.types.is_primitive(each) for each in types):
        return None
    return float(sum(each.bit_width for each in types)) / 8


_FILLED = 0.95
"""Slices are cut, and buffers are full, this far below the limit: rows are of uneven sizes."""


def rows_within(size_bytes: float, row_bytes: float) -> int:
    """How many rows fill a buffer of a size; at least one."""
    return max(1, int(_FILLED * size_bytes / row_bytes))


def cut(
    batch: Batch, settings: ExchangeSettings, sizer: BatchSizer, size_max_bytes: int
) -> Iterator[tuple[Batch, int]]:
    """Yield `batch` in slices that fit a buffer of `size_max_bytes`, each with its size in bytes."""
    rows, size = len(batch), sizer.nbytes(batch)
    if isinstance(batch, ObjectBatch):
        # Coalescing stops at the first piece that fills the buffer, so it may be up to twice as full.
        limit = settings.object_rows_per_buffer
        limit = limit if rows >= 2 * limit else rows
        overhead = 0
    else:
        limit = settings.rows_per_buffer_max
        overhead = 0 if size <= size_max_bytes else _overhead(batch)
    bytes_max = size_max_bytes + overhead
    if rows <= limit and size <= bytes_max:
        yield batch, size
        return
    limit = min(limit, rows_within(size_max_bytes, max(1, size - overhead) / rows))
    for offset in range(0, rows, limit):
        yield from _halve(batch.slice(offset, min(limit, rows - offset)), bytes_max, sizer)


def _overhead(batch: ColumnBatch) -> int:
    """Bytes that no cut makes smaller: the dictionaries of dictionary-encoded columns."""
    return batch.slice(0, 0).nbytes


def _halve(batch: Batch, bytes_max: int, sizer: BatchSizer) -> Iterator[tuple[Batch, int]]:
    rows, size = len(batch), sizer.nbytes(batch)
    if rows == 1 or size <= bytes_max:
        yield batch, size
    else:
        yield from _halve(batch.slice(0, rows // 2), bytes_max, sizer)
        yield from _halve(batch.slice(rows // 2, rows - rows // 2), bytes_max, sizer)


class Coalescer:
    """The partly filled buffer of one channel."""

    __slots__ = ("pieces", "rows", "size_bytes")

    def __init__(self) -> None:
        self.pieces: list[Batch] = []
        self.rows = 0
        self.size_bytes = 0.0

    def accepts(self, batch: Batch) -> bool:
        """True if `batch` can share a buffer with what is here: same kind and same columns."""
        if not self.pieces:
            return True
        first = self.pieces[0]
        if (first.timestamps is None) != (batch.timestamps is None):
            return False
        if isinstance(first, ColumnBatch) and isinstance(batch, ColumnBatch):
            schema = first.data.schema
            # Dictionaries of several batches together may be too many for a narrow index.
            return bool(schema.equals(batch.data.schema, check_metadata=True)) and not any(
                _narrow_index(each) for each in schema.types
            )
        return type(first) is type(batch)

    def add(self, batch: Batch, size_bytes: float) -> None:
        """Keep `batch` behind the others."""
        self.pieces.append(batch)
        self.rows += len(batch)
        self.size_bytes += size_bytes

    def take(self) -> Batch:
        """All pieces as one batch, copied once if there are several. Leaves the coalescer empty."""
        pieces = self.pieces
        self.pieces, self.rows, self.size_bytes = [], 0, 0.0
        return pieces[0] if len(pieces) == 1 else _concatenate(pieces)


def _narrow_index(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return bool(type_.index_type.bit_width < 32) or _narrow_index(type_.value_type)
    return any(_narrow_index(type_.field(i).type) for i in range(type_.num_fields))


def _concatenate(pieces: list[Batch]) -> Batch:
    times = [piece.timestamps for piece in pieces if piece.timestamps is not None]
    timestamps = np.concatenate(times) if times else None
    columns = [piece.data for piece in pieces if isinstance(piece, ColumnBatch)]
    if columns:
        return ColumnBatch(pa.concat_batches(columns), timestamps)
    records = [r for piece in pieces if isinstance(piece, ObjectBatch) for r in piece.records]
    return ObjectBatch(records, timestamps)
