"""Rows in memory as pieces of Arrow columns: appended, read at random, dropped in bulk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...state.values import Index

PIECE_BYTES_MAX: Final = 1 << 23
"""Pieces are joined up to this size: random reads want few pieces, and copying 8 MiB is quick."""
ROWS_MAX: Final = 2**31 - 1
"""The most rows of one side in one subtask; their numbers are int32 in the index."""


class RowStore:
    """Rows of one schema, numbered 0, 1, 2, … in the order they came."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.size = 0
        self._pieces: list[pa.RecordBatch] = []
        self._starts: Index = np.zeros(0, np.int64)

    @property
    def pieces(self) -> list[pa.RecordBatch]:
        """Return all rows as they are now; the pieces themselves never change."""
        return list(self._pieces)

    @property
    def nbytes(self) -> int:
        """The memory of the rows, bytes."""
        return sum(piece.nbytes for piece in self._pieces)

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows with the store's schema.

        Raises:
            StateError: there are too many rows.
        """
        if self.size + rows.num_rows > ROWS_MAX:
            raise StateError(
                f"too many rows wait in one subtask of a join rows=`{self.size}`",
                fix="raise the parallelism, or let rows wait for less time",
            )
        pieces = self._pieces
        pieces.append(rows)
        self.size += rows.num_rows
        # Pieces are of similar size, so each row is copied a few times (as in
        # `state/key_index.py`).
        while len(pieces) > 1:
            before, last = pieces[-2], pieces[-1]
            if before.num_rows > 2 * last.num_rows or before.nbytes + last.nbytes > PIECE_BYTES_MAX:
                break
            pieces[-2:] = [pa.concat_batches([before, last])]
        self._number()

    def _number(self) -> None:
        counts = np.array([piece.num_rows for piece in self._pieces], np.int64)
        self._starts = np.cumsum(counts) - counts

    def take(self, rows: Index) -> list[pa.Array]:
        """Return the columns of some rows, in any order; nulls for row -1."""
        if not self._pieces:
            return [pa.nulls(len(rows), field.type) for field in self.schema]
        if len(self._pieces) == 1:
            return list(self._pieces[0].take(_indices(rows)).columns)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        # Sort by piece: a radix sort, as piece numbers fit 16 bits. Row -1 comes first, as piece
        # -1.
        order = np.argsort((numbers + 1).astype(np.uint16), kind="stable")
        cuts = np.searchsorted(numbers[order], np.arange(len(self._pieces) + 1))
        parts = []
        for at in np.flatnonzero(np.diff(cuts)).tolist():
            which = rows[order[cuts[at] : cuts[at + 1]]] - self._starts[at]
            parts.append(self._pieces[at].take(pa.array(which)))
        if not parts:
            return [pa.nulls(len(rows), field.type) for field in self.schema]
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows)) - cuts[0]
        joined = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        return list(joined.take(_indices(back)).columns)

    def kept(self, rows: Index) -> RowStore:
        """Return a store of these rows, which ascend. Pieces whose rows all stay are shared."""
        store = RowStore(self.schema)
        cuts = np.searchsorted(rows, np.append(self._starts, self.size))
        for at, piece in enumerate(self._pieces):
            which = rows[cuts[at] : cuts[at + 1]]
            if len(which) == piece.num_rows:
                store._pieces.append(piece)
            elif len(which):
                store._pieces.append(piece.take(pa.array(which - self._starts[at])))
        store.size = len(rows)
        store._number()
        return store


def _indices(rows: Index) -> pa.Array:
    missing = rows < 0
    return pa.array(rows, mask=missing) if missing.any() else pa.array(rows)


def rows_of_pieces(pieces: Sequence[pa.RecordBatch], schema: pa.Schema, which: Index) -> pa.Table:
    """Return some rows of `RowStore.pieces`, which ascend; for any thread."""
    taken, start = [], 0
    for piece in pieces:
        low, high = np.searchsorted(which, [start, start + piece.num_rows])
        if low < high:
            taken.append(piece.take(pa.array(which[low:high] - start)))
        start += piece.num_rows
    return pa.Table.from_batches(taken, schema)
