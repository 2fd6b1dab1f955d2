"""The rows of one side that wait for their windows, by pane.

Windows are runs of panes (`operators/panes/grid.py`), so a row waits once, in how many windows it may be.
Rows of a pane are only ever added, until the pane is dropped; so a cut is a list of pieces, and a delta is
those that came since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa

from ...state.epochs import RESTORED_EPOCH, TableEpoch
from ...state.values import Index
from .row_store import PIECE_BYTES_MAX

PIECE_ROWS_MAX: Final = 4_096
"""Pieces are joined up to this size: a stream of small batches would hold a batch for every few rows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a pane that came together: with their times, numbers, and the epoch they came in."""

    rows: pa.RecordBatch
    times: Index
    ids: Index
    epoch: int

    def joined(self, later: Piece) -> Piece | None:
        """This piece and a later one in one; None if they had better stay apart.

        Those of different epochs must: deltas tell them apart. Of like size: rows are copied a few times.
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
    """Rows by pane."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.epoch = TableEpoch()
        self.size = 0
        self._next_id = 0
        self._panes: dict[int, list[Piece]] = {}

    @property
    def panes(self) -> list[int]:
        """Those with rows, ascending."""
        return sorted(self._panes)

    def add(self, pane: int, rows: pa.RecordBatch, times: Index) -> None:
        """Add rows of one pane."""
        ids = np.arange(self._next_id, self._next_id + len(times))
        self._next_id += len(times)
        self._add(pane, Piece(rows, times, ids, self.epoch.current))

    def load(self, pane: int, rows: pa.RecordBatch, times: Index, ids: Index) -> None:
        """Take over restored rows; `epoch.restored()` was called before."""
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
        """The rows of the panes `first` to `last`, by pane, then in the order they came."""
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
        """Forget the panes before `before`."""
        for pane in [pane for pane in self._panes if pane < before]:
            self.size -= sum(len(piece.times) for piece in self._panes.pop(pane))

    def cut(self) -> PaneCut:
        """All rows as they are now."""
        pieces = [piece for pane in self.panes for piece in self._panes[pane]]
        return PaneCut(self.epoch.cut(), pieces, self.schema)


@dataclass(frozen=True, slots=True)
class PaneCut:
    """The rows of a side at a cut; for any thread."""

    epoch: int
    _pieces: list[Piece]
    _schema: pa.Schema

    def rows(self, since: int | None) -> tuple[pa.Table, Index, Index]:
        """Rows that came after cut `since` (None: all), their numbers and times."""
        pieces = [piece for piece in self._pieces if since is None or piece.epoch > since]
        none = np.zeros(0, np.int64)
        return (
            pa.Table.from_batches([piece.rows for piece in pieces], self._schema),
            np.concatenate([none, *(piece.ids for piece in pieces)]),
            np.concatenate([none, *(piece.times for piece in pieces)]),
        )


def by_pane(panes: Index) -> Iterator[tuple[int, Index | slice]]:
    """The rows of each pane, ascending; slices if the panes ascend. At least one row is there."""
    order = None
    if not (panes[1:] >= panes[:-1]).all():
        order = np.argsort(panes, kind="stable")
        panes = panes[order]
    cuts = [0, *(np.flatnonzero(panes[1:] != panes[:-1]) + 1).tolist(), len(panes)]
    for low, high in pairwise(cuts):
        yield int(panes[low]), slice(low, high) if order is None else order[low:high]
