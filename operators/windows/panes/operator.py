"""Aggregates per key and window of panes: sliding and cumulative windows, and tumbling ones of a zone.

A row is added to its pane, and so to all windows of the pane. It is late if the last of them has
expired. Until then, those that have fired and not expired emit the new result of its key again. The
table of the snapshot has a row per key and pane, and the progress of event time has the start up to
which panes have expired. `windowed_aggregate.py` says what this has in common with other windows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from ....errors import StateError
from ....state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ....state.slots.key_index import BatchKeys, KeyIndex, plain_column
from ....state.snapshot import KEY_GROUP_COLUMN, RestoredState, StateInfo, StateSnapshot
from ....state.values import Array, Index
from ...aggregation.aggregate_tables import (
    CutPart,
    aggregate_info,
    files_of_another_backend,
    restored_rows,
    table_cut,
)
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import GroupCut, KeyedRows, Rows
from ...aggregation.spilling_group import lies_on_disk
from ...base import OperatorContext
from ...elements import WATERMARK_MAX, WATERMARK_MIN, Batch
from ...rollback import Rollback
from ...time_progress import WATERMARK_COLUMN, KeyGroupTable, TimeProgress, clamped
from ..committed import CommittedWindows
from ..kinds import PaneWindow
from ..late import last_windows
from ..windowed_aggregate import Fired, WindowedAggregate
from .early import ChangedCells, EarlyResults
from .grid import Grid, windows_with
from .spilling import SpillingPanes
from .table import NO_PANE, CellKeys, KeptPanes, PaneTable, parts_of
from .totals import Between, Members, RunningTotals, Totalled, Totals, TwoStacks, has_running_totals

_PANES: Final = "panes"
_PROGRESS: Final = KeyGroupTable(
    "watermark",
    "window",
    (
        pa.field(WATERMARK_COLUMN, pa.int64(), False),
        pa.field("gone_through", pa.int64(), False),
        pa.field("window", pa.string(), False),
    ),
)
"""`gone_through`: panes that start at this time (ms) or before have expired.

