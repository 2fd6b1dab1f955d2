"""The rows of one side that wait for their windows, by pane.

Windows are runs of panes (`operators/windows/panes/grid.py`), so a row is stored once, however many windows
it is in. Rows are only added to a pane until the pane is dropped; so a cut is a list of pieces, and
a delta is the pieces added since.
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
from .row_store import PIECE_BYTES_MAX

PIECE_ROWS_MAX: Final = 4_096
"""Pieces are joined up to this size; otherwise small batches would leave a batch per few rows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a pane that arrived together, with their times, numbers and epoch."""

    rows: pa.RecordBatch
    times: Index
    ids: Index
    epoch: int

    def joined(self, later: Piece) -> Piece | None:
        """Return this piece and a later one as one, or None if they stay apart.

        Pieces of different epochs stay apart, because deltas tell them apart. Only pieces of
        similar size are joined, so that a row is copied a few times at most.
        """
        own, others = self.rows.num_rows, later.rows.num_rows
        if self.epoch != later.epoch or own > 2 * others or own + others > PIECE_ROWS_MAX:
            return None
        if self.rows.nbytes + later.rows.nbytes > PIECE_BYTES_MAX:
            return None
        return Piece(
            pa.concat_batches([self.rows, later.rows]),
            np.concatenate([self.times, later.times]),
            np.concatenate([self.ids, later.ids]),
            self.epoch,
        )


class PaneRows:
    """The rows of one side, by pane."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.epoch = TableEpoch()
        self.size = 0
        self._next_id = 0
        self._panes: dict[int, list[Piece]] = {}

    @property
    def panes(self) -> list[int]:
        """Return the panes with rows, ascending."""
        return sorted(self._panes)

    def add(self, pane: int, rows: pa.RecordBatch, times: Index) -> None:
        """Add rows of one pane."""
        ids = np.arange(self._next_id, self._next_id + len(times))
        self._next_id += len(times)
        self._add(pane, Piece(rows, times, ids, self.epoch.current))

    def load(self, pane: int, rows: pa.RecordBatch, times: Index, ids: Index) -> None:
        """Restore rows; `epoch.restored()` was called before."""
        self._next_id = max(self._next_id, int(ids.max()) + 1)
        self._add(pane, Piece(rows, times, ids, RESTORED_EPOCH))

    def _add(self, pane: int, piece: Piece) -> None:
        pieces = self._panes.setdefault(pane, [])
        self.size += len(piece.times)
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
        if not pieces:
            return pa.RecordBatch.from_arrays(
                [pa.array([], field.type) for field in self.schema], schema=self.schema
            )
        return pa.concat_batches(pieces)

    def drop(self, before: int) -> None:
        """Drop the panes before `before`."""
        for pane in [pane for pane in self._panes if pane < before]:
            self.size -= sum(len(piece.times) for piece in self._panes.pop(pane))

    def cut(self) -> PaneCut:
        """Return a cut of all rows."""
        pieces = [piece for pane in self.panes for piece in self._panes[pane]]
        return PaneCut(self.epoch.cut(), pieces, self.schema)


@dataclass(frozen=True, slots=True)
class PaneCut:
    """The rows of a side at a cut; usable in any thread."""

    epoch: int
    _pieces: list[Piece]
    _schema: pa.Schema

    def rows(self, since: int | None) -> tuple[pa.Table, Index, Index]:
        """Return the rows added after cut `since` (None: all), with their numbers and times."""
        pieces = [piece for piece in self._pieces if since is None or piece.epoch > since]
        none = np.zeros(0, np.int64)
        return (
            pa.Table.from_batches([piece.rows for piece in pieces], self._schema),
            np.concatenate([none, *(piece.ids for piece in pieces)]),
            np.concatenate([none, *(piece.times for piece in pieces)]),
        )


def by_pane(panes: Index) -> Iterator[tuple[int, Index | slice]]:
    """Yield the rows of each pane, ascending, as slices if the panes ascend. Needs at least one row."""
    order = None
    if not (panes[1:] >= panes[:-1]).all():
        order = np.argsort(panes, kind="stable")
        panes = panes[order]
    cuts = [0, *(np.flatnonzero(panes[1:] != panes[:-1]) + 1).tolist(), len(panes)]
    for low, high in pairwise(cuts):
        yield int(panes[low]), slice(low, high) if order is None else order[low:high]
