"""The panes of a subtask in snapshots: a table of keys and panes, and the watermark per key group.

As in `window_aggregate.py`, deltas carry no marks of expired panes: the watermark table has the
start up to which all have expired.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from ...base import OperatorContext
from ...elements import WATERMARK_MIN
from ...time_progress import WATERMARK_COLUMN, KeyGroupTable, TimeProgress
from ..kinds import PaneWindow
from .table import PaneTable

PANES: Final = "panes"
PROGRESS: Final = KeyGroupTable(
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
        progress: TimeProgress,
        epoch: TableEpoch,
    ) -> None:
        self._window, self._plan, self._step = window, plan, step
        self._progress = progress
        self._grid, self._table, self._epoch = window.grid(), table, epoch

    @staticmethod
    def infos(plan: AggregatePlan) -> Sequence[StateInfo]:
        """Return the declarations of both tables."""
        return [
            aggregate_info(plan, PANES, "window"),
            PROGRESS.info(),
        ]

    def snapshot(self, context: OperatorContext) -> StateSnapshot:
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
        return StateSnapshot(
            tables={
                PANES: table_cut(self._plan, epoch, parts, context.max_parallelism),
                PROGRESS.name: self._progress.cut(self._window.identity),
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

    # --- restore -------------------------------------------------------------------------------

    def restore(self, state: RestoredState) -> None:
        """Restore the progress of event time, and the panes that have not expired."""
        self._epoch.restored()
        times = PROGRESS.restored(state)
        if times is not None:
            self._check_window(times)
        self._progress.restore(state)
        if (expired := self._progress.bounds[0]) > WATERMARK_MIN:
            # Not the pane before that of the next instant: days that a zone skips begin with it too.
            self._table.gone = self._grid.pane_of(expired)
        rows = state.tables.get(PANES)
        if rows is not None and rows.num_rows:
            self._restore_rows(rows, state.states.get(PANES))

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
