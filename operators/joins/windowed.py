"""Two streams in common windows: rows wait by window, and are matched by key when it fires.

A window fires when the watermark reaches its end - 1, which is the event time of its results. With
allowed lateness, a window that has fired takes rows until it expires. Their additions to the result
are emitted at once, and nothing is emitted twice: Flink would fire the whole window again.

Windows are runs of panes (`operators/windows/panes/grid.py`), so a row is stored once, however many
windows it is in. Rows are only added to a pane until the pane is dropped; so a cut is a list of
pieces, and a delta is the pieces added since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from ...state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ...state.slots.key_index import BatchKeys, KeyIndex
from ...state.snapshot import RestoredState, StateInfo, StateSnapshot, TableCut
from ...state.values import Index
from ..aggregation.keyed_aggregate import columns_of
from ..base import OperatorContext
from ..elements import WATERMARK_MIN, Batch
from ..time_progress import clamped
from ..windows.panes.grid import Grid
from ..windows.windowed_aggregate import EMIT_ROWS_MAX
from .columns import LEFT, RIGHT, ROW_COLUMN, TIME_COLUMN, JoinColumns
from .matching import Runs
from .row_store import PIECE_BYTES_MAX
from .step import JoinOperator, JoinStep, other
from .tables import ROW_KEYS, SIDES, by_key_group, join_infos, restored_rows

if TYPE_CHECKING:
    from ..windows.kinds import PaneWindow

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


_UNMARKED = (False, False)


class WindowedPair(JoinOperator):
    """A join in windows. Subclasses make the result."""

    def __init__(self, step: JoinStep, window: PaneWindow) -> None:
        super().__init__(step, self._expired_at, self._expired_at)
        self._grid, self._lateness_ms = window.grid(), window.allowed_lateness_ms
        self._bounds = window.identity
        self._rows = [PaneRows(step.columns.sides[side]) for side in (LEFT, RIGHT)]
        self._fired: int | None = None
        """The last window that has fired, or would have; None before the first watermark."""
        self._last_expired: int | None = None
        """The last window that takes no more rows."""
        self._first_kept: int | None = None
        """The first pane that has not expired. Rows of earlier panes are late."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._of_keys = self._hasher()

    def _waiting(self, side: int) -> int:
        return self._rows[side].size

    # --- results ---------------------------------------------------------------------------------

    def _fire(self, left: pa.RecordBatch, right: pa.RecordBatch, time: int) -> None:
        """Emit the results of a complete window, with event time `time`."""
        raise NotImplementedError

    def _add_late(self, side: int, new: pa.RecordBatch, window: int, time: int) -> None:
        """Handle new rows of a window that has fired; they have been added to it."""
        raise NotImplementedError

    def _rows_of(self, side: int, window: int) -> pa.RecordBatch:
        return self._rows[side].rows(*self._grid.panes_in(window))

    def _numbers(
        self, left: pa.RecordBatch, right: pa.RecordBatch
    ) -> tuple[Index, Index, KeyIndex]:
        """Return the keys of both sides as numbers, and the index that assigned them."""
        index = KeyIndex(self._of_keys)
        return (
            self._look_up(index, self._columns.key_columns(LEFT, left)),
            self._look_up(index, self._columns.key_columns(RIGHT, right)),
            index,
        )

    def _look_up(self, index: KeyIndex, keys: list[pa.Array]) -> Index:
        return index.lookup(BatchKeys(self._of_keys, keys)).astype(np.int64)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        side = input_index
        groups = self._groups_of(side, columns_of(batch, self._step.name))
        rows, times = self._timely(batch, side, self._progress.expired(groups), groups)
        if not rows.num_rows:
            return
        for pane, which in by_pane(self._grid.panes_of(times)):
            if isinstance(which, slice):
                part = rows.slice(which.start, which.stop - which.start)
            else:
                part = rows.take(pa.array(which))
            self._rows[side].add(pane, part, times[which])
            if self._lateness_ms:
                self._look_for_late(side, part, pane)

    def _look_for_late(self, side: int, part: pa.RecordBatch, pane: int) -> None:
        """Add new rows of a pane to its windows that have fired and not expired."""
        fired, progress = self._fired, self._progress
        groups = self._groups_of(side, part)
        if groups is not None:
            fired = self._grid.ended(progress.latest + 1)
        if fired is None:
            return
        first, last = self._grid.windows_of(pane)
        if self._last_expired is not None:
            first = max(first, self._last_expired + 1)
        for window in range(first, min(last, fired) + 1):
            if not self._grid.is_real(window):
                continue
            start, end = self._grid.bounds(window)
            rows = part
            if groups is not None:
                now = progress.now(groups)
                there = (now - self._lateness_ms < end - 1) & (start >= progress.expired(groups))
                rows = part.filter(pa.array((end - 1 <= now) & there))
            if rows.num_rows:
                self._add_late(side, rows, window, end - 1)

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Fire due windows, earliest first; drop expired ones; forward the watermark."""
        before = self._fired
        if self._progress.advance(timestamp):
            self._find_expired()
            for window in self._due(before):
                time = self._grid.bounds(window)[1] - 1
                left, right = (self._not_fired(side, window, time) for side in (LEFT, RIGHT))
                self._fire(left, right, time)
            for rows in self._rows:
                assert self._first_kept is not None
                rows.drop(self._first_kept)
        self.output.emit_watermark(timestamp)

    def _not_fired(self, side: int, window: int, time: int) -> pa.RecordBatch:
        """Return the rows of a due window, without key groups for which it had fired before a restore."""
        rows = self._rows_of(side, window)
        groups = self._groups_of(side, rows)
        if groups is None:
            return rows
        return rows.filter(pa.array(self._progress.not_fired(groups, time)))

    def _expired_at(self, watermark: int) -> int:
        """Return the time before which rows are in expired panes at a watermark."""
        kept = self._grid.kept_from(watermark + 1 - self._lateness_ms)
        return clamped(self._grid.pane_bounds(kept)[0])

    def _find_expired(self) -> None:
        """Find out which windows have fired, and which windows and panes have expired."""
        watermark = self._progress.watermark
        self._fired = self._grid.ended(watermark + 1)
        self._first_kept = self._grid.pane_of(self._progress.bounds[LEFT])
        # Windows that have lost panes are expired, too: the restored state may have had less allowed
        # lateness.
        self._last_expired = max(
            self._grid.ended(watermark + 1 - self._lateness_ms),
            self._grid.windows_of(self._first_kept - 1)[1],
        )

    def _due(self, before: int | None) -> list[int]:
        """Return windows with rows that have not fired up to window `before`, and now do."""
        assert self._fired is not None
        due: set[int] = set()
        if before == self._fired:
            return []
        for pane in {*self._rows[LEFT].panes, *self._rows[RIGHT].panes}:
            first, last = self._grid.windows_of(pane)
            if before is not None:
                first = max(first, before + 1)
            due.update(range(first, min(last, self._fired) + 1))
        return [window for window in sorted(due) if self._grid.is_real(window)]

    @property
    def _grid_of_windows(self) -> Grid:
        return self._grid

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot tables `left` and `right` (rows that wait) and `time` (event time)."""
        groups = self.context.max_parallelism
        tables = {self._progress.table.name: self._progress.cut()}
        for side, name in enumerate(SIDES):
            tables[name] = _table(self._rows[side].cut(), self._columns, side, groups)
        return StateSnapshot(tables=tables)

    def states(self) -> Sequence[StateInfo]:
        """Tables `left`, `right` and `time`."""
        return join_infos(self._columns, _UNMARKED, self.kind, self._bounds)

    def restore(self, state: RestoredState) -> None:
        """Restore the rows that wait; event time is the least of all own key groups."""
        self._progress.restore(state)
        if self._progress.watermark > WATERMARK_MIN:
            self._find_expired()
        for side in (LEFT, RIGHT):
            own = self._rows[side]
            own.epoch.restored()
            found = restored_rows(
                state, side, own.schema, self._step.name, self._progress, marks=False
            )
            if found is None:
                continue
            for pane, which in by_pane(self._grid.panes_of(found.times)):
                index = np.arange(len(found.ids))[which]
                part = found.picked(index)
                own.load(pane, part.rows, part.times, part.ids)


