"""Two streams in common windows: rows wait by window, and are matched by key when it fires.

A window fires when the watermark reaches its end - 1, which is the event time of its results. With
allowed lateness, a window that has fired takes rows until it expires. Their additions to the result
are emitted at once, and nothing is emitted twice: Flink would fire the whole window again.

Windows are runs of panes (`operators/windows/panes/grid.py`), so a row is stored once, however many
windows it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ...state.slots.key_index import BatchKeys, KeyIndex
from ...state.snapshot import RestoredState
from ...state.values import Index
from ..aggregation.keyed_aggregate import columns_of
from ..base import OperatorContext
from ..elements import WATERMARK_MIN, Batch
from ..time_progress import clamped
from ..windows.panes.grid import Grid, windows_with
from ..windows.windowed_aggregate import EMIT_ROWS_MAX
from .columns import LEFT, RIGHT
from .matching import Runs
from .pane_rows import KeptPaneRows, PaneRows, by_pane
from .spilling import SpillingPaneRows, side_by_side
from .step import JoinOperator, JoinStep, other
from .tables import SIDES, RestoredRows, RowsCut

if TYPE_CHECKING:
    from ..windows.kinds import PaneWindow


def _expired_at(grid: Grid, lateness_ms: int, watermark: int) -> int:
    """Return the time before which rows are in expired panes at a watermark."""
    kept = grid.kept_from(watermark + 1 - lateness_ms)
    return clamped(grid.pane_bounds(kept)[0])


class WindowedPair(JoinOperator[PaneRows, SpillingPaneRows]):
    """A join in windows. Subclasses make the result."""

    todays_rule = True

    def __init__(self, step: JoinStep, window: PaneWindow) -> None:
        self._grid, self._lateness_ms = window.grid(), window.allowed_lateness_ms
        expired_at = partial(_expired_at, self._grid, self._lateness_ms)
        super().__init__(step, expired_at, expired_at)
        self.window = window.identity
        self._fired: int | None = None
        """The last window that has fired, or would have; None before the first watermark."""
        self._last_expired: int | None = None
        """The last window that takes no more rows."""
        self._first_kept: int | None = None
        """The first pane that has not expired. Rows of earlier panes are late."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._of_keys = self._hasher()

    def _new_rows(self, side: int) -> PaneRows:
        return PaneRows(self._columns.sides[side])

    def _new_disk(self, side: int) -> SpillingPaneRows:
        keys, schema = self._columns.keys[side], self._columns.sides[side]
        return SpillingPaneRows(self.context, SIDES[side], schema, keys)

    # --- results ---------------------------------------------------------------------------------

    def _fire(self, left: pa.RecordBatch, right: pa.RecordBatch, time: int) -> None:
        """Emit the results of all rows of some keys in a window, with event time `time`."""
        raise NotImplementedError

    def _add_late(self, side: int, new: pa.RecordBatch, window: int, time: int) -> None:
        """Handle new rows of a window that has fired; they have been added to it."""
        raise NotImplementedError

    def _pieces(self, window: int) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Yield the rows of a window on both sides, in pieces that have all rows of their keys."""
        panes = self._grid.panes_in(window)
        if not self._is_on_disk(window):
            left, right = (rows.rows(*panes) for rows in self._sides)
            yield left, right
            return
        for disk, rows in zip(self._disk, self._sides, strict=True):
            disk.take_over(rows)
        times = self._times_in(window)
        for tables in side_by_side([disk.between(*times) for disk in self._disk]):
            left, right = (
                disk.batch(rows, self._grid.panes_of)
                for disk, rows in zip(self._disk, tables, strict=True)
            )
            yield left, right

    def _rows_of(self, side: int, window: int, keys: list[pa.Array]) -> pa.RecordBatch:
        """Return the rows of a window on one side, without such on disk that have none of these keys."""
        if not self._is_on_disk(window):
            return self._sides[side].rows(*self._grid.panes_in(window))
        disk = self._disk[side]
        disk.take_over(self._sides[side])
        return disk.batch(disk.of_keys(keys, *self._times_in(window)), self._grid.panes_of)

    def _is_on_disk(self, window: int) -> bool:
        first, last = self._grid.panes_in(window)
        return any(first <= pane <= last for disk in self._disk for pane in disk.panes)

    def _times_in(self, window: int) -> tuple[int, int]:
        """Return the first and the last time of a window."""
        start, end = self._grid.bounds(window)
        return start, end - 1

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
            self._sides[side].add(pane, part, times[which])
            if self._lateness_ms:
                self._look_for_late(side, part, pane)
        self._settle_disk()

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
                for left, right in self._pieces(window):
                    self._fire(
                        self._not_fired(LEFT, left, time), self._not_fired(RIGHT, right, time), time
                    )
            assert self._first_kept is not None
            for rows in self._sides:
                rows.drop(self._first_kept)
            for side, disk in enumerate(self._disk):
                disk.drop(self._first_kept)
                disk.released(self._progress.bounds[side])
            self._dropped()
        self.output.emit_watermark(timestamp)

    def _not_fired(self, side: int, rows: pa.RecordBatch, time: int) -> pa.RecordBatch:
        """Return rows of a due window, without key groups for which it had fired before a restore."""
        groups = self._groups_of(side, rows)
        if groups is None:
            return rows
        return rows.filter(pa.array(self._progress.not_fired(groups, time)))

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
        if before == self._fired:
            return []
        panes = {pane for rows in self._sides for pane in rows.panes}
        panes = panes.union(*(disk.panes for disk in self._disk))
        return windows_with(self._grid, panes, None if before is None else before + 1, self._fired)

    @property
    def _grid_of_windows(self) -> Grid:
        return self._grid

    # --- state ---------------------------------------------------------------------------------

    def _cut(self, side: int) -> RowsCut:
        return self._sides[side].cut()

    def _load(self, side: int, found: RestoredRows) -> None:
        for pane, which in by_pane(self._grid.panes_of(found.times)):
            part = found.picked(np.arange(len(found.ids))[which])
            self._sides[side].load(pane, part.rows, part.times, part.ids)

    def _open_kept(self, side: int) -> KeptPaneRows:
        return self._sides[side].keep()

    def _go_back(self, side: int, kept: KeptPaneRows) -> None:
        self._sides[side].go_back(kept)

    def _restore(self, state: RestoredState) -> None:
        super()._restore(state)
        if self._progress.watermark > WATERMARK_MIN:
            self._find_expired()


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
        keys = self._columns.key_columns(side, new)
        self._pairs(side, new, self._rows_of(other(side), window, keys), time)

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
