"""Aggregates per key and window of panes.

Time, lateness and state follow `window_aggregate.py`: a window fires when the watermark reaches its
end - 1, and the watermark is forwarded after its results. A row is added to its pane, and so to all
windows of the pane. It is late if the last of them has expired. Until then, those that have fired
and not expired emit the new result of its key again. A row of the table in a snapshot is a key and
a pane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from ....errors import PlanError
from ....state.slots.epochs import TableEpoch
from ....state.slots.key_index import KeyHasher
from ....state.snapshot import RestoredState, StateInfo, StateSnapshot
from ....state.values import Array, Index
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedRows, columns_of, identity_seed
from ...base import Operator, OperatorContext
from ...elements import WATERMARK_MIN, Batch, ColumnBatch
from ...time_progress import TimeProgress, clamped
from ..kinds import WINDOW_FIELDS, PaneWindow
from ..late import LateOutput, last_windows
from ..window_aggregate import EMIT_ROWS_MAX
from .early import EarlyResults
from .pane_state import PROGRESS, PaneState
from .parts import Part
from .running_totals import RunningTotals, has_running_totals
from .table import PaneTable, parts_of
from .totals import Between, Members, Totalled, Totals
from .two_stacks import TwoStacks


@dataclass(frozen=True, slots=True)
class Fired:
    """Results of one window: slots of keys, and one column per aggregate."""

    start: int
    end: int
    keys: Index
    columns: list[pa.Array]


class PaneAggregate(Operator):
    """Aggregates over windows of panes, per key or without keys."""

    def __init__(self, window: PaneWindow, plan: AggregatePlan, step: str = "window") -> None:
        assert plan.added == WINDOW_FIELDS
        self._window, self._plan, self._step = window, plan, step
        self._grid = window.grid()
        self._progress = TimeProgress(PROGRESS, self._expired_at)
        """Rows at the expiry bound or before are late: all windows of their pane have expired."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._table = PaneTable(self._plan, self._hasher, epoch)
        self._progress.open(context)
        self._state = PaneState(
            self._window, self._plan, self._step, self._table, self._progress, epoch
        )
        self._early = EarlyResults(self._window.early, context, self._emit_early)
        self._table.on_moved += [self._renew_totals, self._early.moved]
        self._renew_totals()
        self._late_output = LateOutput(context, self.output)

    def _renew_totals(self, _: Index | None = None) -> None:
        self._totals = self._new_totals(self._table.between)

    def _new_totals(self, between: Between) -> Totals:
        exact = all(has_running_totals(spec) for spec in self._plan.specs)
        kind = RunningTotals if exact else TwoStacks
        return kind(self._plan, between, self._table.state)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        data, times = columns_of(batch, self._step), batch.timestamps
        if times is None:
            raise PlanError(
                f"`{self._step}` needs event time, but its input has none",
                fix='add .event_time("column", max_out_of_order="10s") before the window',
            )
        if not len(times):
            return
        parts, progress = parts_of(self._grid, times), self._progress
        if progress.differs or parts[0][0] <= self._table.gone:
            groups = progress.groups_of(lambda: [data.column(key) for key in self._plan.keys])
            late, now = times <= progress.expired(groups), progress.now(groups)
            batch = self._late_output.split(batch, late, now, partial(last_windows, self._grid))
            if not len(batch):
                return
            data, times = columns_of(batch, self._step), times[~late]
            parts = parts_of(self._grid, times)
        self._add(KeyedRows(self._plan, self._hasher, data, times), parts)

    def _add(self, rows: KeyedRows, parts: list[Part]) -> None:
        table, totals = self._table, self._totals
        known = table.state.size
        cells = table.place(rows, parts)
        behind = parts[0][0] <= max(totals.last, self._last_pane_due(self.latest))
        if not behind:
            table.add(rows, cells)
            self._early.note(cells, rows.size)
            return
        touched = np.unique(cells)
        panes = table.cell_panes.data[touched]
        inside = touched[(panes >= totals.first) & (panes <= totals.last)]
        before = inside[inside < known]
        totals.before_add(table.cell_keys.data[before], before)
        table.add(rows, cells)
        totals.after_add(table.cell_keys.data[inside], inside)
        self._fire_again(touched)
        self._early.note(cells, rows.size)

    @property
    def latest(self) -> int:
        """The furthest event time of any key group; after a restore key groups may differ."""
        return self._progress.latest

    def _last_pane_due(self, watermark: int) -> int:
        """Return the last pane of any window that has fired at a watermark."""
        if watermark == WATERMARK_MIN:
            return WATERMARK_MIN
        return self._grid.panes_in(self._grid.ended(watermark + 1))[1]

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Fire due windows, earliest first; drop expired ones; forward the watermark."""
        before = self._progress.watermark
        if self._progress.advance(timestamp):
            fired = self._fire(self._first_to_fire(before), self._grid.ended(timestamp + 1))
            self._emit(self._not_fired(fired))
            self._table.drop(self._kept_from(timestamp))
            self._table.sealed(self._last_pane_due(timestamp))
        self.output.emit_watermark(timestamp)

    def _kept_from(self, watermark: int) -> int:
        """Return the first pane that has not expired at a watermark."""
        return self._grid.kept_from(watermark + 1 - self._window.allowed_lateness_ms)

    def _expired_at(self, watermark: int) -> int:
        """Return the end of the last pane that has expired at a watermark, inclusive."""
        return clamped(self._grid.pane_bounds(self._kept_from(watermark))[0] - 1)

    def _first_to_fire(self, before: int) -> int:
        return WATERMARK_MIN if before == WATERMARK_MIN else self._grid.ended(before + 1) + 1

    def _fire(self, window: int, last: int) -> Iterator[Fired]:
        """Yield the results of the windows `window` to `last` that have any."""
        grid, table, totals = self._grid, self._table, self._totals
        while window <= last:
            panes = (WATERMARK_MIN, WATERMARK_MIN)
            if window > WATERMARK_MIN:
                panes = grid.panes_in(window)
            found = table.next_from(panes[0])
            if found is None:
                return
            if found > panes[1]:
                window = max(window + 1, grid.windows_of(found)[0])
                continue
            if grid.is_real(window):
                totals.move(*panes, table.key_count)
                yield Fired(*grid.bounds(window), *totals.results())
            window += 1

    def _not_fired(self, fired: Iterable[Fired]) -> Iterator[Fired]:
        """Leave out results of key groups for which these windows had fired before a restore."""
        for result in fired:
            groups = self._groups_of(result.keys)
            if groups is None:
                yield result
                continue
            keep = np.flatnonzero(self._progress.not_fired(groups, result.end - 1))
            columns = [column.take(pa.array(keep)) for column in result.columns]
            yield Fired(result.start, result.end, result.keys[keep], columns)

    def _groups_of(self, keys: Index) -> Index | None:
        """Return the key groups of the keys in these slots; see `TimeProgress.groups_of`."""
        return self._progress.groups_of(lambda: self._table.key_columns(keys))

    # --- results of some keys ------------------------------------------------------------------

    def _fire_again(self, cells: Index) -> None:
        """Emit the new results of keys (cells, each once) in windows that fired and have not expired."""
        groups = self._groups_of(self._table.cell_keys.data[cells])
        now, expired = self._progress.now(groups), self._progress.expired(groups)
        if isinstance(now, int) or isinstance(expired, int):
            self._emit(
                self._results_again(cells, self._progress.watermark, self._progress.bounds[0])
            )
            return
        for watermark, bound in sorted({*zip(now.tolist(), expired.tolist(), strict=True)}):
            alike = cells[(now == watermark) & (expired == bound)]
            self._emit(self._results_again(alike, watermark, bound))

    def _results_again(self, cells: Index, watermark: int, expired: int) -> Iterable[Fired]:
        """Yield the results of windows that had fired at a watermark and have not expired."""
        if watermark == WATERMARK_MIN:
            return ()
        after = watermark + 1
        gone = self._grid.ended(after - self._window.allowed_lateness_ms)
        if expired > WATERMARK_MIN:
            # also windows that a job with less allowed lateness has dropped
            gone = max(gone, self._grid.windows_of(self._grid.pane_of(expired))[1])
        due = self._grid.ended(after)
        return self._results_of(cells, gone + 1, due) if gone < due else ()

    def _emit_early(self, cells: Index) -> None:
        """Emit early results of what changed in these cells (each once)."""
        cells = cells[self._table.cell_panes.data[cells] > self._table.gone]
        first = self._first_to_fire(self._progress.watermark)
        self._emit(self._not_fired(self._results_of(cells, first, None)))

    def _results_of(self, cells: Index, low: int, high: int | None) -> Iterator[Fired]:
        """Yield results of windows `low` to `high`, for the keys that these cells of the window have."""
        table, grid = self._table, self._grid
        panes = table.cell_panes.data[cells]
        windows: set[int] = set()
        for pane in np.unique(panes).tolist():
            first, last = grid.windows_of(pane)
            windows.update(range(max(first, low), (last if high is None else min(last, high)) + 1))
        if not windows:
            return
        keys, which = np.unique(table.cell_keys.data[cells], return_inverse=True)
        totals = self._new_totals(_some_keys(table, keys))
        for window in sorted(windows):
            first, last = grid.panes_in(window)
            if not grid.is_real(window):
                continue
            totals.move(first, last, len(keys))
            touched = np.zeros(len(keys), np.bool_)
            touched[which[(panes >= first) & (panes <= last)]] = True
            found, columns = _only(touched, *totals.results())
            yield Fired(*grid.bounds(window), keys[found], columns)

    # --- output --------------------------------------------------------------------------------

    def _emit(self, fired: Iterable[Fired]) -> None:
        """Emit results: many small windows in one batch, a large one in several."""
        held: list[Fired] = []
        rows = 0
        for result in fired:
            held.append(result)
            rows += len(result.keys)
            if rows >= EMIT_ROWS_MAX:
                self._send(held)
                held, rows = [], 0
        if rows:
            self._send(held)

    def _send(self, fired: list[Fired]) -> None:
        counts = [len(result.keys) for result in fired]
        edges = [
            np.repeat(np.array([getattr(result, edge) for result in fired], np.int64), counts)
            for edge in ("start", "end")
        ]
        whole = len(fired) == 1
        keys = fired[0].keys if whole else np.concatenate([result.keys for result in fired])
        values = fired[0].columns
        if not whole:
            columns = zip(*(result.columns for result in fired), strict=True)
            values = [pa.concat_arrays(list(column)) for column in columns]
        bounds = [
            pa.array(edge).view(field.type)
            for edge, field in zip(edges, WINDOW_FIELDS, strict=True)
        ]
        data = pa.RecordBatch.from_arrays(
            [*self._table.key_columns(keys), *bounds, *values], schema=self._plan.result_schema
        )
        batch = ColumnBatch(data, edges[1] - 1)
        for low in range(0, len(batch), EMIT_ROWS_MAX):
            self.output.emit(batch.slice(low, min(EMIT_ROWS_MAX, len(batch) - low)))

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `panes` (one row per key and pane) and `watermark` (per key group)."""
        return self._state.snapshot(self.context)

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `panes` and `watermark`."""
        return PaneState.infos(self._plan)

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the panes and the progress of event time."""
        self._state.restore(state)
        return None

    def finish(self) -> Awaitable[None] | None:
        self._early.stop()
        return None

    def close(self) -> None:
        early: EarlyResults | None = getattr(self, "_early", None)
        if early is not None:
            early.stop()


@dataclass(frozen=True, slots=True)
class _Some:
    """The cells that a pane has of some keys."""

    number: int
    found: tuple[Index, Index]

    def members(self) -> tuple[Index, Index]:
        return self.found


def _some_keys(table: PaneTable, keys: Index) -> Callable[[int, int], Iterator[Members]]:
    """Return a view of the panes with only these keys, renumbered."""

    def between(first: int, last: int) -> Iterator[Members]:
        for pane in table.between(first, last):
            yield _Some(pane.number, pane.find(keys))

    return between


def _only(wanted: Array, keys: Index, columns: list[pa.Array]) -> Totalled:
    keep = np.flatnonzero(wanted[keys])
    if len(keep) == len(keys):
        return keys, columns
    indices = pa.array(keep)
    return keys[keep], [column.take(indices) for column in columns]
