"""Rows in memory: as pieces of Arrow columns that are appended, read at random and dropped in bulk;
and in order of time, for operators that release them as event time passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...state.aggregates.accumulators import Mask
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

    @classmethod
    def of(cls, schema: pa.Schema, pieces: Sequence[pa.RecordBatch]) -> RowStore:
        """Return a store of these pieces as they are."""
        store = cls(schema)
        store._pieces = list(pieces)
        store.size = sum(piece.num_rows for piece in pieces)
        store._number()
        return store

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
        # Sort by piece: a radix sort where piece numbers fit 16 bits. Row -1 comes first, as piece
        # -1.
        small = np.uint16 if len(self._pieces) < 1 << 16 else np.int64
        order = np.argsort((numbers + 1).astype(small), kind="stable")
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
        kept = []
        cuts = np.searchsorted(rows, np.append(self._starts, self.size))
        for at, piece in enumerate(self._pieces):
            which = rows[cuts[at] : cuts[at + 1]]
            if len(which) == piece.num_rows:
                kept.append(piece)
            elif len(which):
                kept.append(piece.take(pa.array(which - self._starts[at])))
        return RowStore.of(self.schema, kept)


@dataclass(frozen=True, slots=True)
class HeldRows:
    """The rows in memory that wait.

    Attributes:
        store: holds their columns.
        places: their numbers in the store, ascending.
        ids: their numbers in snapshots.
        times: their event times, ms.
        matched: whether they have matched; None if they have no marks.
    """

    store: RowStore
    places: Index
    ids: Index
    times: Index
    matched: Mask | None


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


TAIL_MIN: Final = 16_384
TAIL_SHARE: Final = 8
_LAST: Final = np.iinfo(np.int64).max


class TimeOrder:
    """Row numbers by time (ms).

    Most rows arrive in about the order in which they are released. New rows wait unsorted; they are
    sorted and merged into the main part once they are an eighth of it. So a watermark costs two
    binary searches and a look at the new rows, and a row is sorted a few times at most. Columnar
    timers work in the same way: a sorted main part and an unsorted tail.
    """

    def __init__(self) -> None:
        self._times: Index = np.zeros(0, np.int64)
        self._rows: Index = np.zeros(0, np.int64)
        self._next = 0  # the first sorted row that is still there
        self._tail: list[tuple[Index, Index]] = []
        self._tail_rows = 0
        self._tail_first = _LAST

    def __len__(self) -> int:
        return len(self._times) - self._next + self._tail_rows

    def add(self, times: Index, rows: Index) -> None:
        """Add rows."""
        if not len(times):
            return
        self._tail.append((times, rows))
        self._tail_rows += len(times)
        self._tail_first = min(self._tail_first, int(times.min()))

    def due(self, before: int) -> Index:
        """Remove the rows before `before`; return them by time, then by number."""
        if self._tail_first < before and self._tail_rows > max(
            TAIL_MIN, (len(self._times) - self._next) // TAIL_SHARE
        ):
            self._merge()
        upto = int(np.searchsorted(self._times, before))
        times, rows = self._times[self._next : upto], self._rows[self._next : upto]
        self._next = max(self._next, upto)
        if self._tail_first >= before:
            return rows
        late_times, late_rows = self._from_tail(before)
        times, rows = np.concatenate([times, late_times]), np.concatenate([rows, late_rows])
        # Rows of the tail arrived later than those of the main part, so a stable sort is by number,
        # too.
        return rows[np.argsort(times, kind="stable")]

    def _from_tail(self, before: int) -> tuple[Index, Index]:
        times, rows = self._joined_tail()
        due = times < before
        rest = ~due
        self._tail, self._tail_rows, self._tail_first = [], 0, _LAST
        self.add(times[rest], rows[rest])
        return times[due], rows[due]

    def _joined_tail(self) -> tuple[Index, Index]:
        times, rows = zip(*self._tail, strict=True)
        return np.concatenate(times), np.concatenate(rows)

    def _merge(self) -> None:
        times, rows = self._joined_tail()
        times = np.concatenate([self._times[self._next :], times])
        rows = np.concatenate([self._rows[self._next :], rows])
        order = np.argsort(times, kind="stable")  # two nearly sorted runs: linear
        self._times, self._rows, self._next = times[order], rows[order], 0
        self._tail, self._tail_rows, self._tail_first = [], 0, _LAST

    def renumber(self, numbers: Index) -> None:
        """Renumber the rows: row i becomes `numbers[i]`."""
        self._times, self._rows = self._times[self._next :], numbers[self._rows[self._next :]]
        self._next = 0
        self._tail = [(times, numbers[rows]) for times, rows in self._tail]
