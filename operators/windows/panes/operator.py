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

import numpy as np
import pyarrow as pa

from ....errors import PlanError
from ....state.slots.epochs import TableEpoch
from ....state.slots.key_index import KeyHasher
from ....state.snapshot import RestoredState, StateInfo, StateSnapshot
from ....state.values import Array, Index
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedRows, columns_of, identity_seed
from ...ahead import Ahead, key_groups
from ...base import Operator, OperatorContext
from ...elements import WATERMARK_MIN, Batch, ColumnBatch
from ..kinds import WINDOW_FIELDS, PaneWindow
from ..late import LateOutput, last_windows
from ..window_aggregate import EMIT_ROWS_MAX
from .early import EarlyResults
from .pane_state import PaneState
from .parts import Part
from .running_totals import RunningTotals, has_running_totals
from .table import NO_PANE, PaneTable, parts_of
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
        self._watermark = WATERMARK_MIN
        self._ahead: Ahead | None = None
        """Key groups that are ahead; their bound is the last pane that has expired."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._table = PaneTable(self._plan, self._hasher, epoch)
        self._state = PaneState(self._window, self._plan, self._step, self._table, epoch)
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
        parts = parts_of(self._grid, times)
        if self._ahead is not None or parts[0][0] <= self._table.gone:
            late = self._grid.panes_of(times) <= self._gone_for(data)
            if late.any():
                self._send_late(batch.take(np.flatnonzero(late)))
            kept = np.flatnonzero(~late)
            if not kept.size:
                return
            data, times = columns_of(batch.take(kept), self._step), times[kept]
            parts = parts_of(self._grid, times)
        self._add(KeyedRows(self._plan, self._hasher, data, times), parts)

    def _send_late(self, late: Batch) -> None:
        data, times = columns_of(late, self._step), late.timestamps
        assert times is not None
        now: int | Index = self._watermark
        if self._ahead is not None:
            groups = self._groups_of([data.column(key) for key in self._plan.keys])
            now = self._ahead.now(groups, self._watermark)
        self._late_output.send(late, now, lambda: last_windows(self._grid, times))

    def _gone_for(self, data: pa.RecordBatch) -> int | Index:
        """Return the last expired pane for each row."""
        if self._ahead is None:
            return self._table.gone
        groups = self._groups_of([data.column(key) for key in self._plan.keys])
        return self._ahead.gone_for(groups, self._table.gone)

    def _groups_of(self, columns: list[pa.Array]) -> Index:
        return key_groups(columns, self.context.max_parallelism)

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
        """The furthest event time of any key group; after a rescale key groups may differ."""
        return self._watermark if self._ahead is None else max(self._watermark, self._ahead.until)

    def _last_pane_due(self, watermark: int) -> int:
        """Return the last pane of any window that has fired at a watermark."""
        if watermark == WATERMARK_MIN:
            return WATERMARK_MIN
        return self._grid.panes_in(self._grid.ended(watermark + 1))[1]

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Fire due windows, earliest first; drop expired ones; forward the watermark."""
        before = self._watermark
        if timestamp > before:
            self._watermark = timestamp
            fired = self._fire(self._first_to_fire(before), self._grid.ended(timestamp + 1))
            self._emit(self._not_ahead(fired))
            self._drop_gone()
            self._table.sealed(self._last_pane_due(timestamp))
            if self._ahead is not None and self._ahead.caught_up(timestamp, self._table.gone):
                self._ahead = None
        self.output.emit_watermark(timestamp)

    def _drop_gone(self) -> None:
        after = self._watermark + 1
        self._table.drop(self._grid.kept_from(after - self._window.allowed_lateness_ms))

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

    def _not_ahead(self, fired: Iterable[Fired]) -> Iterable[Fired]:
        """Leave out results of key groups for which these windows had fired before a restore."""
        ahead = self._ahead
        if ahead is None:
            yield from fired
            return
        for result in fired:
            groups = self._groups_of(self._table.key_columns(result.keys))
            keep = np.flatnonzero(ahead.not_fired(groups, result.end - 1))
            columns = [column.take(pa.array(keep)) for column in result.columns]
            yield Fired(result.start, result.end, result.keys[keep], columns)

    # --- results of some keys ------------------------------------------------------------------

    def _fire_again(self, cells: Index) -> None:
        """Emit the new results of keys (cells, each once) in windows that fired and have not expired."""
        ahead = self._ahead
        if ahead is None:
            self._emit(self._results_again(cells, self._watermark, self._table.gone))
            return
        groups = self._groups_of(self._table.key_columns(self._table.cell_keys.data[cells]))
        watermarks, gone = (
            ahead.now(groups, self._watermark),
            ahead.gone_for(groups, self._table.gone),
        )
        for watermark, pane in sorted({*zip(watermarks.tolist(), gone.tolist(), strict=True)}):
            alike = cells[(watermarks == watermark) & (gone == pane)]
            self._emit(self._results_again(alike, watermark, pane))

    def _results_again(self, cells: Index, watermark: int, pane: int) -> Iterable[Fired]:
        """Yield the results of windows that had fired at a watermark; `pane` is the last expired one."""
        if watermark == WATERMARK_MIN:
            return ()
        after = watermark + 1
        gone = self._grid.ended(after - self._window.allowed_lateness_ms)
        if pane > NO_PANE:
            # also windows that a job with less allowed lateness has dropped
            gone = max(gone, self._grid.windows_of(pane)[1])
        due = self._grid.ended(after)
        return self._results_of(cells, gone + 1, due) if gone < due else ()

    def _emit_early(self, cells: Index) -> None:
        """Emit early results of what changed in these cells (each once)."""
        cells = cells[self._table.cell_panes.data[cells] > self._table.gone]
        first = self._first_to_fire(self._watermark)
        self._emit(self._not_ahead(self._results_of(cells, first, None)))

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
        return self._state.snapshot(self.context, self._watermark, self._ahead)

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `panes` and `watermark`."""
        return PaneState.infos(self._plan)

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the panes; watermark and expired pane are the least of those restored."""
        self._watermark, self._ahead = self._state.restore(self.context, state)
        if self._watermark > WATERMARK_MIN:
            self._drop_gone()
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
