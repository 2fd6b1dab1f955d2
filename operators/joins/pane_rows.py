"""Rows in memory by pane, in the order in which they arrived, and consistent cuts of them.

Rows are only added to a pane until the pane is dropped; so a cut is a list of pieces, and a delta is the
pieces added since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa

from ...state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ...state.values import Index
from .row_store import PIECE_BYTES_MAX, HeldRows, RowStore

PIECE_ROWS_MAX: Final = 4_096
"""Pieces are joined up to this size; otherwise small batches would leave a batch per few rows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a pane that arrived together, with their times, numbers, epoch and bytes."""

    rows: pa.RecordBatch
    times: Index
    ids: Index
    epoch: int
    nbytes: int

    def joined(self, later: Piece) -> Piece | None:
        """Return this piece and a later one as one, or None if they stay apart.

        Pieces of different epochs stay apart, because deltas tell them apart. Only pieces of
        similar size are joined, so that a row is copied a few times at most.
        """
        own, others = self.rows.num_rows, later.rows.num_rows
        if self.epoch != later.epoch or own > 2 * others or own + others > PIECE_ROWS_MAX:
            return None
        if self.nbytes + later.nbytes > PIECE_BYTES_MAX:
            return None
        return Piece(
            pa.concat_batches([self.rows, later.rows]),
            np.concatenate([self.times, later.times]),
            np.concatenate([self.ids, later.ids]),
            self.epoch,
            self.nbytes + later.nbytes,
        )


class PaneRows:
    """The rows of one side, by pane.

    Attributes:
        size: the number of rows.
        row_bytes: the bytes of their columns.
        next_id: the number of the next row.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.epoch = TableEpoch()
        self.size = self.row_bytes = self.next_id = 0
        self._panes: dict[int, list[Piece]] = {}

    @property
    def live(self) -> int:
        """The number of rows that wait: all of them."""
        return self.size

    @property
    def panes(self) -> list[int]:
        """Return the panes with rows, ascending."""
        return sorted(self._panes)

    def add(self, pane: int, rows: pa.RecordBatch, times: Index) -> None:
        """Add rows of one pane."""
        ids = np.arange(self.next_id, self.next_id + len(times))
        self.next_id += len(times)
        self._add(pane, Piece(rows, times, ids, self.epoch.current, rows.nbytes))

    def load(self, pane: int, rows: pa.RecordBatch, times: Index, ids: Index) -> None:
        """Restore rows; `epoch.restored()` was called before."""
        self.next_id = max(self.next_id, int(ids.max()) + 1)
        self._add(pane, Piece(rows, times, ids, RESTORED_EPOCH, rows.nbytes))

    def _add(self, pane: int, piece: Piece) -> None:
        pieces = self._panes.setdefault(pane, [])
        self.size += len(piece.times)
        self.row_bytes += piece.nbytes
        while pieces and (both := pieces[-1].joined(piece)) is not None:
            pieces.pop()
            piece = both
        pieces.append(piece)

    def rows(self, first: int, last: int) -> pa.RecordBatch:
        """Return the rows of panes `first` to `last`, by pane, then in order of arrival."""
        if last - first < len(self._panes):
            wanted = [pane for pane in range(first, last + 1) if pane in self._panes]
        else:
            wanted = [pane for pane in self.panes if first <= pane <= last]
        pieces = [piece.rows for pane in wanted for piece in self._panes[pane]]
        if len(pieces) == 1:
            return pieces[0]
        return pa.concat_batches(pieces) if pieces else self.none()

    def none(self) -> pa.RecordBatch:
        """Return no rows."""
        empty = [pa.array([], field.type) for field in self.schema]
        return pa.RecordBatch.from_arrays(empty, schema=self.schema)

    def drop(self, before: int) -> None:
        """Drop the panes before `before`."""
        for pane in [pane for pane in self._panes if pane < before]:
            for piece in self._panes.pop(pane):
                self.size -= len(piece.times)
                self.row_bytes -= piece.nbytes

    @property
    def _pieces(self) -> list[Piece]:
        return [piece for pane in self.panes for piece in self._panes[pane]]

    def held(self) -> HeldRows:
        """Return all rows, by pane, then in order of arrival."""
        pieces = self._pieces
        return HeldRows(
            RowStore.of(self.schema, [piece.rows for piece in pieces]),
            np.arange(self.size),
            _joined([piece.ids for piece in pieces]),
            _joined([piece.times for piece in pieces]),
            None,
        )

    def cut(self) -> PaneCut:
        """Return a cut of all rows."""
        return PaneCut(self.epoch.cut(), self._pieces, self.schema)

    def keep(self) -> KeptPaneRows:
        """Return a cut to which the rows can go back: the one that was just taken."""
        return KeptPaneRows(self._panes)

    def go_back(self, kept: KeptPaneRows) -> None:
        """Take over the rows of another attempt, as they were at a cut."""
        for pane, pieces in kept.pieces.items():
            for piece in pieces:
                self.load(pane, piece.rows, piece.times, piece.ids)


class KeptPaneRows:
    """A cut to which the rows of a side can go back. Their pieces never change.

    Args:
        panes: the pieces of each pane; it goes on changing.

    Attributes:
        pieces: the pieces of each pane at the cut.
    """

    def __init__(self, panes: dict[int, list[Piece]]) -> None:
        self.pieces = {pane: tuple(pieces) for pane, pieces in panes.items()}
        self._panes: dict[int, list[Piece]] | None = panes

    @property
    def nbytes(self) -> int:
        """The memory of the rows of panes that were dropped since."""
        there = self.pieces if self._panes is None else self._panes
        dropped = [pieces for pane, pieces in self.pieces.items() if pane not in there]
        return sum(piece.nbytes for pieces in dropped for piece in pieces)

    def close(self) -> None:
        """Look no more at what is dropped."""
        self._panes = None


@dataclass(frozen=True, slots=True)
class PaneCut:
    """The rows of a side at a cut; usable in any thread."""

    epoch: int
    _pieces: list[Piece]
    _schema: pa.Schema

    def rows(self, since: int | None) -> tuple[pa.Table, Index, Index, None]:
        """Return the rows added after cut `since` (None: all), with their numbers and times."""
        pieces = [piece for piece in self._pieces if since is None or piece.epoch > since]
        return (
            pa.Table.from_batches([piece.rows for piece in pieces], self._schema),
            _joined([piece.ids for piece in pieces]),
            _joined([piece.times for piece in pieces]),
            None,
        )

    def close(self) -> None:
        """Do nothing: the pieces never change."""


def _joined(arrays: list[Index]) -> Index:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def by_pane(panes: Index) -> Iterator[tuple[int, Index | slice]]:
    """Yield the rows of each pane, ascending, as slices if the panes ascend. Needs at least one row."""
    order = None
    if not (panes[1:] >= panes[:-1]).all():
        order = np.argsort(panes, kind="stable")
        panes = panes[order]
    cuts = [0, *(np.flatnonzero(panes[1:] != panes[:-1]) + 1).tolist(), len(panes)]
    for low, high in pairwise(cuts):
        yield int(panes[low]), slice(low, high) if order is None else order[low:high]