`window`: their window.
"""


def _kept_from(grid: Grid, lateness_ms: int, watermark: int) -> int:
    """Return the first pane that has not expired at a watermark."""
    return grid.kept_from(watermark + 1 - lateness_ms)


def _expired_at(grid: Grid, lateness_ms: int, watermark: int) -> int:
    """Return the end of the last pane that has expired at a watermark, inclusive."""
    return clamped(grid.pane_bounds(_kept_from(grid, lateness_ms, watermark))[0] - 1)


class PaneAggregate(WindowedAggregate):
    """Aggregates over windows of panes, per key or without keys."""

    def __init__(
        self,
        window: PaneWindow,
        plan: AggregatePlan,
        step: str = "window",
        *,
        committed: bool = False,
    ) -> None:
        self._window, self._grid = window, window.grid()
        expired_at = partial(_expired_at, self._grid, window.allowed_lateness_ms)
        super().__init__(plan, step, _PROGRESS, expired_at, committed=committed)
        self._disk: SpillingPanes | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._table = PaneTable(self._plan, self._hasher, self._epoch)
        self._early = EarlyResults(self._window.early, context, self._emit_early)
        self._changed = ChangedCells()
        self._table.on_moved += [self._renew_totals, self._changed.moved]
        self._renew_totals()
        if lies_on_disk(self._plan, context):
            self._disk = SpillingPanes(self._plan, context, _PANES, self._grid)
        else:
            self._rollback = Rollback(context.options, _PANES, self._open_kept)

    @property
    def _spilling(self) -> SpillingPanes | None:
        """The panes on disk if they are there, instead of `_table`."""
        disk = self._disk
        return disk if disk is not None and disk.active else None

    def _move_to_disk(self) -> None:
        """Move the panes to disk if they take too much memory."""
        disk = self._disk
        if disk is not None and not disk.active and self._table.nbytes > disk.room:
            disk.take_over(self._table, self._changed.take())
            self._table = PaneTable(self._plan, self._hasher, self._epoch)
            self._renew_totals()

    def _renew_totals(self, _: Index | None = None) -> None:
        self._totals = self._new_totals(self._table.between)

    def _new_totals(self, between: Between, table: PaneTable | None = None) -> Totals:
        exact = all(has_running_totals(spec) for spec in self._plan.specs)
        kind = RunningTotals if exact else TwoStacks
        return kind(self._plan, between, (table or self._table).state)

    # --- records -------------------------------------------------------------------------------

    def _last_windows(self, times: Index) -> tuple[Index, Index]:
        return last_windows(self._grid, times)

    def _add(
        self, batch: Batch, rows: KeyedRows, times: Index, groups: Index | None, earliest: int
    ) -> None:
        if self._spilling is not None:
            self._add_spilling(self._spilling, rows, times, earliest)
            return
        self._add_in_memory(rows, times, earliest)
        self._move_to_disk()

    def _add_in_memory(self, rows: KeyedRows, times: Index, earliest: int) -> None:
        parts = parts_of(self._grid, times, earliest)
        table, totals = self._table, self._totals
        known = table.state.size
        cells = table.place(rows, parts)
        if self._old is not None and self._old.keeps:
            self._keep(self._old, *table.first_changes(cells))
        behind = parts[0][0] <= max(totals.last, self._last_pane_due(self.latest))
        if not behind:
            table.add(rows, cells)
            self._note_changed(cells, rows.size)
            return
        touched = np.unique(cells)
        panes = table.cell_panes.data[touched]
        inside = touched[(panes >= totals.first) & (panes <= totals.last)]
        before = inside[inside < known]
        totals.before_add(table.cell_keys.data[before], before)
        table.add(rows, cells)
        totals.after_add(table.cell_keys.data[inside], inside)
        self._fire_again(touched)
        self._note_changed(cells, rows.size)

    def _keep(self, old: CommittedWindows, held: Index, fresh: Index) -> None:
        """Keep cells of panes in memory that are about to change, and that new ones did not exist."""
        table, cells = self._table, np.concatenate([held, fresh])

        def read(places: Index) -> tuple[Index, list[pa.Array]]:
            owners = np.flatnonzero(places < len(held))
            return owners, table.state.columns(cells[places[owners]])

        if cells.size:
            keys = table.keys.take(table.cell_keys.data[cells])
            old.keep(keys, table.cell_panes.data[cells], read)

    def _note_changed(self, cells: Index, rows: int) -> None:
        """Note what changed, if there are early results; may emit them."""
        if self._window.early:
            (self._changed if self._spilling is None else self._spilling.changed).note(cells)
            self._early.note(rows)

    def _add_spilling(
        self, spilling: SpillingPanes, rows: KeyedRows, times: Index, earliest: int
    ) -> None:
        cells = spilling.add(rows, self._grid.panes_of(times), self._old)
        if self._grid.pane_of(earliest) <= self._last_pane_due(self.latest):
            self._fire_again(np.unique(cells))
        self._note_changed(cells, rows.size)
        spilling.settle()

    def _last_pane_due(self, watermark: int) -> int:
        """Return the last pane of any window that has fired at a watermark."""
        if watermark == WATERMARK_MIN:
            return WATERMARK_MIN
        return self._grid.panes_in(self._grid.ended(watermark + 1))[1]

    # --- time ----------------------------------------------------------------------------------

    def _due(self, before: int, watermark: int) -> Iterator[Fired]:
        return self._fire(self._first_to_fire(before), self._grid.ended(watermark + 1))

    def _drop_expired(self, watermark: int) -> None:
        kept_from = _kept_from(self._grid, self._window.allowed_lateness_ms, watermark)
        if self._old is not None and self._old.keeps:
            self._keep_expired(self._old, kept_from)
        if self._spilling is not None:
            self._spilling.drop(kept_from)
            return
        self._table.drop(kept_from)
        self._rollback.grew()  # cells that were moved stay in kept cuts
        self._table.sealed(self._last_pane_due(watermark))

    def _keep_expired(self, old: CommittedWindows, kept_from: int) -> None:
        """Keep the cells of panes that are about to be dropped."""
        if self._spilling is not None:
            for keys, panes, state in self._spilling.cells_before(kept_from):
                if not old.keeps:
                    return  # it is too much
                old.keep_all(keys, panes, state)
            return
        for pane in self._table.between(NO_PANE, kept_from - 1):
            self._keep(old, pane.members()[1], np.zeros(0, np.intp))

    def _first_to_fire(self, before: int) -> int:
        return WATERMARK_MIN if before == WATERMARK_MIN else self._grid.ended(before + 1) + 1

    def _fire(self, window: int, last: int) -> Iterator[Fired]:
        """Yield the results of the windows `window` to `last` that have any."""
        grid, table, totals, spilling = self._grid, self._table, self._totals, self._spilling
        while window <= last:
            panes = (WATERMARK_MIN, WATERMARK_MIN)
            if window > WATERMARK_MIN:
                panes = grid.panes_in(window)
            found = (table if spilling is None else spilling).next_from(panes[0])
            if found is None:
                return
            if found > panes[1]:
                window = max(window + 1, grid.windows_of(found)[0])
                continue
            if grid.is_real(window) and spilling is not None:
                for keys, values in spilling.totals(*panes):
                    yield Fired.of_window(*grid.bounds(window), len(values[0]), keys, values)
            elif grid.is_real(window):
                totals.move(*panes, table.key_count)
                yield _fired(*grid.bounds(window), *totals.results())
            window += 1

    def _key_columns(self, slots: Index) -> list[pa.Array]:
        return self._table.key_columns(slots)

    # --- results of some keys ------------------------------------------------------------------

    def _fire_again(self, cells: Index) -> None:
        """Emit the new results of keys (cells, each once) in windows that fired and have not expired."""
        groups = self._progress.groups_of(lambda: self._keys_of_cells(cells))
        now, expired = self._progress.now(groups), self._progress.expired(groups)
        if isinstance(now, int) or isinstance(expired, int):
            self._emit(
                self._results_again(cells, self._progress.watermark, self._progress.bounds[0])
            )
            return
        for watermark, bound in sorted({*zip(now.tolist(), expired.tolist(), strict=True)}):
            alike = cells[(now == watermark) & (expired == bound)]
            self._emit(self._results_again(alike, watermark, bound))

    def _keys_of_cells(self, cells: Index) -> list[pa.Array]:
        if self._spilling is not None:
            return self._spilling.keys_and_panes(cells)[0]
        return self._table.key_columns(self._table.cell_keys.data[cells])

    def _results_again(self, cells: Index, watermark: int, expired: int) -> Iterable[Fired]:
        """Yield the results of windows that had fired at a watermark and have not expired."""
        if watermark == WATERMARK_MIN:
            return ()
        after = watermark + 1
        last = self._last_expired(watermark, expired)
        due = self._grid.ended(after)
        if last >= due:
            return ()
        if self._spilling is None:
            return self._results_of(cells, last + 1, due)
        return self._results_on_disk(
            self._spilling, *self._spilling.keys_and_panes(cells), last + 1, due
        )

    def _results_on_disk(
        self,
        spilling: SpillingPanes,
        keys: list[pa.Array],
        panes: Index,
        low: int,
        high: int | None,
    ) -> Iterator[Fired]:
        for window, columns, values in spilling.results_of(keys, panes, low, high):
            yield Fired.of_window(*self._grid.bounds(window), len(values[0]), columns, values)

    def _windows_of(self, columns: list[pa.Array]) -> Iterator[Fired]:
        groups, spilling = self._progress.groups_of(lambda: columns), self._spilling
        if spilling is None:
            yield from self._in_table(self._table, columns, self._progress)
            return
        for place in range(len(columns[0])):
            one = [column.slice(place, 1) for column in columns]
            low = self._first_open(
                self._progress, None if groups is None else groups[place : place + 1]
            )
            for fired in self._on_disk(spilling, one, low):
                yield replace(fired, keys=np.full(len(fired), place))

    def _windows_as_of(self, columns: list[pa.Array], checkpoint_id: int) -> Iterator[Fired]:
        old = self._old
        assert old is not None
        # A table of the cells that these keys had.
        keys, table = columns, PaneTable(self._plan, self._hasher, TableEpoch())
        if keys:
            index = KeyIndex(self._hasher)
            index.lookup(BatchKeys(self._hasher, columns))
            keys = index.keys()
        kept = old.find(keys, checkpoint_id)
        parts = [
            (places, panes.to_numpy(), self._plan.state_table(state))
            for places, (panes, *state) in kept.rows
        ]
        for places, panes, state in (self._spilling or self._table).cells_of(keys):
            others = np.flatnonzero(~kept.is_kept(places, panes))
            parts.append((places[others], panes[others], state.take(pa.array(others))))
        if not any(len(places) for places, _, _ in parts):
            return
        at = pa.array(np.concatenate([places for places, _, _ in parts]))
        panes = np.concatenate([panes for _, panes, _ in parts])
        cells = pa.concat_tables([state for _, _, state in parts])
        table.load([key.take(at) for key in keys], panes, cells, RESTORED_EPOCH)
        yield from self._in_table(table, columns, old.progress_at(checkpoint_id))

    def _in_table(
        self, table: PaneTable, columns: list[pa.Array], progress: TimeProgress
    ) -> Iterator[Fired]:
        """Yield the windows of some keys that have not expired, as `_windows_of` does."""
        groups = progress.groups_of(lambda: columns)
        if groups is None:
            yield from self._open_in(table, columns, self._first_open(progress, None))
            return
        for place in range(len(columns[0])):
            one = [column.slice(place, 1) for column in columns]
            low = self._first_open(progress, groups[place : place + 1])
            for fired in self._open_in(table, one, low):
                yield replace(fired, keys=np.full(len(fired), place))

    def _open_in(self, table: PaneTable, columns: list[pa.Array], low: int) -> Iterator[Fired]:
        """Yield the windows of some keys from `low` on; their keys are places, as in `_windows_of`."""
        slots = table.find_keys(columns)
        keys = np.unique(slots[slots >= 0])
        held = [pane.find(keys)[1] for pane in table.between(WATERMARK_MIN, WATERMARK_MAX)]
        if not keys.size or not held:
            return
        for fired in self._results_of(np.concatenate(held), low, None, table):
            assert not isinstance(fired.keys, list)
            rows = {slot: row for row, slot in enumerate(fired.keys.tolist())}
            places = np.array([at for at, slot in enumerate(slots.tolist()) if slot in rows])
            taken = fired.take(np.array([rows[slot] for slot in slots[places].tolist()]))
            yield replace(taken, keys=places)

    def _on_disk(
        self, spilling: SpillingPanes, columns: list[pa.Array], low: int
    ) -> Iterator[Fired]:
        """Yield the windows of one key from `low` on."""
        panes = spilling.panes_with(columns)
        repeated = [column.take(pa.array(np.zeros(len(panes), np.intp))) for column in columns]
        if panes.size:
            yield from self._results_on_disk(spilling, repeated, panes, low, None)

    def _keys_now(self, ending: ExitStack) -> Iterator[list[pa.Array]]:
        if self._spilling is None:
            return self._table.keys.cut().pieces()
        pieces, close = self._spilling.keys_now()
        ending.callback(close)
        return pieces

    def _first_open(self, progress: TimeProgress, groups: Index | None) -> int:
        """Return the first window that has not expired for a key, which has this key group."""
        now = int(np.max(progress.now(groups)))
        expired = int(np.max(progress.expired(groups)))
        return self._last_expired(now, expired) + 1 if now > WATERMARK_MIN else WATERMARK_MIN

    def _last_expired(self, watermark: int, expired: int) -> int:
        """Return the last window that has expired at a watermark, and at an expiry bound."""
        last = self._grid.ended(watermark + 1 - self._window.allowed_lateness_ms)
        if expired > WATERMARK_MIN:
            # also windows that a job with less allowed lateness has dropped
            last = max(last, self._grid.windows_of(self._grid.pane_of(expired))[1])
        return last

    def _emit_early(self) -> None:
        """Emit early results of what has changed since the last ones."""
        first = self._first_to_fire(self._progress.watermark)
        if self._spilling is None:
            cells = self._changed.take()
            cells = cells[self._table.cell_panes.data[cells] > self._table.expired]
            self._emit(map(self._not_fired, self._results_of(cells, first, None)))
            return
        for keys, panes in self._spilling.take_changed():
            found = self._results_on_disk(self._spilling, keys, panes, first, None)
            self._emit(map(self._not_fired, found))

    def _results_of(
        self, cells: Index, low: int, high: int | None, table: PaneTable | None = None
    ) -> Iterator[Fired]:
        """Yield results of windows `low` to `high`, for the keys that these cells of the window have.

        The cells are of `table`, by default of the one to which rows are added.
        """
        table, grid = table or self._table, self._grid
        panes = table.cell_panes.data[cells]
        windows = windows_with(grid, np.unique(panes).tolist(), low, high)
        if not windows:
            return
        keys, which = np.unique(table.cell_keys.data[cells], return_inverse=True)
        totals = self._new_totals(_some_keys(table, keys), table)
        for window in windows:
            first, last = grid.panes_in(window)
            totals.move(first, last, len(keys))
            touched = np.zeros(len(keys), np.bool_)
            touched[which[(panes >= first) & (panes <= last)]] = True
            found, columns = _only(touched, *totals.results())
            yield _fired(*grid.bounds(window), keys[found], columns)

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `panes` (one row per key and pane) and `watermark` (per key group)."""
        self._note_cut(checkpoint_id)
        progress = {_PROGRESS.name: self._progress.cut(self._window.identity)}
        if self._spilling is not None:
            return StateSnapshot(
                tables=progress, files={_PANES: self._spilling.snapshot(self._bounds)}
            )
        epoch, table = self._epoch.cut(), self._table
        keys = table.keys.cut()
        # Only cells that the cut knows are read, and their keys and panes never change.
        of_cells, panes, expired = table.cell_keys.data, table.cell_panes.data, table.expired

        def alive(which: Rows) -> Rows:
            held = panes[which]
            if not held.size or int(held.min()) > expired:
                return which
            kept = np.flatnonzero(held > expired)
            return kept if isinstance(which, slice) else which[kept]

        def bounds(which: Rows) -> list[Array]:
            return self._bounds(panes[which])

        self._rollback.cut(checkpoint_id)
        group = GroupCut(CellKeys(keys._pieces, keys.size, of_cells), table.state.cut(epoch))
        parts = [CutPart(group, bounds, alive)]
        panes_cut = table_cut(self._plan, epoch, parts, self.context.max_parallelism)
        return StateSnapshot(tables={_PANES: panes_cut, **progress})

    def _open_kept(self) -> KeptPanes:
        """Open a cut to which the panes can go back; see `Rollback`."""
        return self._table.keep(self._rollback.grew)

    def _bounds(self, panes: Array) -> list[Array]:
        """Return start and end of the pane of each cell."""
        numbers, which = np.unique(panes, return_inverse=True)
        found = [self._grid.pane_bounds(number) for number in numbers.tolist()]
        return [np.array(edge, np.int64)[which] for edge in zip(*found, strict=True)] or [
            np.empty(0, np.int64),
            np.empty(0, np.int64),
        ]

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `panes` and `watermark`."""
        return [aggregate_info(self._plan, _PANES, "window"), _PROGRESS.info()]

    @property
    def _uses_disk(self) -> bool:
        return self._disk is not None

    def _restore(self, state: RestoredState) -> None:
        """Restore the progress of event time, and the panes that have not expired."""
        self._epoch.restored()
        times = _PROGRESS.restored(state)
        if times is not None:
            self._check_window(times)
        self._progress.restore(state)
        if (expired := self._progress.bounds[0]) > WATERMARK_MIN:
            # Not the pane before that of the next instant: days that a zone skips begin with it too.
            self._table.expired = self._grid.pane_of(expired)
        files = state.files.get(_PANES)
        if self._disk is not None:
            self._disk.expiry.move(self._table.expired, self._further_panes())
            if files:
                self._disk.restore_files(files)
        elif files:
            raise files_of_another_backend(_PANES, self._step)
        kept = self._rollback.found(state)
        if kept is not None:
            self._table.go_back(kept)
        rows = state.tables.get(_PANES)
        if rows is not None and rows.num_rows:
            self._restore_rows(rows, state.states.get(_PANES))
        self._note_restored()
        self._rollback.restored(self.context.restored_checkpoint)

    def _further_panes(self) -> Index | None:
        """Return the last expired pane by key group; None while there is no need to tell them apart."""
        further = self._progress.further()
        if further is None:
            return None
        some = further > WATERMARK_MIN
        panes = np.full(len(further), NO_PANE)
        panes[some] = self._grid.panes_of(further[some])
        return panes

    def _restore_rows(self, table: pa.Table, info: StateInfo | None) -> None:
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        table = restored_rows(self._plan, table, info, self._step)
        starts: Index = table.column("window_start").cast(pa.int64()).to_numpy()
        kept = np.flatnonzero(starts > self._progress.expired(groups))
        if not kept.size:
            return
        panes = self._grid.panes_of(starts[kept])
        order = np.argsort(panes, kind="stable")
        table = table.take(pa.array(kept[order]))
        columns = [plain_column(table.column(key)) for key in self._plan.keys]
        if self._disk is not None and table.nbytes > self._disk.room:
            self._disk.active = True
        if self._spilling is not None:
            self._spilling.load(columns, panes[order], table)
        else:
            self._table.load(columns, panes[order], table, RESTORED_EPOCH)

    def _check_window(self, watermarks: pa.Table) -> None:
        """Raise StateError if these are panes of other windows."""
        found = watermarks.column("window")[0].as_py()
        if found != self._window.identity:
            raise StateError(
                f"the snapshot has other windows old=`{found}` new=`{self._window.identity}`",
                where=self._step,
                fix="keep size, slide, offset and zone of the window, or give the step another name",
            )

    def finish(self) -> Awaitable[None] | None:
        self._early.stop()
        return None

    def close(self) -> None:
        self._rollback.close()
        early: EarlyResults | None = getattr(self, "_early", None)
        if early is not None:
            early.stop()
        if self._disk is not None:
            self._disk.close()


def _fired(start: int, end: int, keys: Index, values: list[pa.Array]) -> Fired:
    return Fired.of_window(start, end, len(keys), keys, values)


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