class WindowJoin(WindowedPair):
    """Emits pairs of rows of equal keys in a window."""

    kind = "window join"

    def _fire(self, left: pa.RecordBatch, right: pa.RecordBatch, time: int) -> None:
        met = self._pairs(LEFT, left, right, time)
        if self._step.outer[RIGHT]:
            alone = np.flatnonzero(~met)
            for low in range(0, len(alone), EMIT_ROWS_MAX):
                part = right.take(pa.array(alone[low : low + EMIT_ROWS_MAX]))
                self._send(RIGHT, part.columns, None, np.full(part.num_rows, time))

    def _add_late(self, side: int, new: pa.RecordBatch, window: int, time: int) -> None:
        self._pairs(side, new, self._rows_of(other(side), window), time)

    def _pairs(self, side: int, own: pa.RecordBatch, others: pa.RecordBatch, time: int) -> Index:
        """Emit the pairs of rows of `side`; return which of the others matched any."""
        outer = self._step.outer[side]
        met = np.zeros(others.num_rows, np.bool_)
        if not own.num_rows or not (outer or others.num_rows):
            return met
        *keys, index = self._numbers(*((own, others) if side == LEFT else (others, own)))
        runs = Runs(keys[other(side)], index.size)
        for pairs in runs.pairs(keys[side]):
            met[pairs.rows] = True
            probe, rows = pairs.probe, pairs.rows
            if outer:
                probe, rows = _with_lonely(probe, rows, pairs.first, pairs.last)
            for low in range(0, len(probe), EMIT_ROWS_MAX):
                part = slice(low, low + EMIT_ROWS_MAX)
                self._send(
                    side,
                    own.take(pa.array(probe[part])).columns,
                    others.take(pa.array(rows[part], mask=rows[part] < 0)).columns,
                    np.full(len(probe[part]), time),
                )
        return met


def _with_lonely(probe: Index, rows: Index, first: int, last: int) -> tuple[Index, Index]:
    """Return the pairs, and each row from `first` to `last` that is in none, with row -1."""
    lonely = np.setdiff1d(np.arange(first, last), probe, assume_unique=False)
    if not lonely.size:
        return probe, rows
    probe, rows = np.append(probe, lonely), np.append(rows, np.full(len(lonely), -1))
    order = np.argsort(probe, kind="stable")
    return probe[order], rows[order]


def _table(cut: PaneCut, columns: JoinColumns, side: int, max_parallelism: int) -> TableCut:
    def make(since: int | None) -> pa.Table:
        rows, ids, times = cut.rows(since)
        added = [(ROW_COLUMN, pa.array(ids)), (TIME_COLUMN, pa.array(times))]
        return by_key_group(rows, added, columns.keys[side], max_parallelism)

    return TableCut(make, keys=ROW_KEYS, epoch=cut.epoch)
