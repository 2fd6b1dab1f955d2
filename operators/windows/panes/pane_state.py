"""The panes of a subtask in snapshots: a table of keys and panes, and the watermark per key group.

As in `window_aggregate.py`, deltas carry no marks of expired panes: the watermark table has the
start up to which all have expired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from ....errors import StateError
from ....state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ....state.slots.key_index import KeyCut, plain_column
from ....state.snapshot import (
    KEY_GROUP_COLUMN,
    RestoredState,
    StateInfo,
    StateSnapshot,
)
from ....state.values import Array, Index
from ...aggregation.aggregate_tables import CutPart, aggregate_info, restored_rows, table_cut
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import GroupCut, Rows
from ...ahead import Ahead
from ...base import OperatorContext
from ...elements import WATERMARK_MIN
from ...key_group_times import WATERMARK_COLUMN, by_group, times_cut, times_info, times_schema
from ..kinds import PaneWindow
from .table import NO_PANE, PaneTable

PANES: Final = "panes"
WATERMARK: Final = "watermark"
_GONE_THROUGH: Final = "gone_through"
_WATERMARK_SCHEMA: Final = times_schema(WATERMARK_COLUMN, _GONE_THROUGH).append(
    pa.field("window", pa.string(), False)
)
"""`gone_through`: panes that start at this time (ms) or before have expired.

`window`: their window.
"""
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class CellKeys(KeyCut):
    """The keys of cells at a cut."""

    _of_cells: Array

    def take(self, which: Rows | slice) -> list[pa.ChunkedArray]:
        """Return the keys of these cells."""
        slots = self._of_cells[which]
        order = np.argsort(slots, kind="stable")
        back = np.empty(len(order), np.intp)
        back[order] = np.arange(len(order))
        indices = pa.array(back)
        # slots=True makes a new class of this one, so super() would not find it
        columns = KeyCut.take(self, slots[order])
        return [pa.chunked_array([plain_column(column).take(indices)]) for column in columns]


class PaneState:
    """Snapshots and restores a `PaneTable`."""

    def __init__(
        self,
        window: PaneWindow,
        plan: AggregatePlan,
        step: str,
        table: PaneTable,
        epoch: TableEpoch,
    ) -> None:
        self._window, self._plan, self._step = window, plan, step
        self._grid, self._table, self._epoch = window.grid(), table, epoch

    @staticmethod
    def infos(plan: AggregatePlan) -> Sequence[StateInfo]:
        """Return the declarations of both tables."""
        return [
            aggregate_info(plan, PANES, "window"),
            times_info(WATERMARK, "window", _WATERMARK_SCHEMA),
        ]

    def snapshot(
        self, context: OperatorContext, watermark: int, ahead: Ahead | None
    ) -> StateSnapshot:
        """Return a cut of the current state."""
        epoch, table = self._epoch.cut(), self._table
        keys = table.keys.cut()
        # Only cells that the cut knows are read, and their keys and panes never change.
        of_cells, panes, gone = table.cell_keys.data, table.cell_panes.data, table.gone

        def alive(which: Rows) -> Rows:
            held = panes[which]
            if not held.size or int(held.min()) > gone:
                return which
            kept = np.flatnonzero(held > gone)
            return kept if isinstance(which, slice) else which[kept]

        def bounds(which: Rows) -> list[Array]:
            return self._bounds(panes[which])

        group = GroupCut(CellKeys(keys._pieces, keys.size, of_cells), table.state.cut(epoch))
        parts = [CutPart(group, bounds, 0, alive)]
        times: tuple[int | Index, int | Index] = (watermark, self._gone_through(gone))
        if ahead is not None:
            watermarks, gone_panes = ahead.cut(context.key_groups, watermark, gone)
            times = (watermarks, _each(self._gone_through, gone_panes))
        return StateSnapshot(
            tables={
                PANES: table_cut(self._plan, epoch, parts, context.max_parallelism),
                WATERMARK: times_cut(
                    context.key_groups,
                    _WATERMARK_SCHEMA,
                    *times,
                    self._window.identity,
                ),
            }
        )

    def _bounds(self, panes: Array) -> list[Array]:
        """Return start and end of the pane of each cell."""
        numbers, which = np.unique(panes, return_inverse=True)
        found = [self._grid.pane_bounds(number) for number in numbers.tolist()]
        return [np.array(edge, np.int64)[which] for edge in zip(*found, strict=True)] or [
            np.empty(0, np.int64),
            np.empty(0, np.int64),
        ]

    def _gone_through(self, gone: int) -> int:
        """Return the time up to which panes that start have expired; `gone` is the last of them."""
        if gone == NO_PANE:
            return int(_INT64.min)
        kept = self._grid.pane_bounds(gone + 1)[0]
        return max(int(_INT64.min), min(kept - 1, int(_INT64.max)))

    # --- restore -------------------------------------------------------------------------------

    def restore(self, context: OperatorContext, state: RestoredState) -> tuple[int, Ahead | None]:
        """Restore panes; return the watermark, and the key groups that are ahead of it.

        For those, the expired panes are given as pane numbers.
        """
        self._epoch.restored()
        watermark, ahead = WATERMARK_MIN, None
        watermarks = state.tables.get(WATERMARK)
        if watermarks is not None and watermarks.num_rows:
            self._check_window(watermarks)
            watermark = int(watermarks.column(WATERMARK_COLUMN).to_numpy().min())
            gone_through = int(watermarks.column(_GONE_THROUGH).to_numpy().min())
            self._table.gone = self._gone_pane(gone_through)
            groups = context.max_parallelism
            times = by_group(watermarks, WATERMARK_COLUMN, groups)
            gone = _each(self._gone_pane, by_group(watermarks, _GONE_THROUGH, groups))
            gone = np.maximum(gone, _each(self._gone_at, times))  # by today's lateness
            ahead = Ahead.restored(times, watermark, gone)
        rows = state.tables.get(PANES)
        if rows is not None and rows.num_rows:
            self._restore_rows(context, rows, watermarks, state.states.get(PANES))
        return watermark, ahead

    def _gone_at(self, watermark: int) -> int:
        """Return the last pane that has expired at `watermark`."""
        if watermark == WATERMARK_MIN:
            return NO_PANE
        return self._grid.kept_from(watermark + 1 - self._window.allowed_lateness_ms) - 1

    def _gone_pane(self, gone_through: int) -> int:
        """Return the last expired pane; see `_gone_through`."""
        if gone_through == _INT64.min:
            return NO_PANE
        # Not the pane before that of the next instant: days that a zone skips begin with it too.
        return self._grid.pane_of(gone_through)

    def _restore_rows(
        self,
        context: OperatorContext,
        table: pa.Table,
        watermarks: pa.Table | None,
        info: StateInfo | None,
    ) -> None:
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        table = restored_rows(self._plan, table, info, self._step)
        starts: Index = table.column("window_start").cast(pa.int64()).to_numpy()
        gone = by_group(watermarks, _GONE_THROUGH, context.max_parallelism)
        kept = np.flatnonzero(starts > gone[groups])
        if not kept.size:
            return
        panes = self._grid.panes_of(starts[kept])
        order = np.argsort(panes, kind="stable")
        table = table.take(pa.array(kept[order]))
        columns = [plain_column(table.column(key)) for key in self._plan.keys]
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


def _each(function: Callable[[int], int], values: Index) -> Index:
    """Apply a function to many numbers, most of them equal."""
    different, which = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in different.tolist()], np.int64)[which]
